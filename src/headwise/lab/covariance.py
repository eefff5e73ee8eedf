"""What it costs to remove heads, as the lab's experiments ask for it.

The closed form is :class:`headwise.plans.LayerCost`, with a pseudo-inverse instead of a ridge, from the outputs of a
layer's heads themselves and as a share of the variance of the layer's output.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np
from torch import Tensor

from headwise.errors import InputError
from headwise.plans import LayerCost

__all__ = ["RemovalCost"]


class RemovalCost:
    """The cost of every set of heads of one layer.

    Args:
        z: (rows, H, d_v) outputs of the heads on calibration data.
        W_O: (H * d_v, d_model).
        repaired: True: W_O of the kept heads is refitted by least squares, with an intercept; False: it stays, and
            the removed heads are replaced by their mean.

    Example:
        >>> import torch
        >>> z = torch.randn(100, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> z = torch.cat([z, z[:, :1]], 1)  # head 2 is a copy of head 0
        >>> cost = RemovalCost(z, torch.eye(9, dtype=torch.float64))
        >>> cost([0]) < 1e-9, cost([2]) < 1e-9, cost([0, 2]) > 0.1
        (True, True, True)
    """

    def __init__(self, z: Tensor, W_O: Tensor, *, repaired: bool = True) -> None:
        rows, self.heads, self.d_v = z.shape
        if W_O.shape[0] != self.heads * self.d_v:
            raise InputError(
                f"W_O must have {self.heads} x {self.d_v} = {self.heads * self.d_v} rows, got {W_O.shape[0]}"
            )
        flat = z.detach().double().flatten(1).cpu().numpy()
        flat = flat - flat.mean(0)
        covariance, weight = flat.T @ flat / rows, W_O.detach().double().cpu().numpy()
        self.energy = float(((covariance @ weight) * weight).sum())
        self._cost = LayerCost(
            covariance,
            weight,
            self.heads,
            energy=self.energy or float(np.finfo(np.float64).tiny),
            repair="least_squares" if repaired else "bias",
            ridge=0.0,
        )

    def __call__(self, removed: Iterable[int]) -> float:
        """Share of the variance of the layer's output that is lost without ``removed``, >= 0."""
        return self._cost(removed)

    def alone(self) -> list[float]:
        """The cost of each head by itself."""
        return [self([head]) for head in range(self.heads)]

    def greedy(self, count: int) -> tuple[int, ...]:
        """``count`` heads, each time the one that is cheapest given those that have gone."""
        gone: list[int] = []
        for _ in range(count):
            gone.append(
                min((head for head in range(self.heads) if head not in gone), key=lambda head: self([*gone, head]))
            )
        return tuple(gone)

    def best(self, count: int) -> tuple[int, ...]:
        """The cheapest set of ``count`` heads, by trying every one."""
        return min(combinations(range(self.heads), count), key=self)

    def most_within(self, budget: float) -> int:
        """The largest number of heads that can go together at a cost of at most ``budget``."""
        return max(count for count in range(self.heads + 1) if self(self.best(count)) <= budget)

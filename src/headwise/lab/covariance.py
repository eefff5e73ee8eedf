"""What it costs to remove heads, in closed form from the covariance of their outputs.

Let z be the concatenated head outputs of a layer and C = E[z z^T], centred. If only the heads K are kept, the best
linear read-out of what the others wrote is ``C_KK^-1 C_K:``, and what is lost of the layer's output in spite of it is
the Schur complement ``tr(W_O^T (C - C_:K C_KK^-1 C_K:) W_O)``. It depends on which other heads have gone: of two copies
each is free, both together are dear.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import torch
from torch import Tensor

from headwise.errors import InputError

__all__ = ["RemovalCost"]

#: Directions of the kept heads below this share of the largest variance count as absent (copies make C_KK singular).
RELATIVE_TOLERANCE = 1e-9


class RemovalCost:
    """The cost of every set of heads of one layer.

    Args:
        z: (rows, H, d_v) outputs of the heads on calibration data.
        W_O: (H * d_v, d_model).
        repaired: True: W_O of the kept heads is refitted by least squares, with an intercept; False: it stays, and
            the removed heads are replaced by their mean.

    Example:
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
        flat = z.double().flatten(1)
        flat = flat - flat.mean(0)
        self.covariance = flat.T @ flat / rows
        self.W_O = W_O.double()
        self.repaired = repaired
        self._known: dict[frozenset[int], float] = {}
        self.energy = float(torch.einsum("ij,ie,je->", self.covariance, self.W_O, self.W_O))

    def _columns(self, heads: Iterable[int]) -> Tensor:
        chosen = sorted(set(heads))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < self.heads:
            raise InputError(f"heads must lie in 0 to {self.heads - 1}, got {chosen}")
        return (torch.tensor(chosen, dtype=torch.int64)[:, None] * self.d_v + torch.arange(self.d_v)).flatten()

    def __call__(self, removed: Iterable[int]) -> float:
        """Share of the variance of the layer's output that is lost without ``removed``, >= 0."""
        gone = frozenset(removed)
        if gone not in self._known:
            self._known[gone] = self._cost(gone)
        return self._known[gone]

    def _cost(self, gone: frozenset[int]) -> float:
        out = self._columns(gone)
        if not len(out):
            return 0.0
        C, W = self.covariance, self.W_O[out]
        lost = C[out][:, out]
        if self.repaired:
            kept = self._columns(set(range(self.heads)) - gone)
            inverse = torch.linalg.pinv(C[kept][:, kept], rtol=RELATIVE_TOLERANCE, hermitian=True)
            lost = lost - C[out][:, kept] @ inverse @ C[kept][:, out]
        return max(0.0, float((lost @ W * W).sum())) / self.energy

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

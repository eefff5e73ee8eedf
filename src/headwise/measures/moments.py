"""Count, mean and squared deviation per head, folded batch by batch in float64.

The merge is that of Chan, Golub and LeVeque (1979), so the order and the cutting of the data do
not change a number beyond rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.heads import Moments

__all__ = ["SiteMoments"]

_CLASSES = ("token", "special")


class SiteMoments:
    """The moments of all measures of one site, for token rows and for special-token rows."""

    def __init__(self, heads: int, measures: tuple[str, ...]) -> None:
        self._index = {name: at for at, name in enumerate(measures)}
        zeros = np.zeros((len(measures), heads))
        self._moments = {name: Moments(zeros.copy(), zeros.copy(), zeros.copy()) for name in _CLASSES}

    def add(self, row_class: str, values: Mapping[str, tuple[Tensor, Tensor | None]], counted: Tensor) -> None:
        """Fold in rows: ``values[measure]`` is (B, H, Q) and the rows that have a value; ``counted`` (B, H, Q) those of the class."""
        if not bool(counted.any()):
            return
        whole = self._moments[row_class]
        count, mean, m2 = (np.zeros_like(whole.count) for _ in range(3))
        for name, (value, has) in values.items():
            at = self._index[name]
            count[at], mean[at], m2[at] = _reduce(value, counted if has is None else counted & has)
        self._moments[row_class] = whole.merge(Moments(count, mean, m2))

    def of(self, measure: str, row_class: str) -> Moments:
        """The moments of one measure over heads."""
        whole, at = self._moments[row_class], self._index[measure]
        return Moments(whole.count[at], whole.mean[at], whole.m2[at])

    def any_rows(self, measure: str) -> bool:
        """Whether any row of either class had a value."""
        return any(bool((self.of(measure, name).count > 0).any()) for name in _CLASSES)


def _reduce(value_BHQ: Tensor, counted_BHQ: Tensor) -> tuple[NDArray[np.float64], ...]:
    """Count, mean and sum of squared deviations over batch and query, per head."""
    counted = counted_BHQ.expand_as(value_BHQ)
    value = torch.where(counted, value_BHQ.detach().double(), 0.0)
    count = counted.sum(dim=(0, 2)).double()
    mean = value.sum(dim=(0, 2)) / count.clamp(min=1)
    deviation = torch.where(counted, value - mean[None, :, None], 0.0)
    m2 = deviation.square().sum(dim=(0, 2))
    return tuple(part.cpu().numpy() for part in (count, mean, m2))

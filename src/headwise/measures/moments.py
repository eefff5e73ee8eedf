"""Count, mean and squared deviation per head, folded batch by batch in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.heads import Moments, RowClass

__all__ = ["SiteMoments"]

_CLASSES: Final[tuple[RowClass, ...]] = ("token", "special")


class SiteMoments:
    """The moments of all measures of one site, for token rows and for special-token rows."""

    def __init__(self, heads: int, measures: tuple[str, ...]) -> None:
        self.heads = heads
        self._at = {name: index for index, name in enumerate(measures)}
        self._moments: dict[RowClass, Moments] = {name: Moments.empty(heads * len(measures)) for name in _CLASSES}

    def add(self, row_class: RowClass, values: Mapping[str, tuple[Tensor, Tensor | None]], counted: Tensor) -> None:
        """Fold in the rows of one call.

        Args:
            row_class: whose rows.
            values: for each measure its value per row (B, H, Q), and the rows that have one (None: all).
            counted: (B, H, Q) bool, the rows of this class.
        """
        if not bool(counted.any()):
            return
        count, mean, m2 = (np.zeros((len(self._at), self.heads)) for _ in range(3))
        for name, (value, has) in values.items():
            at = self._at[name]
            count[at], mean[at], m2[at] = _reduce(value, counted if has is None else counted & has)
        call = Moments(count.ravel(), mean.ravel(), m2.ravel())
        self._moments[row_class] = self._moments[row_class].merge(call)

    def set(self, measure: str, value: Tensor) -> None:
        """One number per head (H,), not a mean over rows: counted once; NaN is missing."""
        numbers = value.detach().double().cpu().numpy()
        at = slice(self._at[measure] * self.heads, (self._at[measure] + 1) * self.heads)
        old = self._moments["token"]
        count, mean, m2 = (np.array(part, np.float64) for part in (old.count, old.mean, old.m2))
        count[at], mean[at], m2[at] = ~np.isnan(numbers), numbers, 0.0
        self._moments["token"] = Moments(count, mean, m2)

    def of(self, measure: str, row_class: RowClass) -> Moments:
        """The moments of one measure over heads."""
        start = self._at[measure] * self.heads
        return self._moments[row_class].take(np.arange(start, start + self.heads))

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

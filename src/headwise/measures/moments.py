"""Count, mean and squared deviation per head, folded batch by batch in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.heads import Moments, RowClass

__all__ = ["SiteMoments"]

_CLASSES: Final[tuple[RowClass, ...]] = ("token", "special")

#: Numbers of several measures that are reduced at once.
_TOGETHER: Final = 2**22


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
        together = max(1, _TOGETHER // max(1, counted.numel()))
        for names in _in_parts(values, together):
            at = [self._at[name] for name in names]
            count[at], mean[at], m2[at] = _reduce([values[name] for name in names], counted)
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


def _in_parts(names: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """The names in tuples of ``size``, the last one shorter."""
    left = iter(names)
    while part := tuple(islice(left, size)):
        yield part


def _reduce(values: Sequence[tuple[Tensor, Tensor | None]], counted_BHQ: Tensor) -> tuple[NDArray[np.float64], ...]:
    """Count, mean and sum of squared deviations over batch and query, per measure and head."""
    counted = counted_BHQ.expand_as(values[0][0])
    keep = torch.stack([counted if has is None else counted & has for _, has in values])
    value = torch.stack([value.detach().double() for value, _ in values]).masked_fill_(~keep, 0.0)
    count = keep.sum(dim=(1, 3)).double()
    mean = value.sum(dim=(1, 3)) / count.clamp(min=1)
    deviation = value.sub_(mean[:, None, :, None]).masked_fill_(~keep, 0.0)
    m2 = deviation.square_().sum(dim=(1, 3))
    return tuple(part.cpu().numpy() for part in (count, mean, m2))

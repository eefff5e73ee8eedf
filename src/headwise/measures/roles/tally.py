"""Sums over rows for every head, and their bootstrap over passages, without keeping passages.

Each replicate weights each passage by a Poisson(1) count, drawn from the run's seed and the passage's index: in the limit
of many passages the bootstrap that draws passages with replacement (Chamandy et al. 2012, "Estimating Uncertainty for
Massive Data Streams", section 3), and the same numbers whatever the batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIRST_KEY", "STATISTICS", "Baseline", "Draws", "Sums", "Tally"]

Floats: TypeAlias = NDArray[np.float64]
#: A rule that looks at nothing but positions: an offset, or the first key of the passage.
Baseline: TypeAlias = int | str
FIRST_KEY: Final = "first key"

#: What is summed over rows, in this order.
STATISTICS: Final = ("rows", "score", "share", "null_rows", "null_score", "null_share")
_DRAWN: Final = 3


@dataclass(frozen=True)
class Sums:
    """Sums of one call for one label.

    Attributes:
        label: whose rows, or "" for rows without label.
        values: (passages of the call, statistics, heads).
        offsets: how many rows a fixed rule would hit: a fixed offset, or always the first key; for cross-attention a
            fixed key.
        hidden: rows left out because the query may not see the key.
    """

    label: str
    values: Floats
    offsets: Counter[Baseline]
    hidden: int = 0

    def joined(self, other: Sums) -> Sums:
        """The sums of both, of the same passages."""
        return Sums(self.label, self.values + other.values, self.offsets + other.offsets, self.hidden + other.hidden)


class Draws:
    """The replicates' weights of passages, drawn once per passage."""

    def __init__(self, seed: int, replicates: int) -> None:
        self.seed, self.replicates = seed, replicates
        self._latest: tuple[tuple[int, ...], Floats] = ((), np.zeros((replicates, 0)))

    def of(self, passages: Sequence[int]) -> Floats:
        """(replicates, passages) counts."""
        key = tuple(passages)
        if self._latest[0] != key:
            columns = [self._one(passage) for passage in key]
            self._latest = (key, np.stack(columns, axis=1).astype(np.float64))
        return self._latest[1]

    def _one(self, passage: int) -> NDArray[np.int64]:
        bits = np.random.Philox(np.random.SeedSequence([self.seed, passage]))
        return np.random.Generator(bits).poisson(1.0, self.replicates)


class Tally:
    """The sums of one role (or one label of it) at one site."""

    def __init__(self, heads: int, replicates: int) -> None:
        self.total = np.zeros((len(STATISTICS), heads))
        self.drawn = np.zeros((replicates, _DRAWN, heads), np.float32)
        self.offsets: Counter[Baseline] = Counter()
        self.passages = 0
        self.hidden = 0

    def add(self, sums: Sums, draws: Floats) -> None:
        """Fold in one call."""
        self.total += sums.values.sum(0)
        counted = sums.values[:, 0].max(-1) > 0
        self.passages += int(counted.sum())
        self.hidden += sums.hidden
        self.offsets.update(sums.offsets)
        if counted.any():
            part = sums.values[counted, :_DRAWN]
            self.drawn += np.tensordot(draws[:, counted], part, axes=1).astype(np.float32)

    def mean(self, name: str) -> Floats:
        """A statistic's mean over its rows, (heads,); NaN without rows."""
        at = STATISTICS.index(name)
        rows = self.total[3 if name.startswith("null") else 0]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rows > 0, self.total[at] / np.maximum(rows, 1), np.nan)

    @property
    def rows(self) -> Floats:
        """Rows, (heads,)."""
        return np.array(self.total[0])

    def interval(self, name: str, level: float) -> tuple[Floats, Floats]:
        """The bootstrap's percentile interval of a mean, (heads,) twice; NaN with fewer than two passages."""
        heads = self.total.shape[1]
        if self.passages < 2:
            return np.full(heads, np.nan), np.full(heads, np.nan)
        rows = self.drawn[:, 0].astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.where(rows > 0, self.drawn[:, STATISTICS.index(name)] / rows, np.nan)
        out = np.full((2, heads), np.nan)
        some = np.isfinite(means).any(0)
        if some.any():
            out[:, some] = np.nanquantile(means[:, some], [(1 - level) / 2, (1 + level) / 2], axis=0)
        return out[0], out[1]

    def fixed(self, leave_out: Baseline | None = None) -> tuple[Baseline | None, float]:
        """The fixed rule that hits most rows, and the share of rows that it hits; of equal ones the nearest offset."""
        rows = float(self.total[0].max())
        known = [
            (count, -1 if rule == FIRST_KEY else -abs(int(rule)), rule)
            for rule, count in self.offsets.items()
            if rule != leave_out
        ]
        if not known or rows == 0:
            return None, 0.0
        count, _, rule = max(known, key=lambda one: one[:2])
        return rule, min(1.0, count / rows)

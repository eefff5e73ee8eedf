"""Sums over rows for every head, and their bootstrap over passages, without keeping passages.

Each replicate weights each passage by a Poisson(1) count, drawn from the run's seed and the passage's index: in the
limit of many passages the bootstrap that draws passages with replacement (Chamandy et al. 2012, "Estimating Uncertainty
for Massive Data Streams", section 3), and the same numbers whatever the batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIRST_KEY", "STATISTICS", "Baseline", "Draws", "Part", "Sums", "Tally"]

Floats: TypeAlias = NDArray[np.float64]
#: A rule that looks at nothing but positions: an offset, or the first key of the passage.
Baseline: TypeAlias = int | str
FIRST_KEY: Final = "first key"

#: What is summed over rows, in this order.
STATISTICS: Final = ("rows", "score", "share", "null_rows", "null_score", "null_share")
_DRAWN: Final = 3
#: Passages whose sums wait until the replicates are drawn for all of them at once.
_WAITING: Final = 32
#: Passages from which there is an interval.
_FEWEST: Final = 2


@dataclass(frozen=True)
class Sums:
    """Sums of the rows of one call, for one role.

    Attributes:
        labels: the parts of the role; ``("",)`` for a role without parts.
        values: (passages of the call, parts, statistics, heads).
        fixed: for each part, how many rows a fixed rule would hit: a fixed offset, or always the first key; for
            cross-attention a fixed key.
        hidden: (parts,) rows left out because the query may not see the key.
    """

    labels: tuple[str, ...]
    values: Floats
    fixed: Sequence[Counter[Baseline]]
    hidden: NDArray[np.int64]


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
    """The sums of one role at one site, part by part."""

    def __init__(self, heads: int, replicates: int) -> None:
        self.labels: dict[str, int] = {}
        self.total = np.zeros((0, len(STATISTICS), heads))
        self._drawn = np.zeros((replicates, 0, _DRAWN, heads), np.float32)
        self._waiting: list[tuple[list[int], Floats, NDArray[np.float32]]] = []
        self.passages = np.zeros(0, np.int64)
        self.hidden = np.zeros(0, np.int64)
        self.fixed: list[Counter[Baseline]] = []
        self._copied: set[int] = set()

    def add(self, sums: Sums, draws: Floats) -> None:
        """Fold in one call; ``draws`` are the replicates' weights of its passages."""
        at = self._places(sums.labels)
        self.total[at] += sums.values.sum(0)
        counted = sums.values[:, :, 0].max(-1) > 0
        self.passages[at] += counted.sum(0)
        self.hidden[at] += sums.hidden
        for index, rules in zip(at, sums.fixed, strict=True):
            if not self.fixed[index]:
                self.fixed[index] = rules  # the same object at many sites: copied before it is changed
                continue
            if index not in self._copied:
                self._copied.add(index)
                self.fixed[index] = Counter(self.fixed[index])
            self.fixed[index].update(rules)
        some = counted.any(1)
        if some.any():
            part = sums.values[some][:, :, :_DRAWN].astype(np.float32)
            self._waiting.append((at, draws if some.all() else draws[:, some], part))
            if sum(len(one) for _, _, one in self._waiting) >= _WAITING:
                self._draw()

    def _draw(self) -> None:
        """Add the passages that wait to the replicates."""
        new = len(self.labels) - self._drawn.shape[1]
        if new:
            self._drawn = np.pad(self._drawn, [(0, 0), (0, new), (0, 0), (0, 0)])
        for parts in {tuple(at): None for at, _, _ in self._waiting}:
            same = [(draws, part) for at, draws, part in self._waiting if tuple(at) == parts]
            draws = np.concatenate([one for one, _ in same], axis=1).astype(np.float32)
            values = np.concatenate([one for _, one in same])
            drawn = (draws @ values.reshape(len(values), -1)).reshape(-1, *values.shape[1:])
            if parts == tuple(range(self._drawn.shape[1])):
                self._drawn += drawn
            else:
                self._drawn[:, list(parts)] += drawn
        self._waiting.clear()

    def _places(self, labels: Sequence[str]) -> list[int]:
        new = [label for label in labels if label not in self.labels]
        if new:
            self.labels |= {label: len(self.labels) + at for at, label in enumerate(new)}
            self.total = np.pad(self.total, [(0, len(new)), (0, 0), (0, 0)])
            self.passages, self.hidden = (np.pad(one, (0, len(new))) for one in (self.passages, self.hidden))
            self.fixed += [Counter() for _ in new]
        return [self.labels[label] for label in labels]

    def part(self, label: str) -> Part:
        """The sums of one part."""
        at = self.labels[label]
        return Part(self.total[at], self._of(at), int(self.passages[at]), int(self.hidden[at]), self.fixed[at])

    def _of(self, at: int) -> NDArray[np.float32]:
        """The replicates of one part, (replicates, 3, heads); none where one passage gives no interval."""
        if self.passages[at] < _FEWEST:
            return np.zeros((0, *self._drawn.shape[2:]), np.float32)
        self._draw()
        return self._drawn[:, at]


@dataclass(frozen=True)
class Part:
    """The sums of one part of a role at one site: total (statistics, heads), drawn (replicates, 3, heads)."""

    total: Floats
    drawn: NDArray[np.float32]
    passages: int
    hidden: int
    rules: Counter[Baseline]

    def mean(self, name: str) -> Floats:
        """A statistic's mean over its rows, (heads,); NaN without rows."""
        at = STATISTICS.index(name)
        rows = self.total[3 if name.startswith("null") else 0]
        return np.where(rows > 0, self.total[at] / np.maximum(rows, 1), np.nan)

    @property
    def rows(self) -> Floats:
        """Rows, (heads,)."""
        return np.array(self.total[0])

    def interval(self, name: str, level: float) -> tuple[Floats, Floats]:
        """The bootstrap's percentile interval of a mean, (heads,) twice; NaN with fewer than two passages."""
        heads = self.total.shape[1]
        out = np.full((2, heads), np.nan)
        if self.passages < _FEWEST:
            return out[0], out[1]
        rows = self.drawn[:, 0].astype(np.float64)
        means = np.where(rows > 0, self.drawn[:, STATISTICS.index(name)] / np.maximum(rows, 1), np.nan)
        some = np.isfinite(means).any(0)
        if some.any():
            out[:, some] = np.nanquantile(means[:, some], [(1 - level) / 2, (1 + level) / 2], axis=0)
        return out[0], out[1]

    def fixed(self, leave_out: Baseline | None = None) -> tuple[Baseline | None, float]:
        """The fixed rule that hits most rows, and the share of rows that it hits; of equal ones the nearest offset."""
        rows = float(self.total[0].max())
        most = max((count for rule, count in self.rules.items() if rule != leave_out), default=0)
        known = [rule for rule, count in self.rules.items() if count == most and rule != leave_out]
        if not known or rows == 0:
            return None, 0.0
        rule = min(known, key=lambda one: 1 if one == FIRST_KEY else abs(int(one)))
        return rule, min(1.0, most / rows)

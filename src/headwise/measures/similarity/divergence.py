"""Jensen-Shannon distance between the patterns of heads, on a sample of query rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwise.data import Batch
from headwise.kernels import Problem, Wanted
from headwise.layout import HeadLayout, Site, SiteKey
from headwise.measures.importance.passages import passage_keys
from headwise.measures.similarity.rows import chosen_rows, patterns_at
from headwise.models import AttentionCall
from headwise.trace import TOKEN, row_kinds

__all__ = ["PatternDistances", "js_divergence"]


def js_divergence(left_RK: Tensor, right_RK: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions over the last axis, nats, in [0, log 2]; other axes broadcast.

    Example:
        >>> p, q = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> round(float(js_divergence(p, q)), 4), float(js_divergence(p, p))
        (0.6931, 0.0)
    """
    middle = (left_RK + right_RK) / 2
    spread = _negative_entropy(left_RK) + _negative_entropy(right_RK)
    return (spread / 2 - _negative_entropy(middle)).clamp(0.0, math.log(2))


def _negative_entropy(p: Tensor) -> Tensor:
    total: Tensor = torch.special.xlogy(p, p).sum(-1)
    return total


class PatternDistances:
    """Looks on at a trace and sums the divergence between all heads of a stack and kind, on chosen rows.

    Heads are compared where their queries and keys are the same positions: within a stack and kind (encoder self,
    decoder self, decoder cross). Elsewhere the distance is NaN.

    Args:
        layout: the heads.
        rows: query rows of each passage, drawn by the passage's content.
        seed: of the draw.
    """

    def __init__(self, layout: HeadLayout, rows: int = 4, seed: int = 0) -> None:
        self._rows, self._seed = rows, seed
        heads = list(layout.heads())
        self._first: dict[SiteKey, int] = {}
        for at, head in enumerate(heads):
            self._first.setdefault(head.site, at)
        self._sum = np.zeros((len(heads), len(heads)))
        self._count = np.zeros((len(heads), len(heads)), np.int64)
        self._patterns: dict[tuple[str, str, int], list[tuple[int, Tensor]]] = {}
        self._batch: Batch | None = None
        self._keys: tuple[int, ...] = ()
        self.sampled = 0

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted:  # noqa: ARG002
        """Nothing beside the call."""
        return Wanted()

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Keep the patterns of the chosen rows until the pass is over."""
        assert batch is not None
        if batch is not self._batch:
            self.finish()
            self._batch, self._keys = batch, passage_keys(batch)
        kinds_BQ = row_kinds(call.site, call.problem, batch)
        key = call.site.key
        for entry in range(min(len(self._keys), kinds_BQ.shape[0])):
            rows_R = chosen_rows(kinds_BQ[entry] == TOKEN, self._rows, self._keys[entry], self._seed)
            if len(rows_R):
                found = patterns_at(call.problem, entry, rows_R)
                self._patterns.setdefault((key.stack, key.kind, entry), []).append((self._first[key], found))

    def finish(self) -> None:
        """Compare what was kept."""
        counted: set[int] = set()
        for (_, _, entry), found in self._patterns.items():
            shapes = {tuple(patterns.shape[1:]) for _, patterns in found}
            for shape in shapes:
                same = [(at, patterns) for at, patterns in found if tuple(patterns.shape[1:]) == shape]
                self._compare(same)
            if entry not in counted:
                counted.add(entry)
                self.sampled += max(shape[0] for shape in shapes)
        self._patterns.clear()

    def _compare(self, found: list[tuple[int, Tensor]]) -> None:
        at = np.concatenate([np.arange(first, first + patterns.shape[0]) for first, patterns in found])
        patterns_HRK = torch.cat([patterns for _, patterns in found])
        entropy_HR = _negative_entropy(patterns_HRK)
        has_R = patterns_HRK.sum(-1).gt(0).all(0)
        rows = int(has_R.sum())
        for one in range(len(at)):
            middle = _negative_entropy((patterns_HRK[one] + patterns_HRK[one:]) / 2)
            divergence = ((entropy_HR[one] + entropy_HR[one:]) / 2 - middle).clamp(0.0, math.log(2))
            total = (divergence * has_R).double().sum(-1).cpu().numpy()
            total[0] = 0.0
            self._sum[at[one], at[one:]] += total
            self._count[at[one], at[one:]] += rows

    @property
    def distances(self) -> npt.NDArray[np.float64]:
        """(heads, heads): square root of the mean divergence over rows in bits, in [0, 1]; NaN where not comparable."""
        total, count = self._sum + np.triu(self._sum, 1).T, self._count + np.triu(self._count, 1).T
        with np.errstate(invalid="ignore"):
            mean = np.where(count > 0, total / np.maximum(count, 1), np.nan) / math.log(2)
        out: npt.NDArray[np.float64] = np.sqrt(np.clip(mean, 0.0, 1.0))
        return out

"""A shortlist in closed form, then exact: the cheapest few are run, with their repair, and the best goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwise.errors import InputError
from headwise.plans.criteria.criterion import Criterion, Evaluator
from headwise.plans.criteria.greedy import Greedy
from headwise.plans.units import Unit

__all__ = ["Lazy"]


class Lazy:
    """Greedy over the ``width`` units that another criterion finds cheapest.

    Args:
        shortlist: makes the shortlist.
        evaluator: runs the model, repaired.
        width: how many are run for each removal.
    """

    name = "lazy"

    def __init__(self, shortlist: Criterion, evaluator: Evaluator, width: int = 4) -> None:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise InputError(f"width must be a whole number of heads, at least 1, and is {width!r}")
        self._shortlist, self._exact, self.width = shortlist, Greedy(evaluator), width

    @property
    def passes(self) -> float:
        """Of the shortlist's criterion and of the evaluator."""
        return self._shortlist.passes + self._exact.passes

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:
        """What each of the shortlist adds to the rise; ``inf`` for the others."""
        rough = self._shortlist.scores(removed, candidates)
        listed = sorted(range(len(candidates)), key=lambda at: rough[at] / len(candidates[at].heads))[: self.width]
        exact = self._exact.scores(removed, [candidates[at] for at in sorted(listed)])
        found = [math.inf] * len(candidates)
        for at, score in zip(sorted(listed), exact, strict=True):
            found[at] = score
        return found

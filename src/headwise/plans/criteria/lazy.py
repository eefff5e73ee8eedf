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

    What that criterion says of one block and of another may not be comparable, so what its costs are worth in each is
    learned: the first time the cheapest unit of every block is run, and from then on the costs of a block count times
    what was measured there over what had been said, over all units run so far. One unit with the mean of all blocks is
    added to each, so that a single measurement does not decide.

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
        self._said: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        self._run = 0

    @property
    def passes(self) -> float:
        """Of the shortlist's criterion and of the evaluator."""
        return self._shortlist.passes + self._exact.passes

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:
        """What each of the shortlist adds to the rise; ``inf`` for the others."""
        rough = self._shortlist.scores(removed, candidates)
        listed = self._listed(candidates, rough)
        exact = self._exact.scores(removed, [candidates[at] for at in listed])
        found = [math.inf] * len(candidates)
        for at, score in zip(listed, exact, strict=True):
            found[at] = score
            self._learn(candidates[at].block, rough[at], score)
        return found

    def _listed(self, candidates: Sequence[Unit], rough: Sequence[float]) -> list[int]:
        """Places of the candidates to run, in order."""
        worth = {block: self.worth(block) for block in {unit.block for unit in candidates}}
        each = [score / len(unit.heads) for unit, score in zip(candidates, rough, strict=True)]
        by_cost = sorted(range(len(each)), key=lambda at: (each[at] * worth[candidates[at].block], each[at]))
        listed = set(by_cost[: self.width])
        if not self._run:
            first: dict[str, int] = {}
            for at in by_cost:
                first.setdefault(candidates[at].block, at)
            listed.update(first.values())
        return sorted(listed)

    def _learn(self, block: str, said: float, measured: float) -> None:
        if math.isfinite(said) and math.isfinite(measured):
            self._said[block] = self._said.get(block, 0.0) + max(0.0, said)
            self._measured[block] = self._measured.get(block, 0.0) + max(0.0, measured)
            self._run += 1

    def worth(self, block: str) -> float:
        """What the shortlist's costs are worth in a block, so far: measured over said; 1 where nothing is known."""
        said, measured = sum(self._said.values()), sum(self._measured.values())
        if said <= 0 or measured <= 0:
            return 1.0
        mean_said, mean_measured = said / self._run, measured / self._run
        return (self._measured.get(block, 0.0) + mean_measured) / (self._said.get(block, 0.0) + mean_said)

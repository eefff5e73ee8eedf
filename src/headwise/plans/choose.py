"""Removing one unit after another, each time the one that a criterion finds cheapest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwise.errors import InputError, MeasureError
from headwise.plans.budget import Budget
from headwise.plans.criteria.criterion import Criterion
from headwise.plans.ledger import Ledger
from headwise.plans.pool import Pool
from headwise.plans.units import Unit

__all__ = ["Step", "choose", "removals"]


@dataclass(frozen=True)
class Step:
    """One removal.

    Attributes:
        unit: what went.
        score: what the criterion said of it, given what had gone before.
    """

    unit: Unit
    score: float


def removals(
    criterion: Criterion, pool: Pool, saving: Callable[[Unit], float] = lambda unit: float(len(unit.heads))
) -> Iterator[Step]:
    """Units in the order of their removal, until nothing more may go.

    Each time the unit with the lowest score per what it saves goes; of equals the first in the order of the model.

    Args:
        criterion: scores the units that may go, given those that have gone.
        pool: which may go.
        saving: what a unit saves, 0 or more; units that save nothing never go.

    Raises:
        MeasureError: the criterion gives NaN.
    """
    removed: list[Unit] = []
    savings = {unit: saving(unit) for unit in pool.units}
    while candidates := [unit for unit in pool.allowed(removed) if savings[unit] > 0]:
        scores = list(criterion.scores(tuple(removed), candidates))
        bad = [unit for unit, score in zip(candidates, scores, strict=True) if math.isnan(score)]
        if bad:
            raise MeasureError(f"the criterion {criterion.name} gives NaN for {bad[0]}; nothing can be chosen by that")
        weighed = [_weighed(score, savings[unit]) for unit, score in zip(candidates, scores, strict=True)]
        at = min(range(len(candidates)), key=weighed.__getitem__)
        removed.append(candidates[at])
        yield Step(candidates[at], scores[at])


def _weighed(score: float, saving: float) -> float:
    """Cost per what is saved; of what costs less than nothing, the more that is saved the better."""
    return score / saving if score > 0 else score * saving


def choose(
    criterion: Criterion,
    pool: Pool,
    budget: Budget,
    ledger: Ledger,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[Step]:
    """The removals that reach a budget.

    Args:
        criterion, pool: see :func:`removals`.
        budget: how far to go; not a loss, see :func:`headwise.plans.most_within`.
        ledger: what goes with the heads.
        progress: called with the number of units gone.

    Raises:
        InputError: the budget cannot be reached with what may go.
        MeasureError: the criterion gives NaN.
    """
    budget.check(ledger)
    steps: list[Step] = []
    removed: list[Unit] = []
    if budget.met(ledger, removed, pool.grain):
        return steps
    for step in removals(criterion, pool, lambda unit: budget.saving(ledger, unit)):
        steps.append(step)
        removed.append(step.unit)
        if progress is not None:
            progress(len(removed))
        if pool.whole(removed) and budget.met(ledger, removed, pool.grain):
            return steps
    able, whole = len({unit.block for unit in pool.units}), len(pool.shapes)
    rules = [
        f"every layer keeps at least {pool.per_layer} head{'' if pool.per_layer == 1 else 's'}",
        *([f"{able} of {whole} layers may lose any"] if able < whole else []),
        *(["counts are uniform"] if pool.uniform else []),
    ]
    raise InputError(
        f"{budget.short(ledger, removed)} ({', '.join(rules)}); lower per_layer, protect fewer heads"
        f"{', let more layers lose heads (only)' if able < whole else ''}, or ask for less"
    )

"""Exact and re-measured: after every removal the model is run without each head that is left."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.plans.criteria.criterion import Evaluator
from headwise.plans.units import Unit

__all__ = ["Greedy"]


class Greedy:
    """The rise of the loss when a unit goes, given those that have gone.

    Args:
        evaluator: runs the model.
        lowest: only the lowest rise matters, since all units save as much: a candidate is given up where it cannot be
            the lowest any more, which changes no choice.
    """

    name = "greedy"

    def __init__(self, evaluator: Evaluator, *, lowest: bool = False) -> None:
        self._evaluator, self._lowest = evaluator, lowest
        self._rises: dict[tuple[Unit, ...], float] = {(): 0.0}

    @property
    def passes(self) -> float:
        """Forward passes of the evaluator."""
        return self._evaluator.passes

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:
        """What each candidate adds to the rise."""
        known = {gone[-1]: rise for gone, rise in self._rises.items() if gone}
        if self._lowest and known.keys() >= set(candidates):
            rises = self._evaluator.lowest(removed, candidates, min(candidates, key=known.__getitem__))
        else:
            rises = self._evaluator.rises(removed, candidates)
        base = self._rises.get(removed)
        base = self._evaluator.rise(removed) if base is None else base
        self._rises = {(*removed, unit): rise for unit, rise in zip(candidates, rises, strict=True)}
        return [rise - base for rise in rises]

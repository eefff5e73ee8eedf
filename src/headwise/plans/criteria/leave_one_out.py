"""Exact, one head at a time: how much the loss rises without it, all others there."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.plans.criteria.criterion import Evaluator
from headwise.plans.units import Unit

__all__ = ["LeaveOneOut"]


class LeaveOneOut:
    """The rise of the loss when a unit alone is removed, measured once.

    Args:
        evaluator: runs the model.
        units: of the model.
    """

    name = "leave-one-out"

    def __init__(self, evaluator: Evaluator, units: Sequence[Unit]) -> None:
        self._evaluator, self._units = evaluator, tuple(units)
        self._scores: dict[Unit, float] = {}

    @property
    def passes(self) -> float:
        """Forward passes of the evaluator."""
        return self._evaluator.passes

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:  # noqa: ARG002
        """The rise of each candidate."""
        if not self._scores:
            self._scores = dict(zip(self._units, self._evaluator.rises((), self._units), strict=True))
        return [self._scores[unit] for unit in candidates]

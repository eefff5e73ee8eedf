"""Kwon et al. (2022): the diagonal of the gates' Fisher information, measured once."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.plans.criteria.criterion import GateScores
from headwise.plans.units import Unit

__all__ = ["Fisher"]


class Fisher:
    """Mean over examples of (dL/dgate)^2: the rise of the loss to second order when one gate closes.

    Args:
        gates: takes the gradients.
        units: of the model.
    """

    name = "fisher"

    def __init__(self, gates: GateScores, units: Sequence[Unit]) -> None:
        self._gates, self._units = gates, tuple(units)
        self._scores: dict[Unit, float] = {}

    @property
    def passes(self) -> float:
        """Forward passes, a backward pass counted as two."""
        return self._gates.passes

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:  # noqa: ARG002
        """The Fisher information of each candidate."""
        if not self._scores:
            found = self._gates.sensitivities((), self._units, "fisher")
            self._scores = dict(zip(self._units, map(float, found), strict=True))
        return [self._scores[unit] for unit in candidates]

"""What every criterion is: a score for each unit that may go, given those that have gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from headwise.plans.units import Unit

__all__ = ["Criterion", "Evaluator", "GateScores", "Sensitivity"]

Sensitivity = Literal["michel", "fisher"]


class Criterion(Protocol):
    """Says which unit is to go next.

    Attributes:
        name: for people and files.
    """

    name: str

    @property
    def passes(self) -> float:
        """What it has cost so far, in forward passes over the text; a backward pass counts as two."""

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:
        """A score for each candidate; the lowest goes. ``inf`` for one that is not to go now."""


class Evaluator(Protocol):
    """Runs the model without certain heads, and repaired where that was asked for."""

    @property
    def passes(self) -> float:
        """Forward passes over the text so far."""

    def rise(self, removed: Sequence[Unit]) -> float:
        """The loss without ``removed`` minus the loss of the whole model."""

    def rises(self, removed: Sequence[Unit], candidates: Sequence[Unit]) -> Sequence[float]:
        """The same without ``removed`` and, one at a time, each of ``candidates``."""

    def lowest(self, removed: Sequence[Unit], candidates: Sequence[Unit], guess: Unit) -> Sequence[float]:
        """The same, exact for the lowest; the others may be estimates from part of the text, which are above it.

        ``guess`` is one of ``candidates`` that is thought to be low: the better it is, the less is run.
        """


class GateScores(Protocol):
    """Takes gradients of a loss by the gates of the heads."""

    @property
    def passes(self) -> float:
        """Forward passes over the text so far; a forward and a backward pass count as three."""

    def sensitivities(self, removed: Sequence[Unit], units: Sequence[Unit], kind: Sensitivity) -> Sequence[float]:
        """Mean over examples of |dL/dgate| (``"michel"``) or (dL/dgate)^2 (``"fisher"``), one gate for each unit."""

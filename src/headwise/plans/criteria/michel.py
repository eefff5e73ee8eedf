"""Michel et al. (2019): heads to whose gate the loss is least sensitive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwise.errors import InputError
from headwise.plans.criteria.criterion import GateScores
from headwise.plans.units import Unit

__all__ = ["Michel"]


class Michel:
    """Mean over examples of |dL/dgate|, scores of each layer divided by their length (section 4.1).

    Args:
        gates: takes the gradients.
        units: of the model.
        step: None: measured once, of the whole model. Otherwise the share of all heads after whose removal the
            gradients are taken again (the paper's figures: 0.1).
        per_layer: divide the scores of each layer by their l2 norm, as the paper does.
    """

    def __init__(
        self, gates: GateScores, units: Sequence[Unit], *, step: float | None = None, per_layer: bool = True
    ) -> None:
        if step is not None and not 0 < step <= 1:
            raise InputError(f"step must lie in (0, 1], a share of the heads, and is {step!r}")
        self.name = "michel" if step is None else "michel-iterative"
        self._gates, self._units, self._per_layer = gates, tuple(units), per_layer
        self._every = None if step is None else max(1, round(step * len(self._units)))
        self._scores: dict[Unit, float] = {}
        self._due = 0

    @property
    def passes(self) -> float:
        """Forward passes, a backward pass counted as two."""
        return self._gates.passes

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:
        """The sensitivity of each candidate."""
        if not self._scores or (self._every is not None and len(removed) >= self._due):
            left = [unit for unit in self._units if unit not in set(removed)]
            found = self._gates.sensitivities(removed, left, "michel")
            self._scores = self._normalised(dict(zip(left, map(float, found), strict=True)))
            self._due = len(removed) + (self._every or 0)
        return [self._scores[unit] for unit in candidates]

    def _normalised(self, scores: dict[Unit, float]) -> dict[Unit, float]:
        if not self._per_layer:
            return scores
        squares: dict[str, float] = {}
        for unit, score in scores.items():
            squares[unit.block] = squares.get(unit.block, 0.0) + score**2
        return {unit: score / max(np.sqrt(squares[unit.block]), 1e-30) for unit, score in scores.items()}

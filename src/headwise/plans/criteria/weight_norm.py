"""Heads whose output projection is small, whatever they write through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headwise.plans.units import Unit

__all__ = ["WeightNorm"]


class WeightNorm:
    """The Frobenius norm of W_O of the unit's heads: ``||W_O^h||``.

    Args:
        W_O: for each block its output projection (H, d_v, d_model).
    """

    name = "weight-norm"
    passes = 0.0

    def __init__(self, W_O: Mapping[str, Any]) -> None:
        self._squares = {
            block: np.square(np.asarray(weight, dtype=np.float64)).sum((1, 2)) for block, weight in W_O.items()
        }

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:  # noqa: ARG002
        """The norm of each candidate."""
        return [float(np.sqrt(self._squares[unit.block][list(unit.heads)].sum())) for unit in candidates]

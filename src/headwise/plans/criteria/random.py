"""The control: any unit, by a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwise.plans.units import Unit

__all__ = ["RandomOrder"]


class RandomOrder:
    """A random order of all units.

    Args:
        units: of the model.
        seed: decides the order.
    """

    name = "random"
    passes = 0.0

    def __init__(self, units: Sequence[Unit], seed: int = 0) -> None:
        self._rank = dict(zip(units, np.random.default_rng(seed).permutation(len(units)).tolist(), strict=True))

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:  # noqa: ARG002
        """The place of each candidate in the order."""
        return [float(self._rank[unit]) for unit in candidates]

"""A measured number with its spread over seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from headwise.errors import InputError

__all__ = ["Quantity"]


@dataclass(frozen=True)
class Quantity:
    """One number per repetition.

    Attributes:
        name: how rules and results call it.
        values: one value per seed (one in all, where nothing is random).
        unit: ``"nats"``, ``"bytes"``, ...; empty for a plain ratio or share.
        meaning: what was measured, in a few words.
    """

    name: str
    values: tuple[float, ...]
    unit: str = ""
    meaning: str = ""

    def __post_init__(self) -> None:
        if not self.values:
            raise InputError(f"the quantity {self.name!r} has no values")

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return math.fsum(self.values) / len(self.values)

    @property
    def spread(self) -> float:
        """Population standard deviation over seeds.

        Example:
            >>> Quantity("x", (1.0, 3.0)).spread
            1.0
        """
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / len(self.values))

    def over(self, which: Literal["mean", "median", "min", "max"]) -> float:
        """Mean, median, smallest or largest value; NaN if any value is NaN."""
        if any(math.isnan(value) for value in self.values):
            return math.nan
        return {
            "mean": self.mean,
            "median": statistics.median(self.values),
            "min": min(self.values),
            "max": max(self.values),
        }[which]

    def text(self) -> str:
        """The number as people read it: mean, spread and unit.

        Example:
            >>> Quantity("x", (0.25, 0.35), "nats").text()
            '0.3 ± 0.05 nats'
        """
        number = f"{self.mean:,.0f}" if abs(self.mean) >= 1000 else f"{self.mean:.3g}"
        if len(self.values) > 1:
            number += f" ± {self.spread:.2g}"
        return f"{number} {self.unit}".rstrip()

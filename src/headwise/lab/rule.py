"""The verdict on a claim, from a rule that is fixed before anything is measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from headwise.errors import InputError
from headwise.lab.quantity import Quantity

__all__ = ["Check", "Rule", "Threshold", "Verdict"]

Over = Literal["mean", "median", "min", "max"]
Comparison = Literal[">=", "<="]

_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {">=": operator.ge, "<=": operator.le}
_OVER: Final[dict[str, str]] = {"mean": "mean", "median": "median", "min": "smallest", "max": "largest"}


class Verdict(Enum):
    """What an experiment says about its claim."""

    HOLDS = "holds"
    CONDITION = "holds under a condition"
    FAILS = "does not hold as stated"


@dataclass(frozen=True)
class Threshold:
    """A bound that a measured quantity must keep.

    Attributes:
        quantity: name of the quantity.
        over: which of its values counts: the mean over seeds, the median, the smallest or the largest.
        comparison: ``">="`` or ``"<="``.
        bound: the number, in the quantity's unit.
        says: what it means when the bound is kept, as a sentence without a full stop.
    """

    quantity: str
    over: Over
    comparison: Comparison
    bound: float
    says: str

    def check(self, quantities: Mapping[str, Quantity]) -> Check:
        """Compare; a value that is not a number keeps no bound.

        Raises:
            InputError: the quantity was not measured.
        """
        if self.quantity not in quantities:
            raise InputError(
                f"the rule needs the quantity {self.quantity!r}, which was not measured; measured: {sorted(quantities)}"
            )
        value = quantities[self.quantity].over(self.over)
        return Check(self, value, _COMPARE[self.comparison](value, self.bound))

    def text(self) -> str:
        """The bound in words.

        Example:
            >>> Threshold("distance", "min", ">=", 0.1, "the patterns differ").text()
            'smallest `distance` >= 0.1'
        """
        return f"{_OVER[self.over]} `{self.quantity}` {self.comparison} {self.bound:g}"


@dataclass(frozen=True)
class Check:
    """A threshold, the value it was compared with, and whether it was kept."""

    threshold: Threshold
    value: float
    kept: bool


@dataclass(frozen=True)
class Rule:
    """How measured quantities become a verdict.

    The claim *holds* if every threshold of ``stated`` and of ``conditioned`` is kept; it *holds
    under a condition* if every threshold of ``conditioned`` is kept, but one of ``stated`` is not;
    otherwise it *does not hold as stated*.

    Attributes:
        stated: what the claim says beyond the condition.
        conditioned: what remains of it under the condition.
        condition: the condition, as words that follow "holds if"; empty where the claim knows none
            (then ``conditioned`` is empty too, and a broken threshold is a refutation).
    """

    stated: tuple[Threshold, ...]
    conditioned: tuple[Threshold, ...] = ()
    condition: str = ""

    def __post_init__(self) -> None:
        if not self.stated:
            raise InputError("a rule needs at least one threshold for the claim as stated")
        if bool(self.conditioned) != bool(self.condition):
            raise InputError("a condition and its thresholds come together: give both or neither")

    def judge(self, quantities: Mapping[str, Quantity]) -> tuple[Verdict, tuple[Check, ...], tuple[Check, ...]]:
        """The verdict, with the checks of the claim as stated and of the condition.

        Example:
            >>> rule = Rule((Threshold("gain", "min", ">=", 1.0, "it gains"),))
            >>> rule.judge({"gain": Quantity("gain", (2.0, 3.0))})[0].value
            'holds'
            >>> rule.judge({"gain": Quantity("gain", (2.0, 0.5))})[0].value
            'does not hold as stated'
        """
        stated = tuple(threshold.check(quantities) for threshold in self.stated)
        conditioned = tuple(threshold.check(quantities) for threshold in self.conditioned)
        if not all(check.kept for check in conditioned):
            return Verdict.FAILS, stated, conditioned
        if all(check.kept for check in stated):
            return Verdict.HOLDS, stated, conditioned
        return (Verdict.CONDITION if conditioned else Verdict.FAILS), stated, conditioned

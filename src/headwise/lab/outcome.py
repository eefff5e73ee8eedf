"""What an experiment found, and how that is saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.errors import RunError
from headwise.lab.quantity import Quantity
from headwise.lab.rule import Check, Threshold, Verdict

__all__ = ["Literature", "Outcome"]


@dataclass(frozen=True)
class Literature:
    """A number (or a statement) that others published, beside ours.

    Attributes:
        theirs: what they report.
        source: who, where.
        ours: name of our quantity that stands beside it; empty where the setting has no counterpart here.
    """

    theirs: str
    source: str
    ours: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of one run of one experiment.

    Attributes:
        name: the experiment.
        seed: where its random numbers start.
        size: ``"full"`` or ``"small"``; only a full run counts as a result.
        verdict: by the experiment's rule.
        quantities: what was measured, by name.
        stated: the checks of the claim as stated.
        conditioned: the checks under the condition.
        headline: the number that decides, in a few words.
        finding: the numbers in sentences.
        series: what the figure is drawn from.
        seconds: how long it took.
    """

    name: str
    seed: int
    size: str
    verdict: Verdict
    quantities: Mapping[str, Quantity]
    stated: tuple[Check, ...]
    conditioned: tuple[Check, ...]
    headline: str
    finding: str
    series: Mapping[str, Any]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers; numbers that JSON has no word for become None."""
        return {
            "name": self.name,
            "seed": self.seed,
            "size": self.size,
            "verdict": self.verdict.value,
            "headline": self.headline,
            "finding": self.finding,
            "quantities": {
                name: {
                    "mean": _number(quantity.mean),
                    "spread": _number(quantity.spread),
                    "values": [_number(value) for value in quantity.values],
                    "unit": quantity.unit,
                    "meaning": quantity.meaning,
                }
                for name, quantity in self.quantities.items()
            },
            "stated": [_check_to_dict(check) for check in self.stated],
            "conditioned": [_check_to_dict(check) for check in self.conditioned],
            "series": _plain(self.series),
            "seconds": round(self.seconds, 1),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of :meth:`to_dict`.

        Raises:
            RunError: a field is missing or of the wrong kind.
        """
        try:
            quantities = {
                name: Quantity(name, tuple(map(_from_number, item["values"])), item["unit"], item["meaning"])
                for name, item in data["quantities"].items()
            }
            return cls(
                name=data["name"],
                seed=data["seed"],
                size=data["size"],
                verdict=Verdict(data["verdict"]),
                quantities=quantities,
                stated=tuple(map(_check_from_dict, data["stated"])),
                conditioned=tuple(map(_check_from_dict, data["conditioned"])),
                headline=data["headline"],
                finding=data["finding"],
                series=data["series"],
                seconds=data["seconds"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RunError(f"a saved result of the lab cannot be read ({error!r}); run the experiment again") from error


def _check_to_dict(check: Check) -> dict[str, Any]:
    threshold = check.threshold
    return {
        "quantity": threshold.quantity,
        "over": threshold.over,
        "comparison": threshold.comparison,
        "bound": threshold.bound,
        "says": threshold.says,
        "value": _number(check.value),
        "kept": check.kept,
    }


def _check_from_dict(item: Mapping[str, Any]) -> Check:
    threshold = Threshold(item["quantity"], item["over"], item["comparison"], item["bound"], item["says"])
    return Check(threshold, _from_number(item["value"]), item["kept"])


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _from_number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    """Numbers to five significant digits: enough for a figure, and small files."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None

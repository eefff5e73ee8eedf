"""What an experiment is: a claim, a way to measure it, a rule, a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headwise.lab.outcome import Literature
from headwise.lab.quantity import Quantity
from headwise.lab.rule import Rule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Experiment", "Findings"]


@dataclass
class Findings:
    """What ``measure`` hands back: quantities by name, figure data, the numbers in words and in short."""

    quantities: dict[str, Quantity] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)
    finding: str = ""
    headline: str = ""

    def add(self, name: str, values: Sequence[float] | float, unit: str = "", meaning: str = "") -> Quantity:
        """Record a quantity; one value, or one per seed."""
        found = tuple(float(value) for value in values) if isinstance(values, Sequence) else (float(values),)
        quantity = self.quantities[name] = Quantity(name, found, unit, meaning)
        return quantity


@dataclass(frozen=True)
class Experiment:
    """A claim about multi-head attention that can turn out false.

    Attributes:
        name: as in the catalogue.
        method: what is built and measured, for a reader who knows attention but not this code.
        terms: words that the page explains, with their definitions.
        rule: from quantities to the verdict; written before the run.
        measure: ``measure(seed, size)`` with size ``"full"`` or ``"small"``; sets no global state.
        draw: draws the figure from the saved series.
        caption: what the figure shows.
        lesson: what follows for somebody who builds or prunes transformers.
        changed: what was changed in the rule after a first look at results, and why; empty if nothing was.
        literature: published numbers beside ours.
    """

    name: str
    method: str
    terms: Mapping[str, str]
    rule: Rule
    measure: Callable[[int, str], Findings]
    draw: Callable[[Figure, Mapping[str, Any]], None]
    caption: str
    lesson: str
    changed: str = ""
    literature: tuple[Literature, ...] = ()

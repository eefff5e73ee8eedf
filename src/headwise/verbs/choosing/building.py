"""Criteria by name, with what each needs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from headwise.data import Batch
from headwise.errors import InputError
from headwise.measures.covariance import Statistics
from headwise.measures.importance import Loss
from headwise.models import Model
from headwise.plans import (
    Criterion,
    Fisher,
    Greedy,
    LayerCost,
    Lazy,
    LeaveOneOut,
    Michel,
    Pool,
    RandomOrder,
    SetAware,
    WeightNorm,
)
from headwise.plans.layer_cost import Repair
from headwise.surgery import Moments
from headwise.surgery.repair import moments_of
from headwise.verbs.choosing.gates import GateGradientScores
from headwise.verbs.choosing.layers import layer_costs, output_weights
from headwise.verbs.choosing.quality import Quality

__all__ = ["CRITERIA", "Tools", "criterion_of", "known"]


@dataclass
class Tools:
    """What criteria are made of; what a criterion does not need is not made.

    Attributes:
        model: the model.
        pool: which heads may go.
        repair, ridge: the repair that is meant.
        statistics: takes the moments of the head outputs, or has them.
        statistics_passes: what taking them costs.
        evaluate: gives the batches on which sets are run, and the tokens in which passes are counted.
        text: all batches, for gradients.
        loss: gives the loss that sets are run on, or (True) the one whose gradients are taken.
        seed: of the random order.
        width: of the lazy criterion's shortlist.
        step: share of the heads after which the iterative criterion measures again.
        alike: every head saves as much, so that of exact scores only the lowest matters.
        running: heads are replaced by running means.
        made: evaluators that were made, with their notes.
    """

    model: Model
    pool: Pool
    repair: Repair
    ridge: float
    statistics: Callable[[], Statistics]
    statistics_passes: float
    evaluate: Callable[[], tuple[list[Batch], int]]
    text: Callable[[], Iterable[Batch]]
    loss: Callable[[bool], Loss]
    seed: int = 0
    width: int = 4
    step: float = 0.1
    alike: bool = False
    running: bool = False
    made: list[Quality] = field(default_factory=list)
    _moments: Mapping[str, Moments] | None = None

    @property
    def blocks(self) -> Collection[str]:
        """Paths of the blocks that may lose heads."""
        return list(dict.fromkeys(unit.block for unit in self.pool.units))

    @cached_property
    def _costs(self) -> tuple[dict[str, LayerCost], list[str]]:
        how: dict[str, Any] = {"repair": self.repair, "ridge": self.ridge, "running": self.running}
        return layer_costs(self.model, self.statistics(), self.blocks, **how)

    @property
    def notes(self) -> list[str]:
        """What the costs should be read with."""
        return self._costs[1] if "_costs" in vars(self) else []

    @property
    def moments(self) -> Mapping[str, Moments] | None:
        """Moments of the head outputs by block; None where nothing is repaired."""
        return None if self.repair == "none" else self.moments_for()

    def moments_for(self) -> Mapping[str, Moments]:
        """The same, whatever the repair."""
        if self._moments is None:
            found, layout = self.statistics(), self.model.layout
            self._moments = {
                path: moments_of(layout, layout.blocks[path], found, means=self.running)  # type: ignore[arg-type]
                for path in self.blocks
            }
        return self._moments

    def set_aware(self, passes: float | None = None) -> SetAware:
        """The closed form."""
        return SetAware(self._costs[0], self.statistics_passes if passes is None else passes)

    def quality(self) -> Quality:
        """Runs sets of heads."""
        batches, whole = self.evaluate()
        loss = self.loss(False)
        made = Quality(
            self.model, batches, loss, moments=self.moments, repair=self.repair, ridge=self.ridge, whole=whole,
            running=self.running,
        )  # fmt: skip
        self.made.append(made)
        return made

    def gates(self) -> GateGradientScores:
        """Takes gradients."""
        return GateGradientScores(self.model, self.text(), self.loss(True), running=self.running)


#: Each criterion by name.
CRITERIA: Final[Mapping[str, Callable[[Tools], Criterion]]] = {
    "set-aware": lambda tools: tools.set_aware(),
    "lazy": lambda tools: Lazy(tools.set_aware(), tools.quality(), tools.width),
    "greedy": lambda tools: Greedy(
        tools.quality(), lowest=tools.alike and len({len(unit.heads) for unit in tools.pool.units}) == 1
    ),
    "leave-one-out": lambda tools: LeaveOneOut(tools.quality(), tools.pool.units),
    "fisher": lambda tools: Fisher(tools.gates(), tools.pool.units),
    "michel-iterative": lambda tools: Michel(tools.gates(), tools.pool.units, step=tools.step),
    "michel": lambda tools: Michel(tools.gates(), tools.pool.units),
    "weight-norm": lambda tools: WeightNorm(output_weights(tools.model, tools.blocks)),
    "random": lambda tools: RandomOrder(tools.pool.units, tools.seed),
}


def known(name: str) -> str:
    """The name of a criterion.

    Raises:
        InputError: there is none of this name; the nearest is named.
    """
    if name not in CRITERIA:
        near = difflib.get_close_matches(str(name), CRITERIA, 1)
        raise InputError(
            f"there is no criterion {name!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(CRITERIA)}")
        )
    return name


def criterion_of(name: str, tools: Tools) -> Criterion:
    """The criterion of this name.

    Raises:
        InputError: there is none; the nearest is named.
    """
    return CRITERIA[known(name)](tools)

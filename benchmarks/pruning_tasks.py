"""What a pruned model still does, in wrong words or errors left standing, against heads removed.

Criteria order the heads as ``hw.plan`` does, from a text of their own; the sets are run with their repair, which is
checked once against what surgery gives. The random control is there with several seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import headwise as hw
from headwise.measures.covariance import Statistics
from headwise.models import Model
from headwise.plans import RIDGE, HeadPlan
from headwise.surgery import prune
from headwise.surgery.repair import moments_of
from headwise.trace import evaluating
from headwise.verbs.choosing.projecting import Projections, projecting
from headwise.verbs.plan_compare import Comparison, Curve, Point

CONSOLE = Console(width=140)
CRITERIA = ("set-aware", "michel", "random")


@dataclass(frozen=True)
class Counted:
    """For each passage how much went wrong (N,), and out of how much (N,); float64."""

    wrong: Tensor
    of: Tensor

    @property
    def rate(self) -> float:
        return float(self.wrong.sum() / self.of.sum())


#: Runs the model as it is now and counts, by the name of what is counted. The empty set comes first; a later call is
#: told which blocks have other projections.
Measure = Callable[[Sequence[str]], dict[str, Counted]]
#: Names whose rates are nats per token, so that rises are those of the perplexity.
NATS = ("teacher-forced loss",)


@dataclass
class Tasks:
    """One model and what is measured of it.

    Attributes:
        model: the model.
        seen: inputs to choose and repair by.
        found: their statistics.
        measure: see :data:`Measure`.
        passages: how many are measured.
        loss: whose gradients Michel's criterion takes.
        seeds: random orders.
        batch_size: of the passes that choose.
        criteria: which to compare.
    """

    model: Model
    seen: Sequence[Any]
    found: Statistics
    measure: Measure
    passages: int
    loss: Any = "auto"
    seeds: int = 3
    batch_size: int = 8
    criteria: Sequence[str] = CRITERIA

    def __post_init__(self) -> None:
        layout = self.model.layout
        moments = {path: moments_of(layout, block, self.found) for path, block in layout.blocks.items()}
        self._projections = Projections(self.model, moments, "least_squares", RIDGE)
        self._base = self._counted({})
        self._checked = False

    def curves(self, at: Sequence[float], only: Sequence[str] = ()) -> dict[str, Comparison]:
        """A comparison for everything that is counted.

        Args:
            at: shares of the heads of the part.
            only: the part, as ``hw.plan`` takes it; nothing: the whole model.
        """
        made: dict[str, list[Curve]] = {name: [] for name in self._base}
        part = self._part(only)
        heads = sum(block.query_heads for block in self.model.layout.blocks.values())
        sizes = [round(share * sum(self.model.layout.blocks[path].query_heads for path in part)) for share in at]
        for plan, seed, seconds in self._plans:
            order = [cut for cut in plan.cuts if cut.block in part]
            points: dict[str, list[Point]] = {name: [] for name in made}
            for size in sizes:
                for name, point in self._points(replace(plan, cuts=tuple(order[:size]))).items():
                    points[name].append(point)
            for name, curves in made.items():
                passes = plan.facts["passes"] + (plan.criterion == "set-aware")
                curves.append(Curve(plan.criterion, "least_squares", seed, passes, seconds, tuple(points[name])))
        return {name: self._comparison(name, curves, heads, only) for name, curves in made.items()}

    @cached_property
    def _plans(self) -> list[tuple[HeadPlan, int | None, float]]:
        """For every criterion and seed the order of all heads but one of each layer.

        None of the three criteria looks at other layers, so the heads of a part go in the order that they have here.
        """
        blocks = self.model.layout.blocks.values()
        found = []
        for criterion, seed in [(one, seed) for one in self.criteria for seed in self._seeds(one)]:
            began = time.monotonic()
            plan = hw.plan(
                self.model, inputs=list(self.seen), keep=len(blocks) / sum(block.query_heads for block in blocks),
                criterion=criterion, statistics=self.found, seed=seed or 0, loss=self.loss, batch_size=self.batch_size,
            )  # fmt: skip
            found.append((plan, seed, time.monotonic() - began))
            CONSOLE.print(f"chosen: {criterion} {'' if seed is None else seed}, {found[-1][2]:.0f} s", highlight=False)
        return found

    def _seeds(self, criterion: str) -> Sequence[int | None]:
        return range(self.seeds) if criterion == "random" else (None,)

    def _part(self, only: Sequence[str]) -> set[str]:
        wanted = {part for one in only for part in one.split("/")}
        return {site.block for site in self.model.layout.sites if wanted <= {site.key.stack, site.key.kind}}

    def _counted(self, removed: Mapping[str, Sequence[int]]) -> dict[str, Counted]:
        with self._without(removed):
            return self.measure(list(removed))

    @contextmanager
    def _without(self, removed: Mapping[str, Sequence[int]]) -> Iterator[None]:
        parts = {path: [self._projections.without(path, frozenset(gone))] for path, gone in removed.items()}
        module = self.model.module
        with evaluating(module), torch.no_grad(), projecting(module, self.model.layout.blocks, parts):
            yield

    def _points(self, plan: HeadPlan) -> dict[str, Point]:
        self._check(plan)
        found = {}
        for name, now in self._counted(plan.removed).items():
            base = self._base[name]
            change = now.wrong - base.wrong
            rise = float(change.sum() / base.of.sum())
            error = 1.96 * float((change - rise * base.of).square().sum().sqrt() / base.of.sum())
            said = math.expm1 if name in NATS else float
            found[name] = Point(len(plan), said(rise), said(rise - error), said(rise + error))
        return found

    def _check(self, plan: HeadPlan) -> None:
        """What is run is what surgery gives."""
        if self._checked:
            return
        self._checked = True
        small = prune(self.model, plan, statistics=self.found)
        batch = {name: torch.as_tensor(value) for name, value in self.seen[0].items() if name != "labels"}
        batch = {name: value if value.ndim > 1 else value[None] for name, value in batch.items()}
        with evaluating(small.module), torch.no_grad():
            expected = small.module(**batch).logits
        with self._without(plan.removed):
            found = self.model.module(**batch).logits
        worst = float((found - expected).abs().max() / expected.abs().max())
        assert worst < 1e-4, worst
        CONSOLE.print(f"checked: logits without {len(plan)} heads are surgery's to {worst:.1e}", highlight=False)

    def _comparison(self, name: str, curves: Sequence[Curve], heads: int, only: Sequence[str]) -> Comparison:
        said = f"{name}{f', heads of {only[0]} only' if only else ''}"
        of = int(self._base[name].of.sum())
        rows = max(one.z.rows for one in self.found.sites.values())
        held = {"passages": self.passages, "counted": of}
        text = {"passages": len(self.seen), "rows": rows}
        model = self.model
        return Comparison(
            model.name, model.source.weight_hash, "head", said, self._base[name].rate, heads, text, held, tuple(curves)
        )


def table(found: Comparison) -> Table:
    """Values, not rises: what the whole model has, then the pruned ones with 95 % intervals over passages."""
    nats = found.loss.startswith(NATS)

    def value(rise: float) -> str:
        return f"{rise:+.1%}" if nats else f"{found.base + rise:.3f}"

    whole = math.exp(found.base) if nats else found.base
    title = (
        f"{found.model}: {found.loss}; whole model {whole:.3f}; {found.held_out}, chosen and repaired by {found.text}"
    )
    made = Table("criterion", *(f"{point.heads} heads" for point in found.curves[0].points), "seconds", title=title)
    for one in found.curves:
        cells = [f"{value(point.loss)} [{value(point.low)}, {value(point.high)}]" for point in one.points]
        made.add_row(f"{one.criterion} {'' if one.seed is None else one.seed}", *cells, f"{one.seconds:.0f}")
    return made

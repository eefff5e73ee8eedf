"""Choose the heads that go: the verb behind ``hw.plan`` and ``headwise plan``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from headwise.data import Batch
from headwise.errors import InputError
from headwise.measures.covariance import Statistics
from headwise.measures.importance import Loss, loss_for
from headwise.models import Model
from headwise.plans import (
    RIDGE,
    Budget,
    Criterion,
    HeadCut,
    HeadPlan,
    Ledger,
    Pool,
    Repair,
    Step,
    choose,
    most_within,
    removals,
)
from headwise.surgery import INTERCEPTS
from headwise.verbs.calibration import short, weighing
from headwise.verbs.choosing import (
    Asked,
    Part,
    Quality,
    Tools,
    block_shapes,
    check_savings,
    criterion_of,
    layer_seconds,
    rounded,
    sample,
    standing,
    unit_for,
)
from headwise.verbs.choosing.text import tokens_of
from headwise.verbs.forecast import Bar
from headwise.verbs.prepared import Prepared, Source, opened, prepare
from headwise.verbs.statistics import gather

__all__ = ["Work", "plan"]


def plan(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    *,
    inputs: Any = None,
    weights: Sequence[float] | None = None,
    keep: float | None = None,
    params: int | None = None,
    cache_bytes: float | None = None,
    speed: float | None = None,
    max_loss: float | None = None,
    criterion: str = "set-aware",
    repair: Repair = "least_squares",
    ridge: float = RIDGE,
    unit: Literal["head", "group"] | None = None,
    per_layer: int = 1,
    protect: Any = None,
    only: Sequence[str] = (),
    uniform: bool = False,
    replacement: str = "nothing",
    loss: str | Loss | Callable[..., Any] = "auto",
    statistics: str | Path | Statistics | None = None,
    seconds: tuple[Mapping[str, float], float] | None = None,
    skip_first: int = 0,
    relative: bool = True,
    sample: int = 2048,
    width: int = 4,
    step: float = 0.1,
    field: str | None = None,
    target_field: str | None = None,
    window: int | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Bar | None = None,
    notice: Callable[[str], None] | None = None,
    **loading: Any,
) -> HeadPlan:
    """Choose which heads of ``model`` go; the model is as it was afterwards.

    The default criterion is set-aware: from one forward pass over the text it knows for every *set* of a layer's heads
    how much of the layer's output no linear read-out of the other heads can give back, relative to the energy of the
    residual stream there, and takes the cheapest head of all layers, again and again. Heads that repeat each other are
    each cheap and together dear, which no score of single heads can say.

    Args:
        model, texts, inputs, field, target_field, window, max_length, limit, batch_size, progress, notice, loading: as
            for :func:`headwise.scan`. Text is not needed where ``statistics`` are given, or for ``"weight-norm"`` and
            ``"random"``.
        weights: what part of the statistics each of ``texts`` is, relative to the others; without them a text counts as
            long as it is. Criteria that run the model take the texts as they are.
        keep: budget: share of the query heads that stay, in (0, 1].
        params: budget: parameters of the whole model at most.
        cache_bytes: budget: bytes of keys and values per token at most; whole groups go.
        speed: budget: times as fast, as predicted from layer times that are measured on the text (or ``seconds``).
        max_loss: budget: how much worse the pruned and repaired model may be: relative rise of the perplexity (losses
            per token), 1 - cosine (fidelity), relative rise of another loss. Searched on every other passage, confirmed
            on those between.
        criterion: ``"set-aware"``, ``"lazy"`` (a shortlist of ``width`` heads by the set-aware cost, each run with its
            repair, which also tells what that cost is worth in each layer), ``"greedy"`` (every head run after every
            removal), ``"leave-one-out"``, ``"fisher"``, ``"michel"``, ``"michel-iterative"`` (again after each
            ``step`` of the heads), ``"weight-norm"``, ``"random"``.
        repair: what :func:`headwise.prune` will do about the loss (see there); criteria reckon with it.
        ridge: of least squares, as a share of the mean variance.
        unit: ``"head"``, or ``"group"``: a key-value head with all its query heads.
        per_layer: query heads that every layer keeps at least.
        protect: heads that stay: ``{block: [heads]}``, or texts like ``"encoder.layer.0:1,5"`` and
            ``"encoder.layer.0"``.
        only: parts of the model that lose heads: paths, ``"encoder"``, ``"cross"``, ``"decoder/self"``.
        uniform: the same number of heads goes from every layer (and from every group), as stock checkpoints want it.
        replacement: what takes the place of removed heads: ``"nothing"``, ``"constant"`` (their mean, a bias), or
            ``"running_mean"`` (the mean of the values that a query may see; saves heads that share a key-value head).
        loss: what criteria that run the model measure; as for :func:`headwise.verbs.importance_run`.
        statistics: of this model, or the path of a saved file: instead of a pass over the text.
        seconds: of each block's attention and of the whole forward pass, by whoever measured.
        skip_first, relative: which rows statistics take, and how they count; see :func:`headwise.statistics`.
        sample: tokens of text on which sets of heads are run.
        width, step: of ``"lazy"`` and ``"michel-iterative"``.
        seed: of ``"random"``, and of masks and projections in losses.

    Returns:
        The plan: heads in the order of their removal, with what choosing cost; ``.save(path)`` writes it. Its
        ``.statistics`` serve :func:`headwise.prune`, so that the repair needs no second pass.

    Raises:
        InputError: an argument breaks its rule, a budget that cannot be reached, heads that do not exist, or data that
            cannot be read.
        MeasureError: statistics or a loss are not finite.
        ModelError: the model cannot be loaded or is not understood.

    Example:
        >>> import torch
        >>> from headwise.verbs.plan import plan
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=31))
        >>> chosen = plan(gpt2, inputs=[{"input_ids": torch.arange(24).view(1, 24)}], keep=0.5)
        >>> len(chosen), chosen.criterion, chosen.facts["passes"]
        (4, 'set-aware', 1.0)
    """
    budget = Budget(keep, params, cache_bytes, speed, max_loss)
    asked = Asked(
        criterion, repair, ridge, unit, per_layer, protect, only, uniform, replacement, loss, statistics,
        skip_first, relative, sample, width, step, seed,
    )  # fmt: skip
    reading: dict[str, Any] = {
        "field": field, "target_field": target_field, "window": window, "max_length": max_length, "limit": limit,
        "batch_size": batch_size, "seed": seed, "skip_first": skip_first, "relative": relative,
        "running_means": asked.running,
    }  # fmt: skip
    weigh = weighing(texts, weights, reading, statistics=statistics, max_loss=max_loss)
    source = Source(texts, inputs, field, target_field, window, max_length, limit, batch_size)
    work = Work.open(model, source, loading, asked, budget, progress=progress, notice=notice)
    work.weigh = weigh
    return work.plan(seconds)


@dataclass
class Work:
    """A model, its text and what is asked, from the first look to the plan.

    Attributes:
        model: the model.
        ready: model and text; None where no text was needed.
        asked, budget: what is wanted.
        progress: shows the heads chosen.
        apart: keep every so many-th passage apart; 0: as the budget needs.
        weigh: takes the statistics of texts that do not count by their lengths; None: they do.
    """

    model: Model
    ready: Prepared | None
    asked: Asked
    budget: Budget
    progress: Bar | None = None
    apart: int = 0
    weigh: Callable[[Model], Statistics] | None = None
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def open(
        cls,
        model: str | Path | nn.Module | Model,
        source: Source,
        loading: Mapping[str, Any],
        asked: Asked,
        budget: Budget,
        *,
        progress: Bar | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> Work:
        """Open the model, and the text where it is given or needed.

        Raises:
            InputError: text is needed and was not given.
        """
        needed = asked.runs or budget.max_loss is not None or budget.speed is not None
        needed = needed or (asked.reads and asked.statistics is None)
        if needed or source.texts is not None or source.inputs is not None:
            ready = prepare(model, source, loading, progress=progress, notice=notice)
            return cls(ready.model, ready, asked, budget, progress)
        return cls(opened(model, loading), None, asked, budget, progress)

    @property
    def kept_apart(self) -> int:
        """Every how many-th passage is kept for confirming; 0: none."""
        return self.apart or (2 if self.budget.max_loss is not None else 0)

    def part(self, *, apart: bool = False) -> Iterable[Batch]:
        """The text to choose by; or the passages that are kept apart from it."""
        assert self.ready is not None
        every = self.kept_apart
        if not every:
            return self.ready.data
        return Part(self.ready.data, lambda number: (number % every == every - 1) == apart)

    @cached_property
    def statistics(self) -> Statistics:
        """Moments of the head outputs: given, or taken now.

        Raises:
            InputError: given ones are of another model.
        """
        given = self.asked.statistics
        if given is None:
            assert self.ready is not None
            part = f"/all but 1 of {self.kept_apart}" if self.kept_apart else ""
            skip, relative = self.asked.skip_first, self.asked.relative
            if self.weigh is not None:
                taken = self.weigh(self.model)
            else:
                how: dict[str, Any] = {"relative": relative, "running_means": self.asked.running}
                taken = gather(self.ready, self.part(), skip, **how, part=part)
            said = short((one.site.key, one.z.rows, one.heads * one.d_v) for one in taken.sites.values())
            self.notes += [said] if said else []
            return taken
        found = given if isinstance(given, Statistics) else Statistics.load(given)
        ours = self.model.source.weight_hash
        if found.weight_hash is not None and found.weight_hash != ours:
            raise InputError(
                f"the statistics are of the weights {found.weight_hash[:12]}..., and the model has {ours[:12]}...; "
                "take statistics of this model"
            )
        return found

    @cached_property
    def tokens(self) -> int:
        """Of the text to choose by: what one pass is."""
        return sum(tokens_of(batch) for batch in self.part())

    def loss(self, gradients: bool) -> Loss:
        """What sets of heads are run on, or whose gradients are taken."""
        assert self.ready is not None
        labelled = "labels" in self.ready.first().inputs
        options: dict[str, Any] = {"labelled": labelled, "mean": False, "seed": self.asked.seed}
        found = loss_for(self.model, self.asked.loss, gradients=False, **options)
        if gradients:
            asked = "projection" if found.flat else self.asked.loss
            found = loss_for(self.model, asked, gradients=True, **options)
        said = f"{'gradients of' if gradients else 'sets of heads are run on'} the loss {found.said}"
        if said not in self.notes:
            self.notes.append(said)
        return found

    def tools(self, pool: Pool) -> Tools:
        """What criteria are made of."""
        return Tools(
            self.model,
            pool,
            self.asked.priced,
            self.asked.ridge,
            statistics=lambda: self.statistics,
            statistics_passes=float(self.asked.statistics is None),
            evaluate=lambda: (sample(self.part(), self.asked.sample), self.tokens),
            text=self.part,
            loss=self.loss,
            seed=self.asked.seed,
            width=self.asked.width,
            step=self.asked.step,
            alike=self.budget.keep is not None or self.budget.max_loss is not None,
            running=self.asked.running,
        )

    def plan(self, seconds: tuple[Mapping[str, float], float] | None = None) -> HeadPlan:
        """Choose."""
        unit = unit_for(self.asked, self.budget.cache_bytes is not None)
        pool, notes = self.asked.pool(self.model, unit)
        self.notes += notes
        if self.budget.speed is not None and seconds is None:
            seconds = layer_seconds(self.model, sample(self.part(), self.asked.sample))
        layers, whole = seconds or ({}, None)
        added = self.asked.repair in INTERCEPTS or self.asked.replacement == "constant"
        shapes = block_shapes(self.model, layers, intercepts=added, uniform=pool.uniform)
        ledger = Ledger(shapes, _parameters(self.model.module), whole, running=self.asked.running)
        self.budget.check(ledger)
        check_savings(self.budget, ledger, pool)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.asked.seed)
            tools = self.tools(pool)
            chooser = criterion_of(self.asked.criterion, tools)
            steps, facts = self._choose(chooser, pool, ledger, tools)
        self.notes += [*tools.notes, *(note for made in tools.made for note in made.notes)]
        gone = [step.unit for step in steps]
        self.notes += rounded(self.budget, pool, ledger.before.heads, ledger.after(gone).heads)
        self.notes += standing(ledger, gone)
        return self._plan(chooser, pool, ledger, steps, facts)

    def _choose(
        self, chooser: Criterion, pool: Pool, ledger: Ledger, tools: Tools
    ) -> tuple[Sequence[Step], dict[str, Any]]:
        shown: Callable[[int], None] | None = None
        if self.progress is not None:
            bar = self.progress
            shown = lambda done: bar(done, None, "choosing")  # noqa: E731
        if self.budget.max_loss is None:
            return choose(chooser, pool, self.budget, ledger, progress=shown), {}
        search = tools.quality()
        confirm = Quality(
            self.model,
            sample(self.part(apart=True), self.asked.sample),
            search.loss,
            moments=tools.moments,
            repair=self.asked.priced,
            ridge=self.asked.ridge,
            whole=self.tokens,
            running=self.asked.running,
        )
        found = most_within(
            self.budget.max_loss,
            removals(chooser, pool),
            pool,
            lambda gone: search.said(search.rise(gone)),
            lambda gone: confirm.said(confirm.rise(gone)),
        )
        passes = search.passes + confirm.passes
        return found.steps, {
            "searched": [{"units": count, "loss": rise} for count, rise in found.searched],
            "confirmed": [{"units": count, "loss": rise} for count, rise in found.confirmed],
            "loss": dict(found.confirmed).get(len(found.steps), 0.0),
            "search_passes": passes,
        }

    def _plan(
        self, chooser: Criterion, pool: Pool, ledger: Ledger, steps: Sequence[Step], facts: dict[str, Any]
    ) -> HeadPlan:
        layout, asked = self.model.layout, self.asked
        cuts = [HeadCut(step.unit.block, head, asked.replacement) for step in steps for head in step.unit.heads]
        survey = None if self.ready is None else self.ready.survey
        return HeadPlan(
            tuple(cuts),
            model=self.model.name,
            weight_hash=self.model.source.weight_hash,
            criterion=asked.criterion,
            budget=self.budget.to_document(),
            unit=pool.unit,
            blocks={path: (block.query_heads, block.kv_heads) for path, block in layout.blocks.items()},
            facts={
                "passes": chooser.passes + facts.pop("search_passes", 0.0),
                "seconds": time.monotonic() - self.started,
                "repair": asked.repair,
                "scores": [step.score for step in steps],
                "before": ledger.before.to_document(),
                "after": ledger.after([step.unit for step in steps]).to_document(),
                "rules": {"per_layer": pool.per_layer, "uniform": pool.uniform, "only": list(asked.only)},
                "text": None
                if survey is None
                else {
                    "part": survey.digest,
                    "files": [dict(one) for one in survey.facts.files],
                    "passages": survey.facts.passages,
                    "tokens": survey.facts.tokens,
                },
                "notes": list(dict.fromkeys(self.notes)),
                **facts,
            },
            statistics=vars(self).get("statistics"),
        )


def _parameters(root: nn.Module) -> int:
    return sum(value.numel() for value in root.parameters())

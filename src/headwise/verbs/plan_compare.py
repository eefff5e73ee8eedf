"""Criteria compared on text that none of them saw: the verb behind ``headwise plan --compare``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from headwise import artifacts
from headwise.data import Batch
from headwise.errors import InputError
from headwise.models import Model
from headwise.plans import Budget, Criterion, Pool, Unit, removals
from headwise.surgery import METHODS
from headwise.verbs.choosing import CRITERIA, Asked, Quality, Tools, criterion_of, sample, unit_for
from headwise.verbs.choosing.text import tokens_of
from headwise.verbs.forecast import Bar
from headwise.verbs.plan import Work
from headwise.verbs.prepared import Source, prepare

__all__ = ["Comparison", "Curve", "Point", "compare"]

#: Every so many-th passage is held out where no other text is given.
_HELD_OUT: Final = 4
_NINETY_FIVE: Final = 1.96


@dataclass(frozen=True)
class Point:
    """One measured set: so many heads removed, the loss as a budget counts it, and a 95 % interval over passages."""

    heads: int
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """One criterion under one repair.

    Attributes:
        criterion, repair: which.
        seed: of a random order, else None.
        passes: forward passes over the text that the whole order cost.
        seconds: the same in seconds, but for the pass that takes the covariances, which every repair needs as well.
        points: from few heads to many.
    """

    criterion: str
    repair: str
    seed: int | None
    passes: float
    seconds: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Comparison:
    """Quality against heads removed, for every criterion and repair.

    Attributes:
        model, weight_hash: which model.
        unit: what went together.
        loss: what was measured.
        base: loss of the whole model.
        heads: of the model.
        text, held_out: passages and tokens of what criteria saw, and of what everything was measured on.
        curves: the results.
        notes: what the reader should know.
    """

    model: str
    weight_hash: str | None
    unit: str
    loss: str
    base: float
    heads: int
    text: dict[str, Any]
    held_out: dict[str, Any]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...] = field(default=())

    def to_document(self) -> dict[str, Any]:
        """As ``headwise.comparison`` 1.0 (docs/format.md)."""
        return {
            "format": artifacts.COMPARISON_FORMAT,
            "version": artifacts.COMPARISON_VERSION,
            "model": {"name": self.model, "weight_hash": self.weight_hash},
            "unit": self.unit,
            "loss": self.loss,
            "base": self.base,
            "heads": self.heads,
            "text": self.text,
            "held_out": self.held_out,
            "curves": [{**vars(one), "points": [vars(point) for point in one.points]} for one in self.curves],
            "notes": list(self.notes),
        }

    def save(self, path: str | Path) -> Path:
        """Write the document in one step.

        Raises:
            RunError: it cannot be written.
        """
        return artifacts.write_document(path, self.to_document())


def compare(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    *,
    inputs: Any = None,
    held_out: Any = None,
    criteria: Sequence[str] = tuple(CRITERIA),
    repairs: Sequence[str] = ("none", "least_squares"),
    at: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    seeds: int = 3,
    asked: Asked | None = None,
    held_out_sample: int | None = None,
    field: str | None = None,
    target_field: str | None = None,
    window: int | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    progress: Bar | None = None,
    notice: Callable[[str], None] | None = None,
    **loading: Any,
) -> Comparison:
    """Measure on held-out text what is left of a model when each criterion has its way.

    Every criterion orders the heads once, reckoning with the repair of ``asked``; its choices are then measured under
    every repair. The random control is there ``seeds`` times.

    Args:
        model, texts, inputs, field, target_field, window, max_length, limit, batch_size, progress, notice, loading: as
            for :func:`headwise.scan`.
        held_out: texts (or inputs) that no criterion sees; None: every fourth passage of the text.
        criteria: names; see :func:`headwise.plan`.
        repairs: ``"none"``, ``"bias"``, ``"least_squares"``, ``"least_squares_no_bias"``.
        at: shares of the heads removed.
        seeds: random orders.
        asked: further options of :func:`headwise.plan`.
        held_out_sample: tokens of the held-out text to measure on; None: all.

    Raises:
        InputError: an argument breaks its rule, or the data cannot be read.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=31))
        >>> text = [{"input_ids": torch.randint(0, 31, (1, 24))} for _ in range(8)]
        >>> found = compare(gpt2, inputs=text, criteria=["set-aware", "random"], repairs=["none"], at=[0.5], seeds=2)
        >>> [(one.criterion, one.seed, one.points[0].heads) for one in found.curves]
        [('set-aware', None, 4), ('random', 0, 4), ('random', 1, 4)]
    """
    asked = asked or Asked()
    shares = sorted(set(at))
    if not shares or not all(0 < share < 1 for share in shares):
        raise InputError(f"at must be shares of the heads between 0 and 1, and is {list(at)}")
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InputError(f"seeds must be a whole number of random orders, at least 1, and is {seeds!r}")
    wrong = [one for one in repairs if one not in METHODS]
    if wrong or not repairs:
        raise InputError(f"repairs must be of {', '.join(METHODS)}, and are {list(repairs)}")
    chosen = [replace(asked, criterion=name) for name in criteria]
    source = Source(texts, inputs, field, target_field, window, max_length, limit, batch_size)
    work = Work.open(model, source, loading, asked, Budget(keep=1 - shares[-1]), progress=progress, notice=notice)
    work.apart = _HELD_OUT if held_out is None else 0
    if held_out is None:
        unseen: Iterable[Batch] = work.part(apart=True)
    else:
        named: dict[str, Any] = {"texts": None, "inputs": None, "inputs" if inputs is not None else "texts": held_out}
        other = replace(source, limit=None, **named)
        unseen = prepare(work.model, other, {}, progress=progress, notice=notice).data
    batches = list(unseen) if held_out_sample is None else sample(unseen, held_out_sample)
    return _Comparing(work, batches, shares, tuple(repairs), seeds).run(chosen)


@dataclass
class _Comparing:
    work: Work
    batches: list[Batch]
    shares: Sequence[float]
    repairs: Sequence[str]
    seeds: int

    def __post_init__(self) -> None:
        if not self.batches:
            raise InputError("there is no held-out passage to measure on; give more text, or held_out=")
        unit = unit_for(self.work.asked, cache=False)
        self.pool, self.notes = self.work.asked.pool(self.work.model, unit)
        self.tools: Tools = self.work.tools(self.pool)
        loss = self.work.loss(False)
        self.measures = {
            repair: Quality(
                self.work.model,
                self.batches,
                loss,
                moments=None if repair == "none" else self.tools.moments_for(),
                repair=repair,
                ridge=self.work.asked.ridge,
                running=self.work.asked.running,
            )
            for repair in self.repairs
        }

    def run(self, chosen: Sequence[Asked]) -> Comparison:
        curves: list[Curve] = []
        whole = sum(self.seeds if one.criterion == "random" else 1 for one in chosen)
        with torch.random.fork_rng(devices=[]):
            for one in chosen:
                for seed in range(self.seeds) if one.criterion == "random" else (None,):
                    torch.manual_seed(one.seed)
                    self.tools.seed = one.seed + (seed or 0)
                    began = time.monotonic()
                    criterion = criterion_of(one.criterion, self.tools)
                    order = self._order(criterion)
                    seconds = time.monotonic() - began
                    curves += [self._curve(criterion, repair, seed, order, seconds) for repair in self.repairs]
                    if self.work.progress is not None:
                        self.work.progress(len(curves) // len(self.repairs), whole, "comparing")
        model, measured = self.work.model, self.measures[self.repairs[0]]
        made = [note for quality in (*self.tools.made, *self.measures.values()) for note in quality.notes]
        return Comparison(
            model.name,
            model.source.weight_hash,
            self.pool.unit,
            measured.loss.said,
            measured.base,
            self.pool.heads,
            {"tokens": self.work.tokens},
            {"tokens": sum(map(tokens_of, self.batches)), "passages": sum(len(one.passages) for one in self.batches)},
            tuple(curves),
            tuple(dict.fromkeys([*self.notes, *self.work.notes, *self.tools.notes, *made])),
        )

    def _order(self, criterion: Criterion) -> list[Unit]:
        return _order_of(criterion, self.pool, round(self.shares[-1] * self.pool.heads))

    def _curve(
        self, criterion: Criterion, repair: str, seed: int | None, order: Sequence[Unit], seconds: float
    ) -> Curve:
        points = [self._point(repair, _first(order, share * self.pool.heads)) for share in self.shares]
        return Curve(criterion.name, repair, seed, float(criterion.passes), seconds, tuple(points))

    def _point(self, repair: str, removed: Sequence[Unit]) -> Point:
        measure = self.measures[repair]
        rise, error = measure.rise_and_error(removed)
        low, high = (measure.said(rise + sign * _NINETY_FIVE * error) for sign in (-1, 1))
        return Point(sum(len(unit.heads) for unit in removed), measure.said(rise), low, high)


def _order_of(criterion: Criterion, pool: Pool, heads: int) -> list[Unit]:
    taken: list[Unit] = []
    gone = 0
    for step in removals(criterion, pool):
        taken.append(step.unit)
        gone += len(step.unit.heads)
        if gone >= heads:
            break
    return taken


def _first(order: Sequence[Unit], heads: float) -> list[Unit]:
    """The beginning of an order whose number of heads is nearest to ``heads``."""
    taken: list[Unit] = []
    gone = 0
    for unit in order:
        if gone + len(unit.heads) / 2 > heads + 1e-9:
            break
        taken.append(unit)
        gone += len(unit.heads)
    return taken

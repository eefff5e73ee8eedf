"""The loss of a model without certain heads, with the repair that is meant, as a criterion asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.data import Batch
from headwise.errors import MeasureError
from headwise.measures.importance import Loss, Replay, Task, checked_losses, repeated, run_inputs
from headwise.models import Model
from headwise.plans import RIDGE, Unit, gone_of
from headwise.surgery import Moments
from headwise.surgery.averaging import averaged
from headwise.trace import evaluating
from headwise.verbs.choosing.projecting import Projections, projecting
from headwise.verbs.choosing.text import tokens_of

__all__ = ["Quality"]

#: Rows of one forward pass up to which several candidates share it.
_ROWS_AT_ONCE: Final = 2048
_SAME: Final = 1e-4
#: Of a cosine in fp32.
_ROUNDING: Final = 1e-6
_NATS: Final = ("next_token", "target", "masked_token")


class Quality:
    """Evaluates sets of heads: an :class:`~headwise.plans.Evaluator`.

    A removed head is zeroed columns of the output projection, which is exactly what removing it does; with a repair
    the projection is the repaired one. Candidates begin where they begin to differ: all that comes before the output
    projection of a candidate's layer is taken from the pass without it, and several candidates share a pass.

    Args:
        model: as before afterwards.
        batches: the text.
        loss: what is measured.
        moments: of the head outputs by block, for the repair.
        repair: as :func:`headwise.prune` takes it.
        ridge: of least squares.
        whole: tokens of the text in which passes are counted; None: those of ``batches``.
        reuse: take what a candidate does not change from the pass without it.
        running: removed heads are replaced by running means; every candidate then runs the whole model.

    Attributes:
        own_passes: forward passes over ``batches``; a pass from some layer on counts as its share of the weights of
            all linear layers.
        notes: what the reader should know.
    """

    def __init__(
        self,
        model: Model,
        batches: Sequence[Batch],
        loss: Loss,
        *,
        moments: Mapping[str, Moments] | None = None,
        repair: str = "none",
        ridge: float = RIDGE,
        whole: int | None = None,
        reuse: bool = True,
        running: bool = False,
    ) -> None:
        self.model, self.loss = model, loss
        self._tasks = [loss.prepare(model, batch) for batch in batches]
        self._tokens = sum(tokens_of(batch) for batch in batches)
        self._share = 1.0 if whole is None else self._tokens / max(1, whole)
        self._averages, reuse = running, reuse and not running
        self._projections = Projections(model, moments, repair, ridge, running=running)
        self._replay = Replay(model.module, model.layout, inside=True)
        self._replay.enabled = reuse
        self._first = {site.block: site.key for site in reversed(model.layout.sites)}
        self._weights = _linear_weights(model.module)
        self.own_passes, self.notes = 0.0, list[str]()
        self._references: list[Any] = []
        self._base: list[Tensor] = []
        self._checked = not reuse

    @property
    def passes(self) -> float:
        """Forward passes over the whole text."""
        return self.own_passes * self._share

    @property
    def base(self) -> float:
        """The loss of the whole model, per token, row or example."""
        self._measure_base()
        return sum(float(losses.sum()) for losses in self._base) / self._count()

    def rise(self, removed: Sequence[Unit]) -> float:
        """The loss without ``removed`` minus the loss of the whole model, per token, row or example."""
        return self.rise_and_error(removed)[0]

    def rise_and_error(self, removed: Sequence[Unit]) -> tuple[float, float]:
        """The rise, and its standard error over examples."""
        self._measure_base()
        found = []
        with (
            self._running(),
            self._averaged(gone_of(removed)),
            projecting(self.model.module, self.model.layout.blocks, self._parts(removed)),
        ):
            for at, task in enumerate(self._tasks):
                found.append(self._losses(run_inputs(self.model, task), task, at) - self._base[at])
        self.own_passes += 1
        changes, counts = torch.cat(found).cpu(), torch.cat([_counted(self.loss, task) for task in self._tasks])
        rise = float(changes.sum() / counts.sum())
        return rise, float((changes - rise * counts).square().sum().sqrt() / counts.sum())

    def rises(self, removed: Sequence[Unit], candidates: Sequence[Unit]) -> list[float]:
        """The same without ``removed`` and, one at a time, each of ``candidates``."""
        return self._rises(removed, candidates, math.inf)

    def lowest(self, removed: Sequence[Unit], candidates: Sequence[Unit], guess: Unit) -> list[float]:
        """The same, exact for the lowest; the others may be means over the first part of the text, which are above it.

        A fidelity is never below 0, so a candidate whose sum over part of the text is above the whole sum of ``guess``
        cannot be the lowest any more. Other losses are run in full.
        """
        if not self.loss.flat or len(self._tasks) < 2:
            return self._rises(removed, candidates, math.inf)
        return self._rises(removed, candidates, self.rise((*removed, guess)) * self._count())

    def _rises(self, removed: Sequence[Unit], candidates: Sequence[Unit], limit: float) -> list[float]:
        """Means over the text, or over its part up to where the sum went beyond ``limit`` and rounding."""
        self._measure_base()
        totals, counts = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0.0)
        limit += _SAME * abs(limit) + _ROUNDING * self._count()
        with self._running():
            for at, task in enumerate(self._tasks):
                left = [unit for unit in candidates if totals[unit] <= limit]
                unchanged = self._record(removed, task, at)
                for block, several in _by_block(left).items():
                    if not self._checked:
                        self._check(removed, block, task, at, unchanged)
                    for unit, losses in self._candidates(removed, block, several, task, at):
                        totals[unit] += float((losses - self._base[at]).sum())
                        counts[unit] += float(_counted(self.loss, task).sum())
                computed = float(self._replay.enabled) + sum(self._computed(unit.block) for unit in left)
                self.own_passes += computed * tokens_of(task.batch) / max(1, self._tokens)
        self._replay.forget()
        return [totals[unit] / counts[unit] for unit in candidates]

    def said(self, rise: float) -> float:
        """A rise as a budget counts it: for losses in nats per token the relative rise of the perplexity, for
        fidelities the rise itself, for other losses the relative rise."""
        if self.loss.name in _NATS:
            return math.expm1(rise)
        return rise if self.loss.flat else rise / self.base

    @contextmanager
    def _running(self) -> Iterator[None]:
        with evaluating(self.model.module), torch.no_grad():
            yield

    def _averaged(self, gone: Mapping[str, frozenset[int]]) -> AbstractContextManager[None]:
        """Inside, running means stand in the place of heads, where that is what replaces them."""
        return averaged(self.model, self.model.layout, gone if self._averages else {})

    def _measure_base(self) -> None:
        if self._base:
            return
        with self._running():
            for task in self._tasks:
                outputs = run_inputs(self.model, task)
                self._references.append(outputs if self.loss.flat else None)
                self._base.append(checked_losses(self.loss, outputs, task, outputs).double())
        self.own_passes += 1

    def _count(self) -> int:
        return int(sum(_counted(self.loss, task).sum() for task in self._tasks))

    def _losses(self, outputs: Any, task: Task, at: int) -> Tensor:
        return checked_losses(self.loss, outputs, task, self._references[at]).double()

    def _parts(self, removed: Sequence[Unit]) -> dict[str, list[tuple[Tensor, Tensor | None]]]:
        return {path: [self._projections.without(path, gone)] for path, gone in gone_of(removed).items()}

    def _record(self, removed: Sequence[Unit], task: Task, at: int) -> Tensor:
        if not self._replay.enabled:
            return self._base[at]
        with projecting(self.model.module, self.model.layout.blocks, self._parts(removed)), self._replay.recording():
            return self._losses(run_inputs(self.model, task), task, at)

    def _candidates(
        self, removed: Sequence[Unit], block: str, several: Sequence[Unit], task: Task, at: int
    ) -> Iterator[tuple[Unit, Tensor]]:
        gone = gone_of(removed).get(block, frozenset())
        together = self._together(task)
        for start in range(0, len(several), together):
            some = several[start : start + together]
            parts = [self._projections.without(block, gone.union(unit.heads)) for unit in some]
            after = gone.union(*(unit.heads for unit in some))  # one unit, where running means stand for it
            with self._averaged({**gone_of(removed), block: after}):
                losses = self._run(removed, block, parts, task, at)
            yield from zip(some, losses, strict=True)

    def _run(
        self, removed: Sequence[Unit], block: str, parts: list[tuple[Tensor, Tensor | None]], task: Task, at: int
    ) -> Tensor:
        """(copies, B) losses from the block's output projection on, one copy of the batch for each of ``parts``."""
        copies = len(parts)
        large = task if copies == 1 else _copied(task, copies)
        reference = self._references[at]
        reference = reference if copies == 1 or reference is None else repeated(reference, task.size, copies)
        changed = {**self._parts(removed), block: parts}
        below = self._replay.below(self._first[block])
        changed = {path: one for path, one in changed.items() if not self._played(path, below)}
        with (
            projecting(self.model.module, self.model.layout.blocks, _spread(changed, copies)),
            self._replay.from_site(self._first[block], batch=task.size, copies=copies),
        ):
            outputs = run_inputs(self.model, large)
        return checked_losses(self.loss, outputs, large, reference).double().view(copies, -1)

    def _played(self, path: str, below: Sequence[str]) -> bool:
        output = self.model.layout.blocks[path].o_path or ""
        return any(output == one or output.startswith(one + ".") for one in below)

    def _together(self, task: Task) -> int:
        rows = max((value.shape[0] * value.shape[1] for value in task.inputs.values() if value.ndim > 1), default=1)
        return max(1, _ROWS_AT_ONCE // rows) if self._replay.enabled else 1

    def _computed(self, block: str) -> float:
        below = self._replay.below(self._first[block])
        played = sum(
            size
            for path, size in self._weights.items()
            if any(path == one or path.startswith(one + ".") for one in below)
        )
        return 1 - played / max(1, sum(self._weights.values()))

    def _check(self, removed: Sequence[Unit], block: str, task: Task, at: int, expected: Tensor) -> None:
        """Playing back copies must give the loss of a whole pass, to rounding."""
        self._checked = True
        part = self._projections.without(block, gone_of(removed).get(block, frozenset()))
        other = (torch.zeros_like(part[0]), part[1])  # a copy that reaches into another one's rows is seen by it
        try:
            found = self._run(removed, block, [part, other, part], task, at)[::2]
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
            found = torch.full((2, 1), torch.nan)
        scale = float(self._base[at].abs().max()) + 1e-2 if self._base[at].numel() else 1.0
        if not bool(((found - expected).abs() <= _SAME * scale).all()):
            self._replay.enabled = False
            self._replay.forget()
            self.notes.append(
                "the model does not compute from a layer on what it computes in a whole pass, so every candidate ran "
                "the whole model"
            )


def _counted(loss: Loss, task: Task) -> Tensor:
    """For each example what its loss was summed over: targets, rows, or the example itself."""
    if task.targets is not None and task.targets.ndim == 2 and not task.targets.is_floating_point():
        return (task.targets != -100).sum(1).double().cpu()
    if loss.flat and loss.counted == "rows":
        kinds = task.batch.decoder_rows if task.batch.decoder_rows is not None else task.batch.input_rows
        if kinds is not None:
            return (kinds != 0).sum(1).double().cpu()
    return torch.ones(task.size, dtype=torch.float64)


def _copied(task: Task, copies: int) -> Task:
    """The task with its batch so many times over."""
    batch, size = task.batch, task.size
    large = replace(
        batch,
        inputs=repeated(dict(batch.inputs), size, copies),
        passages=batch.passages * copies,
        input_rows=repeated(batch.input_rows, size, copies),
        decoder_rows=repeated(batch.decoder_rows, size, copies),
        where=batch.where * copies,
        texts=batch.texts * copies,
        targets=batch.targets * copies,
    )
    return Task(task.model, large, repeated(dict(task.inputs), size, copies), repeated(task.targets, size, copies))


def _spread(
    parts: Mapping[str, list[tuple[Tensor, Tensor | None]]], copies: int
) -> dict[str, list[tuple[Tensor, Tensor | None]]]:
    """One projection serves all copies; otherwise there is one for each."""
    wrong = [path for path, several in parts.items() if len(several) not in (1, copies)]
    if wrong:
        raise MeasureError(f"{wrong[0]}: {len(parts[wrong[0]])} projections for {copies} copies of the batch")
    return dict(parts)


def _by_block(candidates: Sequence[Unit]) -> dict[str, list[Unit]]:
    found: dict[str, list[Unit]] = {}
    for unit in candidates:
        found.setdefault(unit.block, []).append(unit)
    return found


def _linear_weights(root: nn.Module) -> dict[str, int]:
    """Sizes of the weight matrices that multiply hidden states, by module; a tied one counts where it multiplies."""
    return {
        path: part.weight.numel()
        for path, part in root.named_modules()
        if not isinstance(part, nn.Embedding) and isinstance(getattr(part, "weight", None), Tensor) and _matrix(part)
    }


def _matrix(part: nn.Module) -> bool:
    weight = part.weight
    return isinstance(weight, Tensor) and weight.ndim >= 2

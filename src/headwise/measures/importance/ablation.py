"""Exact ablation: how much the loss rises when one head's output is replaced.

Every head is replaced in turn and the model run again from its layer on; what lies below is taken from the unchanged
pass (:mod:`headwise.measures.importance.replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.data import Batch
from headwise.errors import MeasureError, UnsupportedError
from headwise.layout import HeadId, HeadLayout, SiteKey
from headwise.measures.importance.edits import Ablation, HeadEdit, OutputBank
from headwise.measures.importance.gradients import checked_losses, run_inputs
from headwise.measures.importance.losses import Loss, Task
from headwise.measures.importance.replay import Replay
from headwise.models import Model, observe
from headwise.models.discovery import MODEL_FAILURES
from headwise.trace import evaluating

__all__ = ["Ablator", "Rise"]

#: Called after every head with the number of heads done in this batch and of all heads.
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Rise:
    """What replacing one head did to one batch: the loss with it replaced minus the loss without, (B,), float64."""

    head: HeadId
    kind: Ablation
    values: Tensor


@dataclass
class Ablator:
    """Ablates the heads of a model, batch by batch.

    Attributes:
        model: the model; as before afterwards.
        loss: what is measured.
        kinds: how heads are replaced.
        bank: means and rows to draw from, filled by a pass over the data; needed for ``"mean"`` and ``"resample"``.
        heads: which heads; None for all.
        reuse: take what lies below a layer from the unchanged pass.
        notes: what the reader should know about how it was done.
    """

    model: Model
    loss: Loss
    kinds: Sequence[Ablation] = ("zero",)
    bank: OutputBank | None = None
    heads: Sequence[HeadId] | None = None
    reuse: bool = True
    notes: list[str] = field(default_factory=list)
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._layout: HeadLayout = self.model.layout
        self._replay = Replay(self.model.module, self._layout)
        self._replay.enabled = self.reuse

    @contextmanager
    def _running(self) -> Iterator[HeadEdit]:
        edit = HeadEdit()
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.model.module))
            stack.enter_context(torch.no_grad())
            stack.enter_context(observe(self.model, gates=edit))
            stack.callback(self._replay.forget)
            yield edit

    def batch(self, batch: Batch, step: Step | None = None) -> Iterator[Rise]:
        """Ablate every head on one batch.

        Raises:
            MeasureError: a loss is not finite (the passage is named), or an edit did not act.
        """
        task = self.loss.prepare(self.model, batch)
        with self._running() as edit:
            with self._replay.recording():
                reference = run_inputs(self.model, task)
            base = checked_losses(self.loss, reference, task, reference).double()
            if self._replay.enabled and not self._checked:
                self._check(task, reference, base)
            wanted = list(self._layout.heads()) if self.heads is None else list(self.heads)
            for done, head in enumerate(wanted, start=1):
                for kind in self.kinds:
                    yield Rise(head, kind, self._one(edit, head, kind, task, reference) - base)
                if step is not None:
                    step(done, len(wanted))

    def _one(self, edit: HeadEdit, head: HeadId, kind: Ablation, task: Task, reference: object) -> Tensor:
        edit.aim(head.site, head.head, self._value(head, kind, task))
        with self._replay.from_site(head.site):
            outputs = run_inputs(self.model, task)
        if head.site not in edit.used:
            raise MeasureError(f"{head}: the head was to be replaced, and its attention was not computed in the pass")
        return checked_losses(self.loss, outputs, task, reference).double()

    def _value(self, head: HeadId, kind: Ablation, task: Task) -> Tensor | None:
        if kind == "zero":
            return None
        assert self.bank is not None
        if kind == "mean":
            return self.bank.mean(head.site)[head.head]
        return self.bank.draws(head.site, task.batch, _kinds(task, head.site))[:, :, head.head]

    def _check(self, task: Task, reference: object, base: Tensor) -> None:
        """Playing back must give the unchanged loss to the last bit at the middle and the last site."""
        self._checked = True
        sites = self._layout.sites
        for site in {sites[len(sites) // 2].key, sites[-1].key}:
            if not self._same(site, task, reference, base):
                self._replay.enabled = False
                self._replay.forget()
                self.notes.append(
                    f"the model does not compute from {site} on what it computes in a whole pass (layers share "
                    "something beside their outputs), so every ablation ran the whole model"
                )
                return

    def _same(self, site: SiteKey, task: Task, reference: object, base: Tensor) -> bool:
        try:
            with self._replay.from_site(site):
                again = self.loss(run_inputs(self.model, task), task, reference).double()
        except MODEL_FAILURES:  # a layer looks for what a layer below was to leave for it
            return False
        return torch.equal(again, base)


def _kinds(task: Task, site: SiteKey) -> Tensor:
    decoder = site.stack == "decoder" and task.batch.decoder_rows is not None
    rows = task.batch.decoder_rows if decoder else task.batch.input_rows
    if rows is None:
        raise UnsupportedError(f"{site}: resample ablation needs inputs of tokens; ablate by 'mean' or 'zero'")
    return rows

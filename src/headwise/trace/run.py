"""Run a model over batches and hand every attention call to observers.

The trace does not know what is measured. It runs the part of the model that holds the attention
(a language model's head would build logits that nobody reads), in eval mode and without
gradients, and leaves the model as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from headwise.data import Batch
from headwise.errors import MeasureError
from headwise.kernels import Problem, Wanted
from headwise.layout import Site
from headwise.models import AttentionCall, Model, observe

__all__ = ["BatchObserver", "Progress", "body_of", "evaluating", "run"]


class BatchObserver(Protocol):
    """Sees every attention call of a trace together with the batch that caused it."""

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted | None:
        """What is needed of this call; None when nothing is."""

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Take one answered call."""


@dataclass(frozen=True)
class Progress:
    """How far a trace has come: batches and tokens done."""

    batches: int
    tokens: int


class _Relay:
    """Joins the wishes of several observers into one, and hands each its part of the answer."""

    def __init__(self, observers: Sequence[BatchObserver]) -> None:
        self.observers = observers
        self.batch: Batch | None = None
        self._asked: list[tuple[BatchObserver, slice]] = []

    def want(self, site: Site, problem: Problem) -> Wanted | None:
        wishes = [(observer, observer.want(site, problem, self.batch)) for observer in self.observers]
        self._asked, start, given = [], 0, []
        for observer, wish in wishes:
            if wish is not None:
                stop = start + (0 if wish.pairs is None else wish.pairs.shape[0])
                self._asked.append((observer, slice(start, stop)))
                start = stop
                given.append(wish)
        return _join(given) if given else None

    def see(self, call: AttentionCall) -> None:
        for observer, part in self._asked:
            observer.see(_only(call, part), self.batch)


def _join(wishes: Sequence[Wanted]) -> Wanted:
    pairs = [wish.pairs for wish in wishes if wish.pairs is not None]
    batch = max((one.shape[1] for one in pairs), default=1)
    classes = [wish for wish in wishes if wish.classes is not None]
    if len(classes) > 1:
        raise MeasureError("two observers ask for the weight on classes of keys; trace with one after the other")
    return Wanted(
        rows=any(wish.rows for wish in wishes),
        distance=any(wish.distance for wish in wishes),
        pairs=torch.cat([one.expand(-1, batch, -1) for one in pairs]) if pairs else None,
        weights=any(wish.weights for wish in wishes),
        classes=classes[0].classes if classes else None,
        n_classes=classes[0].n_classes if classes else 0,
    )


def _only(call: AttentionCall, part: slice) -> AttentionCall:
    """The call with the pair weights that one observer asked for."""
    rows = call.answer.rows
    if rows is None or rows.pairs is None:
        return call
    pairs = rows.pairs[part] if part.stop > part.start else None
    return replace(call, answer=replace(call.answer, rows=replace(rows, pairs=pairs)))


def body_of(module: nn.Module, names: Iterable[str], attention: Iterable[str]) -> nn.Module:
    """The smallest part of ``module`` with all its ``attention`` (module paths) that accepts the inputs ``names``.

    For a language model this is the model without its output head, which saves the logits:
    49,152 of them per token in SmolLM2. Where the part does not take an input by name, the whole
    model runs.
    """
    base = getattr(module, "base_model", None)
    if not isinstance(base, nn.Module) or base is module:
        return module
    inside = next((path for path, part in module.named_modules() if part is base), "") + "."
    accepted = inspect.signature(base.forward).parameters
    whole = all(path.startswith(inside) for path in attention)
    return base if whole and all(name in accepted for name in names) else module


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside, every submodule's own mode again afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def run(
    model: Model,
    batches: Iterable[Batch],
    observers: Sequence[BatchObserver],
    *,
    backend: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Run ``model`` over ``batches``; every attention call goes to ``observers``.

    Args:
        model: a loaded or wrapped model.
        batches: padded batches, moved to the model's device one at a time.
        observers: who looks on.
        backend: force one attention backend; None lets the registry choose for each call.
        progress: called after every batch.

    Returns:
        What was done in all.
    """
    relay = _Relay(observers)
    attention = list(model.layout.blocks)
    done = Progress(0, 0)
    with evaluating(model.module), torch.no_grad(), observe(model, relay, backend=backend):
        for batch in batches:
            relay.batch = batch
            inputs = {name: value.to(model.device) for name, value in batch.inputs.items()}
            body = body_of(model.module, inputs, attention)
            extra = {"use_cache": False} if "use_cache" in inspect.signature(body.forward).parameters else {}
            body(**inputs, **extra)
            done = Progress(done.batches + 1, done.tokens + batch.tokens)
            if progress is not None:
                progress(done)
    return done

"""Run a model over batches and hand every attention call to observers.

The trace does not know what is measured. It runs the part of the model that holds the attention
(a language model's head would build logits that nobody reads), in eval mode and without
gradients, and leaves the model as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from headwise.data import Batch
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
    """Joins the wishes of several observers into one, and hands each its answer."""

    def __init__(self, observers: Sequence[BatchObserver]) -> None:
        self.observers = observers
        self.batch: Batch | None = None
        self._asked: list[tuple[BatchObserver, bool]] = []

    def want(self, site: Site, problem: Problem) -> Wanted | None:
        wishes = [(observer, observer.want(site, problem, self.batch)) for observer in self.observers]
        self._asked = [(observer, wish is not None) for observer, wish in wishes]
        given = [wish for _, wish in wishes if wish is not None]
        return _join(given) if given else None

    def see(self, call: AttentionCall) -> None:
        for observer, asked in self._asked:
            if asked:
                observer.see(call, self.batch)


def _join(wishes: Sequence[Wanted]) -> Wanted:
    if len(wishes) == 1:
        return wishes[0]
    pairs = [wish.pairs for wish in wishes if wish.pairs is not None]
    if len(pairs) > 1:
        raise NotImplementedError("two observers of one trace both ask for pairs")
    return Wanted(
        rows=any(wish.rows for wish in wishes),
        distance=any(wish.distance for wish in wishes),
        pairs=pairs[0] if pairs else None,
        weights=any(wish.weights for wish in wishes),
    )


def body_of(module: nn.Module, names: Iterable[str], attention: Iterable[str]) -> nn.Module:
    """The smallest part of ``module`` that computes all its ``attention`` (module paths) and accepts the inputs ``names``.

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

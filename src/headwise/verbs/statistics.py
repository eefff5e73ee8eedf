"""Covariances of head outputs (and of gradients), layer by layer: what planning and repair need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.data import Batch
from headwise.errors import InputError
from headwise.kernels import Problem, Wanted
from headwise.layout import Site
from headwise.measures.covariance import CovarianceObserver, Statistics, capturing
from headwise.measures.importance import Loss, gate_gradients, loss_for
from headwise.models import AttentionCall, Model
from headwise.trace import Progress, run
from headwise.verbs.forecast import Bar
from headwise.verbs.prepared import Prepared, Source, prepare
from headwise.verbs.seeding import check_seed

__all__ = ["check_skip", "gather", "statistics"]


def statistics(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    *,
    inputs: Any = None,
    gradients: bool = False,
    loss: str | Loss | Callable[..., Any] = "auto",
    skip_first: int = 0,
    relative: bool = False,
    running_means: bool = False,
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
) -> Statistics:
    """One streaming pass: for every attention layer the mean and covariance C of its concatenated head outputs.

    Where a layer gates its heads before the output projection, they are taken behind that gate. C is centred and in
    float64; rows are all real rows, special tokens included. With ``gradients`` a backward pass per
    batch gives G = E[g g^T] as well, g the gradient of the loss (summed over an example) at the layer's output. The
    energy of the residual stream at each layer's input comes along. ``.save(path)`` writes a safetensors file.

    Args:
        model, texts, inputs, field, target_field, window, max_length, limit, batch_size, progress, notice, loading: as
            for :func:`headwise.scan`.
        gradients: take gradients, too.
        loss: whose gradients; as for :func:`headwise.verbs.importance_run`.
        skip_first: leave out so many rows at the beginning of every passage: the first tokens of decoders carry massive
            activations that drown the rest.
        relative: rows count by the inverse of their energy in the residual stream, and the first row of a causal
            passage as much as all its others: what :func:`headwise.plan` chooses by and repairs with.
        running_means: take the mean of the visible values of every key-value head along, which plans and repairs with
            the replacement ``"running_mean"`` need.
        seed: of what the loss draws at random.

    Raises:
        InputError: an argument breaks its rule, or the data cannot be read.
        MeasureError: a loss is NaN or does not depend on the heads.
        ModelError: the model cannot be loaded or is not understood.

    Example:
        >>> from headwise.verbs.statistics import statistics
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=31))
        >>> found = statistics(gpt2, inputs=[{"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}])
        >>> [tuple(found[site].covariance.shape) for site in found]
        [(8, 8), (8, 8)]
    """
    check_skip(skip_first)
    source = Source(texts, inputs, field, target_field, window, max_length, limit, batch_size)
    check_seed(seed)
    ready = prepare(model, source, loading, progress=progress, notice=notice)
    rows: dict[str, Any] = {"relative": relative, "running_means": running_means}
    return gather(ready, ready.data, skip_first, **rows, gradients=gradients, loss=loss, seed=seed)


def check_skip(skip_first: Any) -> None:
    """Refuse what is no number of rows."""
    if isinstance(skip_first, bool) or not isinstance(skip_first, int) or skip_first < 0:
        raise InputError(f"skip_first must be a whole number of rows, at least 0, and is {skip_first!r}")


def gather(
    ready: Prepared,
    batches: Iterable[Batch],
    skip_first: int,
    *,
    relative: bool = False,
    running_means: bool = False,
    gradients: bool = False,
    loss: str | Loss | Callable[..., Any] = "auto",
    seed: int = 0,
    part: str = "",
) -> Statistics:
    """The statistics of a model that is ready, over these of its batches; ``part`` names them where they are not all.

    Raises: as :func:`statistics`.
    """
    observer = CovarianceObserver(skip_first, relative=relative, running_means=running_means)
    said = None
    with (
        torch.random.fork_rng(devices=[]),
        observer.watching(ready.model.module, ready.model.layout),
    ):
        torch.manual_seed(seed)
        if gradients:
            labelled = "labels" in ready.first().inputs
            chosen = loss_for(ready.model, loss, labelled=labelled, gradients=True, mean=False, seed=seed)
            said = chosen.said
            _with_gradients(ready, batches, observer, chosen)
        else:
            run(ready.model, batches, [observer], progress=ready.shown)
    facts = {**ready.facts, "parts": [f"{ready.survey.digest}{part}"]}
    return observer.statistics(ready.model.layout, loss=said, **facts)


class _InBatch:
    """Looks on for an observer that wants to know the batch."""

    def __init__(self, observer: CovarianceObserver, batch: Batch) -> None:
        self._observer, self._batch = observer, batch

    def want(self, site: Site, problem: Problem) -> Wanted:
        """As the observer."""
        return self._observer.want(site, problem, self._batch)

    def see(self, call: AttentionCall) -> None:
        """As the observer."""
        self._observer.see(call, self._batch)


def _with_gradients(ready: Prepared, batches: Iterable[Batch], observer: CovarianceObserver, loss: Loss) -> None:
    done = Progress(0, 0)
    layout = ready.model.layout
    with capturing(ready.model.module, layout, observer):
        for batch in batches:
            task = loss.prepare(ready.model, batch)
            gate_gradients(ready.model, task, loss, layout=layout, observer=_InBatch(observer, batch))
            done = Progress(done.batches + 1, done.tokens + batch.tokens)
            ready.shown(done)

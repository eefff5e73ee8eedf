"""How much each head matters: the verb behind ``hw.importance`` and ``headwise importance``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from headwise.artifacts import check_folder, write_run
from headwise.errors import InputError
from headwise.heads import HeadTable
from headwise.layout import HeadId
from headwise.measures.importance import (
    ABLATIONS,
    Ablator,
    ExampleMoments,
    Loss,
    OutputBank,
    ablation_info,
    gate_gradients,
    gradient_infos,
    loss_for,
)
from headwise.models import Model
from headwise.reports import write_report
from headwise.trace import Progress, run
from headwise.verbs.forecast import Bar
from headwise.verbs.prepared import Prepared, Source, prepare
from headwise.verbs.scan import ScanResult
from headwise.verbs.seeding import check_seed

__all__ = ["METHODS", "importance", "importance_run"]

Method = Literal["gradient", "zero", "mean", "resample"]

#: ``"gradient"`` (gate gradients and Fisher information), and the three kinds of exact ablation.
METHODS: Final[tuple[str, ...]] = ("gradient", *ABLATIONS)

_NOTHING_FLOWS: Final = "the loss does not depend on these heads: no gradient flows from it to them"


def importance(model: str | Path | nn.Module | Model, texts: Any = None, **options: Any) -> HeadTable:
    """How much each head of ``model`` matters on ``texts``; the table of :func:`importance_run`, where the options are.

    Example:
        >>> import headwise as hw, torch
        >>> from headwise.verbs.importance import importance
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=31))
        >>> table = importance(gpt2, inputs=[{"input_ids": torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])}])
        >>> table.count("gate_gradient").tolist(), bool((table["gate_gradient"] > 0).all())
        ([2, 2, 2, 2], True)
    """
    return importance_run(model, texts, **options).table


def importance_run(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    *,
    inputs: Any = None,
    method: str | Sequence[str] = "gradient",
    loss: str | Loss | Callable[..., Any] = "auto",
    per: Literal["example", "token"] = "example",
    heads: Sequence[HeadId] | None = None,
    reuse: bool = True,
    output: str | Path | None = None,
    overwrite: bool = False,
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
) -> ScanResult:
    """Measure how much the loss depends on every head.

    One number per example and head, so that batches, order and splitting of the data change nothing; the table has
    their mean, spread and number. The model runs in eval mode and is as it was afterwards; its parameters get no
    gradients.

    Args:
        model, texts, inputs, field, target_field, window, max_length, limit, batch_size, progress, notice, loading: as
            for :func:`headwise.scan`.
        method: one or several of ``"gradient"`` (measures ``gate_gradient`` and ``fisher``, from one backward pass),
            ``"zero"``, ``"mean"`` and ``"resample"`` (measures ``ablation_...``: every head is replaced in turn; one
            pass from its layer on per head).
        loss: ``"next_token"``, ``"masked_token"``, ``"target"`` (teacher-forced), ``"labels"``,
            ``"fidelity_cosine"``, ``"fidelity_kl"``, ``"projection"``; ``"module:function"`` or a function
            ``(outputs, batch) -> (batch,)``; or ``"auto"``: labels where the inputs bring them, else what the model
            was made for, else fidelity to its own output (for gradients a random projection of it).
        per: ``"example"``: the loss is summed over an example's tokens (Michel et al. 2019). ``"token"``: averaged.
        heads: ablate only these.
        reuse: in ablation, take what lies below a head's layer from the unchanged pass.
        output, overwrite: a run folder, as for :func:`headwise.scan`.
        seed: of masks, projections and resampled rows; each depends on the passage and the seed alone.

    Raises:
        InputError: an argument breaks its rule, or the data cannot be read (``DataError``: a passage too short).
        MeasureError: the loss is NaN (the passage is named), or does not depend on the heads.
        ModelError: the model cannot be loaded or is not understood.
        RunError: ``output`` cannot be written.
    """
    started = time.monotonic()
    check_seed(seed)
    methods = _methods(method)
    if per not in ("example", "token"):
        raise InputError(f"per must be 'example' or 'token', not {per!r}")
    if output is not None:
        check_folder(output, overwrite=overwrite)
    source = Source(texts, inputs, field, target_field, window, max_length, limit, batch_size)
    ready = prepare(model, source, loading, progress=progress, notice=notice)
    chosen = loss_for(
        ready.model,
        loss,
        labelled="labels" in ready.first().inputs,
        gradients="gradient" in methods,
        mean=per == "token",
        seed=seed,
    )
    notes: list[str] = [f"loss: {chosen.said}"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = _measure(ready, methods, chosen, heads, reuse, seed, progress, notes)
    table = found.table(**ready.facts)
    document = ready.document(
        seed=seed, seconds=time.monotonic() - started, notes=notes, method=list(methods), loss=chosen.name, per=per
    )
    folder = None
    if output is not None:
        folder = write_run(output, document, table, report=write_report, overwrite=overwrite)
    return ScanResult(table, document, folder)


def _methods(method: str | Sequence[str]) -> tuple[str, ...]:
    given = (method,) if isinstance(method, str) else tuple(method)
    wrong = [one for one in given if one not in METHODS]
    if wrong or not given:
        raise InputError(f"method must be one or several of {', '.join(METHODS)}; got {wrong[0] if wrong else given!r}")
    return tuple(dict.fromkeys(given))


def _measure(
    ready: Prepared,
    methods: Sequence[str],
    loss: Loss,
    heads: Sequence[HeadId] | None,
    reuse: bool,
    seed: int,
    progress: Bar | None,
    notes: list[str],
) -> ExampleMoments:
    kinds = [kind for kind in ABLATIONS if kind in methods]
    infos = [*(gradient_infos(loss) if "gradient" in methods else ()), *(ablation_info(loss, kind) for kind in kinds)]
    found = ExampleMoments(ready.model.layout, infos)
    if "gradient" in methods:
        _gradients(ready, loss, found)
    if kinds:
        bank = OutputBank(seed) if set(kinds) & {"mean", "resample"} else None
        if bank is not None:
            run(ready.model, ready.data, [bank])
        ablator = Ablator(ready.model, loss, kinds, bank, _known(ready, heads), reuse)
        _ablations(ready, ablator, found, progress)
        notes.extend(ablator.notes)
    return found


def _known(ready: Prepared, heads: Sequence[HeadId] | None) -> Sequence[HeadId] | None:
    if heads is None:
        return None
    known = set(ready.model.layout.heads())
    for head in heads:
        if head not in known:
            raise InputError(f"heads names {head}, which is not a head of the model")
    return list(dict.fromkeys(heads))


def _gradients(ready: Prepared, loss: Loss, found: ExampleMoments) -> None:
    done = Progress(0, 0)
    for batch in ready.data:
        task = loss.prepare(ready.model, batch)
        given = gate_gradients(ready.model, task, loss, layout=ready.model.layout)
        for site, gradient in given.gradients.items():
            for name in ("gate_gradient", "fisher"):
                if gradient is None:
                    found.lacks(name, site, _NOTHING_FLOWS)
                else:
                    found.add_site(name, site, gradient.abs() if name == "gate_gradient" else gradient.square())
        done = Progress(done.batches + 1, done.tokens + batch.tokens)
        ready.shown(done)


def _ablations(ready: Prepared, ablator: Ablator, found: ExampleMoments, progress: Bar | None) -> None:
    batches = ready.survey.facts.batches
    for number, batch in enumerate(ready.data):

        def step(done: int, heads: int, number: int = number) -> None:
            if progress is not None:
                progress(number * heads + done, batches * heads, "ablating")

        for rise in ablator.batch(batch, step):
            found.add_head(f"ablation_{rise.kind}", rise.head, rise.values)
    if ablator.heads is not None:
        chosen = {head.site for head in ablator.heads}
        for site in ready.model.layout.sites:
            if site.key not in chosen:
                for kind in ablator.kinds:
                    found.lacks(f"ablation_{kind}", site.key, "no head of this site was asked for")

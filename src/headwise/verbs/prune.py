"""Cut heads out of a model and repair what is left: the verb behind ``hw.prune`` and ``headwise prune``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.measures.covariance import Statistics
from headwise.models import Model, expressible
from headwise.plans import RIDGE
from headwise.surgery import REFITS, Healing, Request, SurgeryRecord, request_of, stock_repair
from headwise.surgery import prune as cut
from headwise.verbs.calibration import Calibration, calibrate, short
from headwise.verbs.forecast import Bar
from headwise.verbs.healing import healed
from headwise.verbs.prepared import opened

__all__ = ["prune"]

_NO_TEXTS_TO_WEIGH: Final = (
    "weights say what each of texts counts in the repair, and none is learned from texts here (no texts, or "
    "statistics= or repair='none' given); give texts to learn from, or no weights"
)


def prune(
    model: str | Path | nn.Module | Model,
    plan: Any,
    texts: Any = None,
    *,
    inputs: Any = None,
    weights: Sequence[float] | None = None,
    repair: str | None = None,
    stock: bool = False,
    statistics: str | Path | Statistics | None = None,
    ridge: float = RIDGE,
    heal: int | Healing = 0,
    example: Mapping[str, Any] | None = None,
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
) -> Model:
    """Cut heads out of a copy of a model, prove that removed equals gated, and repair what is left.

    Args:
        model: a path, a hub id, a module or a model.
        plan: a :class:`~headwise.plans.HeadPlan`, the path of a saved one, or ``{block: [heads]}``. A plan says what
            takes the place of a head: nothing, a constant, or the mean of the values that a query sees: one head of
            each key-value head stays in order to put that out, without a query.
        texts, inputs: what the repair learns from; as for :func:`headwise.scan`. A list of several texts may have
            ``weights``, for the domain of the text decides what the repair is worth.
        weights: what part of the statistics each of ``texts`` is, relative to the others; without them a text counts
            as long as it is.
        repair: ``"least_squares"`` (with an intercept), ``"least_squares_no_bias"`` (without), ``"bias"`` or
            ``"none"``; None is least squares where there is something to learn from (texts, inputs, statistics, or a
            plan that carries them), and is refused elsewhere.
        stock: promise a checkpoint that plain transformers loads: a plan of which a config of the family cannot say the
            counts is refused before anything is done, and where it has no place for an intercept, the repair has none
            (unless ``repair`` says ``"none"``). Without, it is tried, and the record says whether it is one.
        statistics: of this model, from :func:`headwise.statistics`, or the path of a saved file.
        ridge: of least squares: pull towards the weights that are there, as a part of the mean variance.
        heal: train the pruned model for so many steps towards the original, on the same text; a
            :class:`~headwise.surgery.Healing` says the rate, and a folder from which an interrupted run goes on.
        example: keyword arguments of a forward pass for the proof; default one made for the model.
        field, target_field, window, max_length, limit, batch_size, seed, progress, notice, loading: as for
            :func:`headwise.scan`.

    Returns:
        The pruned model: ``.surgery`` is the record with the proof, ``.save(folder)`` saves it. The original is
        untouched.

    Raises:
        InputError: a plan for another model, unknown heads, nothing to repair from, with ``stock`` a plan that is not
            uniform.
        MeasureError: statistics without rows, or not finite.
        UnsupportedError: heads that cannot be cut out exactly, or with ``stock`` a family that cannot say it; nothing
            was changed.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=31))
        >>> small = prune(gpt2, {"transformer.h.0": [1, 3]}, inputs=[{"input_ids": torch.arange(31)[None]}])
        >>> small.module.transformer.h[0].attn.num_heads, small.surgery.repair["method"]
        (2, 'least_squares')
    """
    how = heal if isinstance(heal, Healing) else Healing(heal, seed=seed) if heal else None
    if how is not None and texts is None and inputs is None:
        raise InputError("healing needs text to learn from: give texts (--text FILE) or inputs")
    if weights is not None and (texts is None or statistics is not None or repair == "none"):
        raise InputError(_NO_TEXTS_TO_WEIGH)
    handle = opened(model, loading)
    request = _request(handle, plan := _plan(plan))
    method, said = stock_repair(handle, request, repair) if stock else (repair, None)
    reading_of = {
        "field": field,
        "target_field": target_field,
        "window": window,
        "max_length": max_length,
        "limit": limit,
        "batch_size": batch_size,
    }
    reading = {**reading_of, "seed": seed, "progress": progress, "notice": notice}
    found = _statistics(handle, plan, texts, inputs, weights, statistics, repair, reading)
    if repair is None and found is None:
        raise InputError(
            "the repair needs something to learn from: give texts (--text FILE) or statistics, or say repair='none' "
            "(--repair none) to cut without repair"
        )
    known = None if found is None else found.statistics
    small = cut(handle, plan, repair=method or "least_squares", statistics=known, ridge=ridge, example=example)
    if stock:
        _keep_promise(small, said, notice)
    assert small.surgery is not None
    if found is not None:
        told = {**small.surgery.repair, "calibration": found.said}
        small = replace(small, surgery=replace(small.surgery, repair=told))
    _warn(small, notice)
    if how is not None:
        small = healed(small, handle, texts, inputs, how, reading=reading_of, progress=progress, notice=notice)
    return small


def _keep_promise(small: Model, said: str | None, notice: Callable[[str], None] | None) -> None:
    """Refuse what came out as no stock checkpoint after all, and say by which repair it is one.

    Raises:
        UnsupportedError: transformers could not load it.
    """
    why = expressible(small.module)
    if why is not None:
        raise UnsupportedError(f"stock: a checkpoint of plain transformers cannot say what was cut: {why}")
    if said is not None and notice is not None:
        notice(f"note: {said}")


def _request(model: Model, plan: Any) -> Request:
    """What the plan asks for; a plan for other weights is refused here, before a long calibration."""
    hashed = model.source.weight_hash if getattr(plan, "weight_hash", None) else None
    return request_of(model.layout, plan, hashed, model.name)


def _plan(plan: Any) -> Any:
    if isinstance(plan, str | Path):
        from headwise.plans import HeadPlan

        return HeadPlan.load(plan)
    return plan


def _statistics(
    model: Model,
    plan: Any,
    texts: Any,
    inputs: Any,
    weights: Sequence[float] | None,
    statistics: str | Path | Statistics | None,
    repair: str | None,
    reading: Mapping[str, Any],
) -> Calibration | None:
    if statistics is not None:
        if texts is not None or inputs is not None:
            raise InputError("give texts or statistics, one of the two; both were given")
        known = statistics if isinstance(statistics, Statistics) else Statistics.load(statistics)
        source = {} if isinstance(statistics, Statistics) else {"file": str(statistics)}
        return Calibration(known, {**source, "parts": list(known.parts), "relative": known.relative})
    if texts is None and inputs is None:
        carried = getattr(plan, "statistics", None)
        if not isinstance(carried, Statistics) or repair == "none":
            return None
        said = {"from": "the plan", "parts": list(carried.parts), "relative": carried.relative}
        return Calibration(carried, said)
    replacements = {one.replacement for one in getattr(plan, "cuts", ())}
    if repair == "none" and "constant" not in replacements:
        return None
    running = "running_mean" in replacements and repair != "none"
    return calibrate(model, texts, inputs, weights, reading, running_means=running)


def _warn(small: Model, notice: Callable[[str], None] | None) -> None:
    """Say that the text was short, or that nothing is saved: to ``notice``, or as warnings."""
    assert small.surgery is not None
    repair = small.surgery.repair
    layers = repair["layers"] if repair["method"] in REFITS else ()
    found = (short((one["module"], one["rows"], one["columns"]) for one in layers), _nothing_saved(small.surgery))
    for said in found:
        if said is None:
            continue
        if notice is None:
            warnings.warn(said, stacklevel=3)
        else:
            notice(f"warning: {said}")


def _nothing_saved(record: SurgeryRecord) -> str | None:
    """What to say where no two heads that are replaced by running means share a key-value head; None elsewhere."""
    heads = sum(len(one.averaged) for one in record.blocks)
    if not heads or any(len(one) > 1 for block in record.blocks for one in block.means):
        return None
    return (
        f"running means save nothing here: none of the heads replaced ({heads}) shares its key-value head with "
        "another of them, so each stays in order to put its running mean out; plan with the replacement "
        "'constant' to cut them out"
    )

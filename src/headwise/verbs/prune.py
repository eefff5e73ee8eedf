"""Cut heads out of a model and repair what is left: the verb behind ``hw.prune`` and ``headwise prune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from headwise.errors import InputError
from headwise.measures.covariance import SiteStatistics, Statistics
from headwise.measures.covariance.accumulate import Scatter
from headwise.models import Model, as_model, load
from headwise.surgery import prune as cut
from headwise.surgery import request_of
from headwise.verbs.forecast import Bar
from headwise.verbs.statistics import statistics as take_statistics

__all__ = ["prune", "weighted"]

#: The first tokens of a decoder carry massive activations that drown the rest of the statistics.
_FIRST_TOKENS: Final = 4
#: Rows of text for each column that a repair decides about, below which it is warned of.
_ENOUGH: Final = 5


def prune(
    model: str | Path | nn.Module | Model,
    plan: Any,
    texts: Any = None,
    *,
    inputs: Any = None,
    weights: Sequence[float] | None = None,
    repair: str | None = None,
    statistics: str | Path | Statistics | None = None,
    ridge: float = 1e-3,
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
        plan: a :class:`~headwise.plans.HeadPlan`, the path of a saved one, or ``{block: [heads]}``.
        texts, inputs: what the repair learns from; as for :func:`headwise.scan`. A list of several texts may have
            ``weights``, for the domain of the text decides what the repair is worth.
        weights: what part of the statistics each of ``texts`` is, relative to the others.
        repair: ``"least_squares"`` (with an intercept), ``"bias"`` or ``"none"``; None is least squares where there is
            something to learn from (texts, inputs, statistics, or a plan that carries them), and is refused elsewhere.
        statistics: of this model, from :func:`headwise.verbs.statistics`, or the path of a saved file.
        ridge: of least squares: pull towards the weights that are there, as a part of the mean variance.
        example: keyword arguments of a forward pass for the proof; default the first of the text, or one made for the
            model.
        field, target_field, window, max_length, limit, batch_size, seed, progress, notice, loading: as for
            :func:`headwise.scan`.

    Returns:
        The pruned model: ``.surgery`` is the record with the proof, ``.save(folder)`` saves it. The original is
        untouched.

    Raises:
        InputError: a plan for another model, unknown heads, nothing to repair from.
        UnsupportedError: heads that cannot be cut out exactly; nothing was changed.
    """
    handle = _opened(model, loading)
    request_of(handle.layout, plan := _plan(plan))  # refuses a wrong plan before a long calibration
    reading = {
        "field": field,
        "target_field": target_field,
        "window": window,
        "max_length": max_length,
        "limit": limit,
        "batch_size": batch_size,
        "seed": seed,
        "progress": progress,
        "notice": notice,
    }
    found = _statistics(handle, plan, texts, inputs, weights, statistics, repair, reading)
    if repair is None and found is None:
        raise InputError(
            "the repair needs something to learn from: give texts (--text FILE) or statistics, or say repair='none' "
            "(--repair none) to cut without repair"
        )
    small = cut(handle, plan, repair=repair or "least_squares", statistics=found, ridge=ridge, example=example)
    if notice is not None:
        _warn(small, notice)
    return small


def _opened(model: str | Path | nn.Module | Model, loading: Mapping[str, Any]) -> Model:
    if isinstance(model, str | Path):
        return load(model, **loading)
    given = {name: value for name, value in loading.items() if value is not None}
    if given:
        raise InputError(
            f"{', '.join(sorted(given))}: options of loading, for a model given by path or id; this model is in "
            "memory: "
            "load or move it yourself, or leave the options out"
        )
    return as_model(model)


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
) -> Statistics | None:
    if statistics is not None:
        if texts is not None or inputs is not None:
            raise InputError("give texts or statistics, one of the two; both were given")
        return statistics if isinstance(statistics, Statistics) else Statistics.load(statistics)
    if texts is None and inputs is None:
        carried = getattr(plan, "statistics", None)
        return carried if isinstance(carried, Statistics) else None
    if repair == "none" and not any(one.replacement == "constant" for one in getattr(plan, "cuts", ())):
        return None
    first = _FIRST_TOKENS if all(site.causal for site in model.layout.sites) else 0
    if weights is None:
        return take_statistics(model, texts, inputs=inputs, skip_first=first, **reading)
    pieces = list(texts) if isinstance(texts, Sequence) and not isinstance(texts, str) else [texts]
    _check_weights(pieces, weights)
    parts = [take_statistics(model, [piece], skip_first=first, **reading) for piece in pieces]
    return weighted(parts, weights)


def _check_weights(pieces: Sequence[Any], weights: Sequence[float]) -> None:
    if len(pieces) != len(weights):
        raise InputError(f"{len(weights)} weights for {len(pieces)} texts; give one for each")
    if any(isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < float("inf") for one in weights):
        raise InputError(f"weights must be numbers above 0, and are {list(weights)}")


def weighted(parts: Sequence[Statistics], weights: Sequence[float]) -> Statistics:
    """The statistics of several texts, each counting as its weight says and not as its length."""
    total = sum(weights)
    whole: Statistics | None = None
    for part, weight in zip(parts, weights, strict=True):
        scaled = Statistics(
            [_scaled(part[key], weight / total, parts) for key in part],
            model=part.model,
            weight_hash=part.weight_hash,
            parts=part.parts,
            skip_first=part.skip_first,
            loss=part.loss,
        )
        whole = scaled if whole is None else whole.merge(scaled, overlap=True)
    if whole is None:
        raise InputError("there are no statistics to weigh")
    return whole


def _scaled(one: SiteStatistics, share: float, parts: Sequence[Statistics]) -> SiteStatistics:
    rows = sum(part[one.site.key].z.rows for part in parts)
    return replace(one, z=Scatter.of(max(1, round(share * rows)), one.z.mean, one.z.covariance))


def _warn(small: Model, notice: Callable[[str], None]) -> None:
    assert small.surgery is not None
    layers = small.surgery.repair.get("layers", [])
    short = [one for one in layers if one["rows"] < _ENOUGH * one["columns"]]
    if short:
        worst = max(short, key=lambda one: one["columns"] / max(1, one["rows"]))
        notice(
            f"warning: the text is short: {worst['rows']:,} rows decide about {worst['columns']:,} columns of "
            f"{worst['module']}; give at least {_ENOUGH * worst['columns']:,} rows, or the repair learns the text by "
            "heart"
        )

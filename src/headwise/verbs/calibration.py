"""The text that a repair learns from: statistics of one or several texts, and what the record says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headwise.errors import InputError
from headwise.measures.covariance import SiteStatistics, Statistics
from headwise.measures.covariance.accumulate import Scatter
from headwise.models import Model
from headwise.verbs.statistics import statistics as take_statistics

__all__ = ["Calibration", "calibrate", "short", "weighing", "weighted"]

#: Rows of text for each column of a layer's head outputs, below which it is said.
_ENOUGH: Final = 5


@dataclass(frozen=True)
class Calibration:
    """Statistics and where they came from.

    Attributes:
        statistics: of the model's head outputs.
        said: for the record, in the types of JSON.
    """

    statistics: Statistics
    said: dict[str, Any]


def calibrate(
    model: Model,
    texts: Any,
    inputs: Any,
    weights: Sequence[float] | None,
    reading: Mapping[str, Any],
    *,
    running_means: bool = False,
) -> Calibration:
    """One pass over the text; rows count relative to the residual stream, as they do for :func:`headwise.plan`.

    Args:
        model: the model.
        texts, inputs: one of the two, as for :func:`headwise.statistics`.
        weights: what each of ``texts`` counts, or None.
        reading: further arguments of :func:`headwise.statistics`.
        running_means: take running means along.

    Raises:
        InputError: weights that are no positive numbers, or not one for each text.
    """
    pieces = _pieces(texts)
    reading = {**reading, "relative": True, "running_means": running_means}
    if weights is None:
        found = take_statistics(model, texts, inputs=inputs, **reading)
    else:
        found = _statistics_of(model, texts, weights, **reading)
    given = [texts] if isinstance(texts, str) else [_named(piece) for piece in pieces]  # a text alone is a path
    said = {
        "texts": given if texts is not None else [],
        "inputs": None if inputs is None else _named(inputs),
        "weights": None if weights is None else [float(one) for one in weights],
        "parts": list(found.parts),
        "relative": True,
        "rows": max((one.z.rows for one in found.sites.values()), default=0),
    }
    return Calibration(found, said)


def _statistics_of(model: Model, texts: Any, weights: Sequence[float], **reading: Any) -> Statistics:
    """The statistics of several texts, one pass over each, weighed.

    Raises:
        InputError: as :func:`_check_weights`.
    """
    _check_weights(texts, weights)
    return weighted([take_statistics(model, [piece], **reading) for piece in _pieces(texts)], weights)


def weighing(
    texts: Any, weights: Sequence[float] | None, reading: Mapping[str, Any], *, statistics: Any, max_loss: float | None
) -> Callable[[Model], Statistics] | None:
    """What takes the weighed statistics of a model; None where texts count by their lengths.

    Raises:
        InputError: there is nothing to weigh, or not one weight above 0 for each text.
    """
    if weights is None:
        return None
    if statistics is not None:
        raise InputError("weights are of texts, and statistics were given; leave one of the two out")
    if max_loss is not None:
        raise InputError(
            "weights and max_loss do not go together: half of the passages is kept apart there, and weights are of "
            "whole texts; give another budget, or no weights"
        )
    _check_weights(texts, weights)
    return lambda model: _statistics_of(model, texts, weights, **reading)


def short(sizes: Iterable[tuple[Any, int, int]]) -> str | None:
    """What to say of the layer with the fewest rows of text for its columns; None where all have enough.

    Args:
        sizes: of each layer its name, rows and columns.

    >>> short([("attn", 40, 8)]) is None
    True
    """
    name, rows, columns = min(sizes, key=lambda one: one[1] / max(1, one[2]), default=("", 0, 0))
    if rows >= _ENOUGH * columns:
        return None
    return (
        f"the text is short: {rows:,} rows for the {columns:,} columns of {name}; give at least {_ENOUGH * columns:,} "
        "rows, or the choice and the repair learn the text by heart"
    )


def _pieces(texts: Any) -> list[Any]:
    return list(texts) if isinstance(texts, Sequence) and not isinstance(texts, str) else [texts]


def _named(piece: Any) -> str:
    if isinstance(piece, Path):
        return str(piece)
    return f"{len(piece):,} characters given in memory" if isinstance(piece, str) else f"a {type(piece).__name__}"


def _check_weights(texts: Any, weights: Sequence[float]) -> None:
    """Refuse weights that are not one number above 0 for each of ``texts``.

    Raises:
        InputError: they are not.
    """
    if texts is None:
        raise InputError("weights say what each of texts counts, and no texts were given; give texts, or no weights")
    pieces = _pieces(texts)
    if len(pieces) != len(weights):
        raise InputError(f"{len(weights)} weights for {len(pieces)} texts; give one for each")
    if any(isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < float("inf") for one in weights):
        raise InputError(f"weights must be numbers above 0, and are {list(weights)}")


def weighted(parts: Sequence[Statistics], weights: Sequence[float]) -> Statistics:
    """The statistics of several texts, each counting as its weight says and not as its length."""
    whole: Statistics | None = None
    for part, weight in zip(parts, weights, strict=True):
        scaled = Statistics(
            [_scaled(part[key], weight) for key in part],
            model=part.model,
            weight_hash=part.weight_hash,
            parts=part.parts,
            skip_first=part.skip_first,
            relative=part.relative,
            loss=part.loss,
        )
        whole = scaled if whole is None else whole.merge(scaled, overlap=True)
    if whole is None:
        raise InputError("there are no statistics to weigh; give at least one text")
    return whole


def _scaled(one: SiteStatistics, weight: float) -> SiteStatistics:
    if not one.z.rows:
        return one
    return replace(one, z=Scatter.of(one.z.rows, one.z.mean, one.z.covariance, float(weight)), gradient=None)

"""The text that a repair learns from: statistics of one or several texts, and what the record says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headwise.errors import InputError
from headwise.measures.covariance import SiteStatistics, Statistics
from headwise.measures.covariance.accumulate import Scatter
from headwise.models import Model
from headwise.verbs.statistics import statistics as take_statistics

__all__ = ["Calibration", "calibrate", "weighted"]

#: The first tokens of a decoder carry massive activations that drown the rest of the statistics.
_FIRST_TOKENS: Final = 4


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
    model: Model, texts: Any, inputs: Any, weights: Sequence[float] | None, reading: Mapping[str, Any]
) -> Calibration:
    """One pass over the text; of a decoder without the first four tokens of every passage.

    Args:
        model: the model.
        texts, inputs: one of the two, as for :func:`headwise.statistics`.
        weights: what each of ``texts`` counts, or None.
        reading: further arguments of :func:`headwise.statistics`.

    Raises:
        InputError: weights that are no positive numbers, or not one for each text.
    """
    first = _FIRST_TOKENS if all(site.causal for site in model.layout.sites) else 0
    pieces = list(texts) if isinstance(texts, Sequence) and not isinstance(texts, str) else [texts]
    if weights is None:
        found = take_statistics(model, texts, inputs=inputs, skip_first=first, **reading)
    else:
        if texts is None:
            raise InputError("weights say what each of texts counts, and inputs were given; give texts, or no weights")
        _check_weights(pieces, weights)
        parts = [take_statistics(model, [piece], skip_first=first, **reading) for piece in pieces]
        found = weighted(parts, weights)
    said = {
        "texts": [_named(piece) for piece in pieces] if texts is not None else [],
        "inputs": None if inputs is None else _named(inputs),
        "weights": None if weights is None else [float(one) for one in weights],
        "parts": list(found.parts),
        "skip_first": first,
        "rows": max((one.z.rows for one in found.sites.values()), default=0),
    }
    return Calibration(found, said)


def _named(piece: Any) -> str:
    if isinstance(piece, Path):
        return str(piece)
    return f"{len(piece):,} characters given in memory" if isinstance(piece, str) else f"a {type(piece).__name__}"


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
        raise InputError("there are no statistics to weigh; give at least one text")
    return whole


def _scaled(one: SiteStatistics, share: float, parts: Sequence[Statistics]) -> SiteStatistics:
    rows = sum(part[one.site.key].z.rows for part in parts)
    if not one.z.rows:
        return one
    return replace(one, z=Scatter.of(max(1, round(share * rows)), one.z.mean, one.z.covariance), gradient=None)

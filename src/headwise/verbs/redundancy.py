"""How alike heads are: the verb behind ``hw.redundancy`` and ``headwise redundancy``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import InputError, MeasureError
from headwise.measures.covariance import CovarianceObserver
from headwise.measures.similarity import OutputAlignment, PatternDistances, Redundancy
from headwise.models import Model
from headwise.trace import run
from headwise.verbs.forecast import Bar
from headwise.verbs.prepared import Source, prepare
from headwise.verbs.seeding import check_seed

__all__ = ["redundancy"]


def redundancy(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    *,
    inputs: Any = None,
    rows: int = 4,
    directions: int | None = None,
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
) -> Redundancy:
    """Compare every two heads of a model: their patterns on sampled query rows, their outputs over all rows.

    Patterns by Jensen-Shannon distance, on ``rows`` query rows of every passage (drawn by the passage's content); never
    n x n. Outputs by linear CKA: within a layer exactly, from the covariance; across layers from ``directions`` random
    directions of each head.

    Args:
        model, texts, inputs, field, target_field, window, max_length, limit, batch_size, progress, notice, loading: as
            for :func:`headwise.scan`.
        rows: query rows of each passage on which patterns are compared.
        directions: random directions of each head; None: as many as keep all heads together below 8,192 (exact where
            that is all of them: MiniLM's 72 heads of width 32).
        seed: of rows and directions.

    Raises:
        InputError: an argument breaks its rule, or the data cannot be read.
        MeasureError: no head is left in the model.
        ModelError: the model cannot be loaded or is not understood.

    Example:
        >>> import torch
        >>> from headwise.verbs.redundancy import redundancy
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=31, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        ...                     intermediate_size=16)
        >>> found = redundancy(BertModel(config), inputs=[{"input_ids": torch.tensor([[1, 5, 7, 2, 9]])}])
        >>> found.js.shape, found.outputs["exact"]
        ((4, 4), True)
    """
    for name, value in (("rows", rows), ("directions", directions)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} must be a whole number of at least 1, and is {value!r}")
    source = Source(texts, inputs, field, target_field, window, max_length, limit, batch_size)
    check_seed(seed)
    ready = prepare(model, source, loading, progress=progress, notice=notice)
    layout = ready.model.layout
    if not layout.sites:
        raise MeasureError(f"{ready.model.name}: no head is left in it, so there is nothing to compare")
    covariance = CovarianceObserver()
    alignment, patterns = OutputAlignment(layout, directions, seed), PatternDistances(layout, rows, seed)
    run(ready.model, ready.data, [covariance, alignment, patterns], progress=ready.shown)
    patterns.finish()
    found = covariance.statistics(layout)
    heads = tuple(layout.heads())
    labels = {site.key: site.layer for site in layout.sites}
    return Redundancy(
        heads,
        tuple(labels[head.site] for head in heads),
        patterns.distances,
        alignment.alignment(found),
        {"rows": patterns.sampled, "rows_per_passage": rows, "seed": seed},
        {
            "directions": alignment.directions,
            "exact": alignment.exact,
            "rows": max(one.z.rows for one in found.sites.values()),
        },
        ready.model.name,
        ready.model.source.weight_hash,
        (ready.survey.digest,),
    )

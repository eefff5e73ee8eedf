"""The passages of a batch as roles see them, for the attention of one site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.data import PADDING, SPECIAL, Batch
from headwise.kernels import Problem
from headwise.layout import Site
from headwise.measures.roles.tokens import Lexicon, Tokens

__all__ = ["Passage", "read_passages_of"]

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Passage:
    """One row of a batch: its tokens, and where their positions stand in the batch.

    Attributes:
        tokens: what roles are given.
        queries, keys: the position in the call of each query and key position of the passage.
    """

    tokens: Tokens
    queries: Ints
    keys: Ints
    found: dict[str, object] = field(default_factory=dict)


def read_passages_of(
    site: Site, problem: Problem, batch: Batch | None, lexicon: Lexicon, counts: Mapping[int, int] | None
) -> list[Passage] | str:
    """The passages of the call, or why they cannot be told from it."""
    if batch is None:
        return "roles need the batch that caused the attention"
    size, queries, keys = problem.q.shape[0], problem.q.shape[2], problem.k.shape[2]
    if size != len(batch.passages):
        return f"{len(batch.passages)} passages reached this attention as a batch of {size}"
    mine = _side(site, batch)
    if mine is not None and mine.shape[1] != queries:
        return f"{mine.shape[1]} positions reached this attention as {queries} query rows"
    own = "decoder_input_ids" if mine is not None and mine is batch.decoder_rows else "input_ids"
    views = _views(batch, own, mine, queries, lexicon, counts, causal=site.causal)
    if site.key.kind == "self":
        if keys != queries:
            return f"{queries} query rows see {keys} keys in self-attention"
        return [Passage(tokens, positions, positions) for tokens, positions in views]
    other = batch.input_rows if batch.input_rows is not None and batch.input_rows.shape[1] == keys else None
    of_keys = _views(batch, "input_ids", other, keys, lexicon, None, causal=False)
    return [
        Passage(replace(tokens, keys=key_tokens), positions, key_positions)
        for (tokens, positions), (key_tokens, key_positions) in zip(views, of_keys, strict=True)
    ]


def _side(site: Site, batch: Batch) -> Tensor | None:
    if site.key.stack == "decoder" and batch.decoder_rows is not None:
        return batch.decoder_rows
    return None if site.key.stack in ("vision", "audio") else batch.input_rows


def _views(
    batch: Batch,
    name: str,
    kinds: Tensor | None,
    count: int,
    lexicon: Lexicon,
    counts: Mapping[int, int] | None,
    *,
    causal: bool,
) -> list[tuple[Tokens, Ints]]:
    ids = batch.inputs.get(name) if kinds is not None else None
    if ids is not None and ids.shape != kinds.shape:  # type: ignore[union-attr]
        ids = None
    texts = batch.targets if name.startswith("decoder") else batch.texts
    kinds = torch.ones(len(batch.passages), count, dtype=torch.int8) if kinds is None else kinds.cpu()
    rows = kinds.numpy()
    listed = None if ids is None else ids.cpu().numpy()
    found = []
    for row, passage in enumerate(batch.passages):
        real = np.flatnonzero(rows[row] != PADDING)
        tokens = Tokens(
            ids=None if listed is None else tuple(listed[row][real].tolist()),
            count=len(real),
            special=tuple((rows[row][real] == SPECIAL).tolist()),
            passage=passage,
            where=batch.where[row] if row < len(batch.where) else f"passage {passage} (counted from 0)",
            text=texts[row] if row < len(texts) else None,
            lexicon=lexicon,
            causal=causal,
            counts=counts,
        )
        found.append((tokens, real.astype(np.int64)))
    return found

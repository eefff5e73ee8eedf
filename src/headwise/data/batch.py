"""One padded batch, and how rows of unequal length become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["PADDING", "SPECIAL", "TOKEN", "Batch", "pad"]

PADDING, TOKEN, SPECIAL = 0, 1, 2


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes, and which of its rows count.

    Attributes:
        inputs: the arguments of ``model(**inputs)``, batch first.
        passages: for each row of the batch the index of its passage, counted from 0 in the order of the source.
        input_rows: int8 (batch, query position): 0 padding, 1 token, 2 special token. None where positions are no
            tokens (images, audio): every row counts.
        decoder_rows: the same for ``decoder_input_ids``, or None.
        tokens: real tokens in the batch, special ones not counted; of the encoder and the decoder together.
        where: for each row where its passage stands, for messages; empty where nobody knows.
        texts: for each row the text that it was made from, or None (ready inputs, windows of longer texts); may be empty.
        targets: the same for the decoder's text.
    """

    inputs: dict[str, Tensor]
    passages: tuple[int, ...]
    input_rows: Tensor | None = None
    decoder_rows: Tensor | None = None
    tokens: int = field(default=0)
    where: tuple[str, ...] = ()
    texts: tuple[str | None, ...] = ()
    targets: tuple[str | None, ...] = ()


def pad(
    rows: Sequence[Sequence[float]], fill: float, *, left: bool = False, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Rows of unequal length as one tensor (rows, longest), filled on one side.

    >>> pad([[5, 6], [7]], 0).tolist()
    [[5, 6], [7, 0]]
    >>> pad([[5, 6], [7]], 0, left=True).tolist()
    [[5, 6], [0, 7]]
    """
    longest = max(len(row) for row in rows)
    out = torch.full((len(rows), longest), fill, dtype=dtype)
    for index, row in enumerate(rows):
        if len(row):
            start = longest - len(row) if left else 0
            out[index, start : start + len(row)] = torch.as_tensor(row, dtype=dtype)
    return out

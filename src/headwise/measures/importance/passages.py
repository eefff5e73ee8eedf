"""Passages by content: names for messages, and random draws that depend on the passage and on nothing around it."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from headwise.data import PADDING, Batch
from headwise.models import Model

__all__ = ["generator_for", "named", "passage_keys"]


def passage_keys(batch: Batch) -> tuple[int, ...]:
    """A whole number for each row of a batch, from the content of its passage alone (padding left out)."""
    keys = []
    for row in range(len(batch.passages)):
        found = sha256()
        for name, value in sorted(batch.inputs.items()):
            if name.endswith("attention_mask") or not value.ndim or value.shape[0] != len(batch.passages):
                continue
            kinds = batch.decoder_rows if name.startswith("decoder_") else batch.input_rows
            one = value[row].detach().cpu()
            if kinds is not None and one.ndim and one.shape == kinds[row].shape:
                one = one[kinds[row] != PADDING]
            found.update(name.encode() + b":")
            found.update(one.contiguous().view(torch.uint8).numpy().tobytes() if one.ndim else str(one.item()).encode())
        keys.append(int.from_bytes(found.digest()[:7], "big"))
    return tuple(keys)


def generator_for(key: int, seed: int, purpose: str) -> torch.Generator:
    """Random numbers for one passage and one purpose: the same in any batch, any order and any split of the data."""
    text = f"{purpose}:{seed}:{key}".encode()
    return torch.Generator().manual_seed(int.from_bytes(sha256(text).digest()[:7], "big"))


def named(model: Model, batch: Batch, row: int) -> str:
    """A passage for an error message: its number, and the beginning of its text where that can be told."""
    number = f"passage {batch.passages[row]} (counted from 0)"
    if row < len(batch.where) and batch.where[row]:
        number = f"{batch.where[row]} ({number})"
    ids = batch.inputs.get("input_ids")
    decode: Any = getattr(model.tokenizer, "decode", None)
    if ids is None or decode is None:
        return number
    real = ids[row] if batch.input_rows is None else ids[row][_real(batch, row)]
    text = " ".join(str(decode(real.tolist()[:24])).split())
    return f"{number}, {text[:60]!r}"


def _real(batch: Batch, row: int) -> Tensor:
    assert batch.input_rows is not None
    return batch.input_rows[row] != PADDING

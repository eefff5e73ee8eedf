"""Which query rows of an attention call count: padding never, special tokens apart.

A row's kind is 0 for padding, 1 for a token of the text and 2 for a special token that the
tokenizer added ([CLS], <s>, ...). Kinds come from the batch where a call's rows are the batch's
positions, and otherwise from the padding that the call itself carries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.data import PADDING, SPECIAL, TOKEN, Batch
from headwise.errors import UnsupportedError
from headwise.kernels import Problem
from headwise.layout import Site

__all__ = ["PADDING", "SPECIAL", "TOKEN", "row_kinds", "row_offset"]


def row_offset(problem: Problem) -> int:
    """Position of query row 0 counted in keys (``Visible.offset``, bottom right by default)."""
    offset = problem.visible.offset
    return problem.k.shape[2] - problem.q.shape[2] if offset is None else int(offset)


def row_kinds(site: Site, problem: Problem, batch: Batch | None) -> Tensor:
    """The kind of every query row of one call, int8, shape (B, Q) of the call.

    Args:
        site: where the call was made.
        problem: the call.
        batch: the batch in flight, or None when the user runs the model.

    Raises:
        UnsupportedError: the batch has padding and the call's rows are not its positions, so that
            padding could not be told from tokens.
    """
    shape = (problem.q.shape[0], problem.q.shape[2])
    stated = _stated(site, batch)
    if stated is None:
        return _from_padding(site, problem)
    if tuple(stated.shape) == shape:
        return stated.to(problem.q.device)
    if bool((stated != PADDING).all()):
        return torch.full(shape, TOKEN, dtype=torch.int8, device=problem.q.device)
    raise UnsupportedError(
        f"{site.key}: a batch of {stated.shape[0]} x {stated.shape[1]} positions with padding reached this attention "
        f"as {shape[0]} x {shape[1]} query rows, so padding cannot be told from tokens; run passages of one length, "
        "or batch_size=1"
    )


def _stated(site: Site, batch: Batch | None) -> Tensor | None:
    if batch is None:
        return None
    if site.key.stack == "decoder" and batch.decoder_rows is not None:
        return batch.decoder_rows
    if site.key.stack in ("vision", "audio"):
        return None
    return batch.input_rows


def _from_padding(site: Site, problem: Problem) -> Tensor:
    batch, queries = problem.q.shape[0], problem.q.shape[2]
    kinds = torch.full((batch, queries), TOKEN, dtype=torch.int8, device=problem.q.device)
    padding = problem.visible.key_padding
    if padding is None or site.key.kind != "self":
        return kinds
    position = torch.arange(queries, device=kinds.device) + row_offset(problem)
    inside = position < padding.shape[1]
    real = padding[:, position.clamp(max=padding.shape[1] - 1)].to(kinds.device) | ~inside
    return kinds * real.expand(batch, queries)

"""One call of the layer between its projections: positions, cache, attention on tensors, gates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from headwise import kernels
from headwise.errors import InputError, ShapeError
from headwise.kernels.problem import Problem, Rows, ScoreRule, Visible
from headwise.nn.cache import KVCache, Seen
from headwise.nn.checks import Call
from headwise.nn.dropout import dropped
from headwise.nn.rotary import token_positions

if TYPE_CHECKING:
    from headwise.nn.attention import MultiHeadAttention

__all__ = ["attend"]

Heard = tuple[Tensor, Rows | None, Tensor | None]


def attend(layer: MultiHeadAttention, x: Tensor, context: Tensor | KVCache | None, call: Call) -> Heard:
    """The gated z of this process's heads (B, H, Q, d_v), and the rows and weights that were asked for."""
    if context is not None:
        q, k, v, call = _from_context(layer, x, context, call)
        z, rows, weights = _score(layer, q, k, v, call, causal=bool(call.causal), window=layer.window)
    else:
        q, k, v = layer.project(x, positions=_positions(layer, x, call))
        if call.cache is None:
            z, rows, weights = _score(layer, q, k, v, call, causal=bool(call.causal), window=layer.window)
        else:
            z, rows, weights = _with_cache(layer, q, k, v, call, call.cache)
    if layer.softmax == "summed":  # the wide head's output in the slices of the heads
        z = torch.unflatten(z[:, 0], -1, (layer.n_heads, layer.d_v)).transpose(1, 2)
    if call.gates is not None:
        held = layer.local_heads
        z = z * call.gates[..., held.start : held.stop, None, None].to(z.dtype)
    return z, rows, weights


def _positions(layer: MultiHeadAttention, x: Tensor, call: Call) -> Tensor | None:
    """The position of each token of x: as given, or counted over the real tokens of its row."""
    if layer.rotary is None or call.positions is not None:
        return call.positions
    start = 0 if call.cache is None else call.cache.real_tokens
    if call.key_padding is not None:
        return token_positions(call.key_padding, start)
    counted = torch.arange(x.shape[1], device=x.device)
    return counted + (start[:, None] if isinstance(start, Tensor) else start)


def _from_context(
    layer: MultiHeadAttention, x: Tensor, context: Tensor | KVCache, call: Call
) -> tuple[Tensor, Tensor, Tensor, Call]:
    """Queries of x, keys and values of the context."""
    if isinstance(context, KVCache):
        k, v, real = context.view()
        q = layer.queries(x, call.positions)
        return q, k, v, replace(call, key_padding=real)
    q, k, v = layer.project(x, context, positions=call.positions, context_positions=call.context_positions)
    return q, k, v, call


def _with_cache(layer: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, call: Call, cache: KVCache) -> Heard:
    """Attend to cached and new keys, then let the cache grow if that was asked for."""
    ordered = call.rows or call.weights or call.mask is not None or call.bias is not None
    seen = cache.join(k, v, call.key_padding, write=bool(call.update), ordered=ordered, window=layer.window)
    call = replace(
        call,
        mask=_columns("mask", call.mask, seen),
        bias=_columns("bias", call.bias, seen),
    )
    new_padding = call.key_padding
    call = replace(call, key_padding=seen.key_padding)
    several = q.shape[2] > 1  # a single query sees every key that is left
    z, rows, weights = _score(layer, q, seen.k, seen.v, call, causal=several, window=layer.window if several else None)
    if call.update:
        cache.commit(seen, k, v, new_padding)
    if rows is not None and seen.first:
        rows = replace(rows, argmax=torch.where(rows.argmax < 0, rows.argmax, rows.argmax + seen.first))
    if weights is not None and seen.first:
        weights = functional.pad(weights, (seen.first, 0))
    return z, rows, weights


def _columns(name: str, tensor: Tensor | None, seen: Seen) -> Tensor | None:
    """The columns of a mask or bias over the whole sequence that belong to the keys still held."""
    if tensor is None or tensor.shape[-1] == 1:
        return tensor
    if tensor.shape[-1] != seen.length:
        raise ShapeError(
            f"{name} must have a column for each of the {seen.length} tokens of the sequence (cached and new), but it "
            f"has shape {tuple(tensor.shape)}."
        )
    return tensor[..., seen.first :]


def _own_heads(layer: MultiHeadAttention, tensor: Tensor | None) -> Tensor | None:
    """The heads of a (B, H, Q, K) tensor that this process holds."""
    held = layer.local_heads
    if tensor is None or len(held) == layer.n_heads or tensor.ndim != 4 or tensor.shape[1] == 1:
        return tensor
    return tensor[:, held.start : held.stop]


def _score(
    layer: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, call: Call, *, causal: bool, window: int | None
) -> Heard:
    """Attention on tensors, with dropout in training; rows and weights are those before dropout."""
    mask, bias = _own_heads(layer, call.mask), _own_heads(layer, call.bias)
    sinks = layer.local("sinks")
    dropping = layer.training and layer.dropout > 0
    z: Tensor | None = None
    rows: Rows | None = None
    weights: Tensor | None = None
    if not dropping or call.rows or call.weights:
        answer = kernels.attention(
            q, k, v, causal=causal, window=window, mask=mask, key_padding=call.key_padding, bias=bias,
            scale=layer.scale, softcap=layer.softcap, sinks=sinks, rows=call.rows, weights=call.weights,
            backend=call.backend,
        )  # fmt: skip
        parts = list(answer) if isinstance(answer, tuple) else [answer]
        z = parts.pop(0)
        rows = parts.pop(0) if call.rows else None
        weights = parts.pop(0) if call.weights else None
    if dropping:
        z = dropped(_problem(layer, q, k, v, call, causal=causal, window=window), layer.dropout)
    assert z is not None
    return z, rows, weights


def _problem(
    layer: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, call: Call, *, causal: bool, window: int | None
) -> Problem:
    """The call as an attention problem, for the road that drops weights."""
    mask, bias = (_four_axes(_own_heads(layer, t)) for t in (call.mask, call.bias))
    boolean = mask is not None and mask.dtype == torch.bool
    if mask is not None and not boolean and not torch.compiler.is_compiling():
        ones = mask == 1
        if not mask.is_floating_point() or bool(ones.any() & (ones | (mask == 0)).all()):
            raise InputError(
                f"mask must be boolean (True = may attend) or floating point (added to the scores), not a number that "
                f"means yes or no; got {mask.dtype} with 0 and 1. If 1 means keep, pass mask.bool()."
            )
    visible = Visible(causal=causal, window=window, key_padding=call.key_padding, mask=mask if boolean else None)
    rule = ScoreRule(
        scale=layer.scale, softcap=layer.softcap, bias=bias, sinks=layer.local("sinks"),
        additive_mask=None if boolean else mask,
    )  # fmt: skip
    return Problem(q, k, v, visible, rule)


def _four_axes(tensor: Tensor | None) -> Tensor | None:
    return tensor[None, None] if tensor is not None and tensor.ndim == 2 else tensor

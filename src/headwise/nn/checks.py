"""What a call of the layer may be given. Only shapes, types and options are looked at, never values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError
from headwise.nn.cache import KVCache

if TYPE_CHECKING:
    from headwise.nn.attention import MultiHeadAttention

__all__ = ["Call", "check", "check_context", "check_x"]


@dataclass(frozen=True)
class Call:
    """The options of one call, as :meth:`MultiHeadAttention.forward` documents them."""

    causal: bool | None = None
    mask: Tensor | None = None
    key_padding: Tensor | None = None
    bias: Tensor | None = None
    gates: Tensor | None = None
    positions: Tensor | None = None
    context_positions: Tensor | None = None
    cache: KVCache | None = None
    update: bool | None = None
    rows: bool = False
    weights: bool = False
    backend: str | None = None


def _tensor(layer: MultiHeadAttention, name: str, x: object, axis: str, width: int) -> None:
    """A (batch, tokens, width) tensor of the layer's dtype and device."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor (batch, tokens, {axis}), but a {type(x).__name__} was given.")
    if not x.is_floating_point():
        hint = " A mask is given by name: key_padding=... or mask=..." if x.dtype == torch.bool else ""
        raise ShapeError(f"{name} must be floating point (batch, tokens, {axis}), but {x.dtype} was given.{hint}")
    if x.ndim != 3:
        hint = f" Add the batch with {name}.unsqueeze(0)." if x.ndim == 2 else ""
        raise ShapeError(f"{name} must be (batch, tokens, {axis}), but it has shape {tuple(x.shape)}.{hint}")
    if x.shape[-1] != width:
        raise ShapeError(
            f"{name} must be (batch, tokens, {axis}) with {axis} = {width}, but it has shape {tuple(x.shape)}."
        )
    weight = layer.W_Q
    if x.device != weight.device:
        raise ShapeError(
            f"{name} is on {x.device} and the layer on {weight.device}. Move one with .to({str(weight.device)!r})."
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ShapeError(
            f"{name} is {x.dtype} and the layer {weight.dtype}. Convert one with .to({weight.dtype}), or use "
            f"torch.autocast."
        )


def check_x(layer: MultiHeadAttention, x: object) -> None:
    """What queries are made from."""
    _tensor(layer, "x", x, "d_model", layer.d_model)


def check_context(layer: MultiHeadAttention, context: object) -> None:
    """What keys and values are made from."""
    _tensor(layer, "context", context, "d_context", layer.d_context)


def _check_gates(gates: Tensor, batch: int, n_heads: int) -> None:
    if not isinstance(gates, Tensor) or tuple(gates.shape) not in ((n_heads,), (batch, n_heads)):
        came = f"shape {tuple(gates.shape)}" if isinstance(gates, Tensor) else f"a {type(gates).__name__}"
        raise ShapeError(
            f"gates must be a tensor of shape (heads,) = ({n_heads},) or (batch, heads) = ({batch}, {n_heads}), but "
            f"{came} was given."
        )
    if not gates.is_floating_point():
        raise ShapeError(
            f"gates must be floating point, but {gates.dtype} was given: 0.0 switches a head off, 1.0 leaves it as it "
            "is. Convert them with gates.float()."
        )


def _check_positions(name: str, positions: Tensor, batch: int, tokens: int) -> None:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise ShapeError(f"{name} must be whole numbers (int64), but {positions.dtype} was given.")
    if tuple(positions.shape) not in ((tokens,), (batch, tokens), (1, tokens)):
        raise ShapeError(
            f"{name} must be (tokens,) = ({tokens},) or (batch, tokens) = ({batch}, {tokens}), but it has shape "
            f"{tuple(positions.shape)}."
        )


def _check_cache(layer: MultiHeadAttention, cache: object, call: Call) -> None:
    """A cache belongs to self-attention, looks back only, and says whether it may be written."""
    if not isinstance(cache, KVCache):
        raise InputError(
            f"cache must be a headwise KVCache, but a {type(cache).__name__} was given. Make one with "
            f"layer.new_cache(batch, max_length)."
        )
    if call.update is None:
        raise InputError(
            "update must be said when a cache is given: update=True writes this call's keys into it in place, "
            "update=False leaves it as it is."
        )
    if call.causal is False:
        raise InputError(
            "causal=False does not fit a cache: tokens that are cached could not see the later ones. Leave causal out, "
            "or call the layer on the whole sequence."
        )
    if cache.window is not None and (layer.window is None or layer.window > cache.window):
        raise InputError(
            f"The cache keeps a window of {cache.window} keys, but the layer's window is {layer.window}. Make the "
            f"cache with layer.new_cache(batch, max_length)."
        )


def _check_context_call(layer: MultiHeadAttention, context: object, call: Call) -> None:
    """What goes with a context and what does not."""
    if call.cache is not None:
        raise InputError(
            "cache holds the keys of the same sequence and does not go with a context. Give "
            "layer.encode_context(context) as the context instead: it makes the context's keys once."
        )
    made = isinstance(context, KVCache)
    if not made:
        check_context(layer, context)
    if made and (call.key_padding is not None or call.context_positions is not None):
        raise InputError("key_padding and context_positions were taken by encode_context; they cannot be given again.")
    if layer.rotary is not None and (call.positions is None or (call.context_positions is None and not made)):
        raise InputError(
            "A layer with rotary and a context needs positions and context_positions: two sequences have no common "
            "numbering by themselves."
        )


def check(layer: MultiHeadAttention, x: Tensor, context: Tensor | KVCache | None, call: Call) -> None:
    """Refuse a call that means nothing, before anything is computed or written."""
    check_x(layer, x)
    if context is None:
        if layer.cross:
            raise InputError(
                "context is missing: the layer was made with d_context, so its keys and values come from a context "
                "(batch, tokens, d_context)."
            )
        if call.context_positions is not None:
            raise InputError("context_positions was given without a context.")
    else:
        _check_context_call(layer, context, call)
        batch = context.batch if isinstance(context, KVCache) else context.shape[0]
        if batch != x.shape[0]:
            raise ShapeError(f"x has {x.shape[0]} rows and the context {batch}; they must be the same batch.")
    if call.cache is not None:
        _check_cache(layer, call.cache, call)
    elif call.update is not None:
        raise InputError("update was given without a cache.")
    if layer.rotary is None and (call.positions is not None or call.context_positions is not None):
        raise InputError(
            "positions change nothing in a layer without rotary. Add learned positions to x yourself, or make the "
            "layer with rotary=True."
        )
    if layer.training and layer.dropout > 0 and call.backend not in (None, "eager"):
        raise InputError(
            f"backend={call.backend!r} cannot drop weights: in training with dropout the layer makes them itself. "
            f"Leave backend out, or call layer.eval() first."
        )
    batch, tokens = x.shape[:2]
    if call.positions is not None:
        _check_positions("positions", call.positions, batch, tokens)
    if call.context_positions is not None and isinstance(context, Tensor):
        _check_positions("context_positions", call.context_positions, batch, context.shape[1])
    if call.gates is not None:
        _check_gates(call.gates, batch, layer.n_heads)
    if context is None and call.key_padding is not None:
        padding = call.key_padding
        if padding.dtype != torch.bool or tuple(padding.shape) != (batch, tokens):
            fix = "" if padding.dtype == torch.bool else " Convert a 0/1 mask with key_padding.bool()."
            raise ShapeError(
                f"key_padding must be bool (batch, tokens) = ({batch}, {tokens}) with True for a real token, but it is "
                f"{padding.dtype} {tuple(padding.shape)}.{fix}"
            )

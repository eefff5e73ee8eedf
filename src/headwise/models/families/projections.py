"""Where W_Q, W_K and W_V sit: told by what each linear layer put out, and by names where that is not enough.

The probe keeps what every linear layer inside an attention module put out. The values that reached the
attention function are looked for in it, arrangement by arrangement, so a fused weight is never read in the
wrong order. Queries and keys are rotated or normalised on their way; they follow from V's arrangement, or
from a name in the table below when its width fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headwise.layout import Projection

__all__ = ["Linear", "Projections", "find_projections"]

#: Names that the separate projections of queries, keys and values go by.
_NAMES: Final[tuple[tuple[str, str, str], ...]] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("linear_q", "linear_k", "linear_v"),
    ("q_attn", "k_attn", "v_attn"),
)


@dataclass(frozen=True)
class Linear:
    """One linear layer inside an attention module and what it put out during the probe."""

    path: str
    transposed: bool
    output: Tensor


@dataclass(frozen=True)
class Projections:
    """The three projections, and why one of them is not known."""

    q: Projection | None
    k: Projection | None
    v: Projection | None
    unknown: tuple[tuple[str, str], ...]


def find_projections(linears: Mapping[str, Linear], q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Find the projections of q (B, H, Q, D_k), k (B, G, K, D_k) and v (B, G, K, D_v) among ``linears``.

    ``linears`` are keyed by path relative to the attention module.
    """
    heads, kv_heads, d_k, d_v = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    fused = _fused(linears, q, k, v)
    if fused is not None:
        return Projections(fused, fused, fused, ())
    named = _named(linears)
    found: dict[str, Projection | None] = {}
    unknown: list[tuple[str, str]] = []
    for part, tensor, width in (("q", q, heads * d_k), ("k", k, kv_heads * d_k), ("v", v, kv_heads * d_v)):
        linear = _by_value(linears, tensor) or named.get(part)
        if linear is None:
            unknown.append((part, "no linear layer of the module puts it out, and none has a known name"))
            found[part] = None
        elif linear.output.shape[-1] != width:
            unknown.append((part, f"{linear.path} puts out {linear.output.shape[-1]} numbers, not {width}"))
            found[part] = None
        else:
            found[part] = Projection(linear.path, linear.transposed, "heads")
    return Projections(found["q"], found["k"], found["v"], tuple(unknown))


def _named(linears: Mapping[str, Linear]) -> dict[str, Linear]:
    last = {path.rsplit(".", 1)[-1]: linear for path, linear in linears.items()}
    for names in _NAMES:
        if sum(name in last for name in names) >= 2:
            return {part: last[name] for part, name in zip("qkv", names, strict=True) if name in last}
    return {}


def _by_value(linears: Mapping[str, Linear], tensor: Tensor) -> Linear | None:
    """The one layer whose output is ``tensor`` (B, heads, length, width) head after head."""
    flat = tensor.transpose(1, 2).flatten(2)
    fits = [linear for linear in linears.values() if _equal(linear.output, flat)]
    return fits[0] if len(fits) == 1 else None


def _fused(linears: Mapping[str, Linear], q: Tensor, k: Tensor, v: Tensor) -> Projection | None:
    heads, kv_heads, d_k, d_v = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    width = heads * d_k + kv_heads * (d_k + d_v)
    flat = v.transpose(1, 2)
    for linear in linears.values():
        output = linear.output
        if output.shape[-1] != width or output.numel() != flat.shape[0] * flat.shape[1] * width:
            continue
        output = output.reshape(*flat.shape[:2], width)
        if _equal(output[..., -kv_heads * d_v :], flat.flatten(2)):
            return Projection(linear.path, linear.transposed, "q|k|v")
        grouped = output.reshape(*flat.shape[:2], kv_heads, width // kv_heads)
        if _equal(grouped[..., -d_v:], flat):
            kind = "(q,k,v) per head" if heads == kv_heads else "(q..,k,v) per group"
            return Projection(linear.path, linear.transposed, kind)
    return None


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.numel() == right.numel() and torch.equal(left.reshape(right.shape), right)

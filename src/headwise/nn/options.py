"""What a layer is made of: every constructor argument checked once, before any tensor is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headwise.errors import InputError

__all__ = ["Combine", "Options", "Softmax", "resolve"]

Combine = Literal["concat", "mean"]
Softmax = Literal["per_head", "summed"]


@dataclass(frozen=True)
class Options:
    """Sizes and rules of one layer, with every default filled in.

    Attributes:
        d_model: width of the residual stream.
        n_heads: query heads, H.
        n_kv_heads: key-value heads, G; query head h reads KV head ``h // (H // G)``.
        d_k: width of a query and a key of one head.
        d_v: width of a value of one head.
        d_context: width of what keys and values are made from.
        cross: True when ``d_context`` was given, so that every call needs a context.
        scale: factor on q.k before the softmax.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_k: int
    d_v: int
    d_context: int
    cross: bool
    bias: bool
    dropout: float
    window: int | None
    softcap: float | None
    scale: float
    qk_norm: bool
    sinks: bool
    combine: Combine
    softmax: Softmax


def _count(name: str, value: object) -> int:
    """A positive whole number, or a refusal that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, but {value!r} was given.")
    return value


def _flag(name: str, value: object) -> bool:
    """True or False, or a refusal that names the argument."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, but {value!r} was given.")
    return value


def _positive(name: str, value: object) -> float:
    """A positive finite number, or a refusal that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name} must be a positive finite number or None, but {value!r} was given.")
    return float(value)


def _widths(d_model: int, n_heads: int, d_k: int | None, d_v: int | None) -> tuple[int, int]:
    """d_k is ``d_model / n_heads`` unless it is given; d_v is d_k unless it is given."""
    if d_k is None:
        if d_model % n_heads:
            raise InputError(
                f"d_model must be a multiple of n_heads when d_k is not given, but {d_model} / {n_heads} leaves "
                f"{d_model % n_heads}. Give d_k, or another number of heads."
            )
        d_k = d_model // n_heads
    d_k = _count("d_k", d_k)
    return d_k, d_k if d_v is None else _count("d_v", d_v)


def _groups(n_heads: int, n_kv_heads: int | None) -> int:
    """The number of KV heads, which must divide the number of query heads."""
    if n_kv_heads is None:
        return n_heads
    groups = _count("n_kv_heads", n_kv_heads)
    if n_heads % groups:
        raise InputError(
            f"n_heads must be a multiple of n_kv_heads, but {n_heads} query heads cannot share {groups} key-value "
            f"heads evenly. Use a number of key-value heads that divides {n_heads}."
        )
    return groups


def _check_summed(n_heads: int, groups: int, *, rotary: bool, qk_norm: bool, sinks: bool) -> None:
    """The summed softmax is one wide head: nothing that acts on single heads before the softmax fits it."""
    per_head = {
        f"n_kv_heads={groups} with n_heads={n_heads} (grouped heads)": groups != n_heads,
        "rotary": rotary,
        "qk_norm=True": qk_norm,
        "sinks=True": sinks,
    }
    for what, used in per_head.items():
        if used:
            raise InputError(
                f'softmax="summed" adds the scores of all heads before one softmax, which {what} does not fit, '
                f'because it acts head by head. Use softmax="per_head", or leave it out.'
            )


def resolve(
    d_model: int,
    n_heads: int,
    *,
    n_kv_heads: int | None,
    d_k: int | None,
    d_v: int | None,
    d_context: int | None,
    bias: bool,
    dropout: float,
    rotary: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    qk_norm: bool,
    sinks: bool,
    combine: str,
    softmax: str,
) -> Options:
    """Check the arguments of a layer and fill in the defaults.

    Raises:
        InputError: naming the argument, its rule, what came and what to do.
    """
    d_model, n_heads = _count("d_model", d_model), _count("n_heads", n_heads)
    key_width, value_width = _widths(d_model, n_heads, d_k, d_v)
    groups = _groups(n_heads, n_kv_heads)
    if combine not in ("concat", "mean"):
        raise InputError(f'combine must be "concat" or "mean", but {combine!r} was given.')
    if softmax not in ("per_head", "summed"):
        raise InputError(f'softmax must be "per_head" or "summed", but {softmax!r} was given.')
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"dropout must be a probability in [0, 1), but {dropout!r} was given.")
    qk_norm, sinks = _flag("qk_norm", qk_norm), _flag("sinks", sinks)
    if softmax == "summed":
        _check_summed(n_heads, groups, rotary=rotary, qk_norm=qk_norm, sinks=sinks)
    wide = n_heads * key_width if softmax == "summed" else key_width
    return Options(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=groups,
        d_k=key_width,
        d_v=value_width,
        d_context=d_model if d_context is None else _count("d_context", d_context),
        cross=d_context is not None,
        bias=_flag("bias", bias),
        dropout=float(dropout),
        window=None if window is None else _count("window", window),
        softcap=None if softcap is None else _positive("softcap", softcap),
        scale=wide**-0.5 if scale is None else _positive("scale", scale),
        qk_norm=qk_norm,
        sinks=sinks,
        combine=combine,  # type: ignore[arg-type]
        softmax=softmax,  # type: ignore[arg-type]
    )

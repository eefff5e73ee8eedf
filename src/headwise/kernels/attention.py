"""``hw.attention``: multi-head attention on tensors, with every convention checked at the door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError
from headwise.kernels import cpu
from headwise.kernels.check import check_device, shape_of
from headwise.kernels.problem import Problem, Rows, ScoreRule, Visible, Wanted
from headwise.kernels.registry import run
from headwise.kernels.tracing import concrete

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention"]


class _Options(TypedDict, total=False):
    causal: bool
    window: int | None
    mask: Tensor | None
    key_padding: Tensor | None
    bias: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    gates: Tensor | None
    backend: str | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rows: Literal[False] = False,
    weights: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rows: Literal[True],
    weights: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[Tensor, Rows]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rows: Literal[False] = False,
    weights: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Literal[True], weights: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Rows, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, rows: bool = False, weights: bool = False, **options: Unpack[_Options]
) -> Any: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    key_padding: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    rows: bool = False,
    weights: bool = False,
    backend: str | None = None,
) -> Any:
    """Multi-head attention: ``softmax(scale * q k^T) v`` per head, with the scores' options in a fixed order.

    Scores are made in this order: scale (applied to q, before the product), soft cap, bias, mask. The
    softmax is in float32 at least. Nothing of size queries x keys is built unless ``weights`` asks for it.

    Args:
        q: (batch, query heads, queries, d_k), floating point, any strides and device.
        k: (batch, key-value heads, keys, d_k). Query head h reads key-value head
            ``h // (query heads / key-value heads)``.
        v: (batch, key-value heads, keys, d_v); d_v is free.
        causal: hide later keys. The triangle hangs from the bottom right corner: the last query sees
            every key, query i sees keys ``0 .. keys - queries + i``.
        window: with ``causal`` a query sees itself and ``window - 1`` earlier keys; without it all keys
            with ``|i - j| < window``. None for no window.
        mask: bool, True = may attend; or floating point, added to the scores, where a value at or
            below ``torch.finfo(mask.dtype).min`` hides the key. (queries, keys), or four axes that
            broadcast to (batch, query heads, queries, keys).
        key_padding: bool (batch, keys), True = a real key.
        bias: floating point, added to the scores after the soft cap; shapes and hiding as for ``mask``.
        scale: factor on q.k; ``d_k ** -0.5`` by default.
        softcap: c turns scores into ``c * tanh(score / c)``.
        sinks: (query heads,) one extra logit per head, which takes weight and gives no value.
        gates: (query heads,) or (batch, query heads), multiplied onto z; 0 switches a head off.
        rows: also return each row's statistics, :class:`Rows`.
        weights: also return the weights that multiply v, (batch, query heads, queries, keys), in q's
            dtype. They never change z.
        backend: a name of ``headwise.kernels.backends()``; None takes the fastest that can do it.

    Returns:
        z (batch, query heads, queries, d_v) in q's dtype; or ``(z, rows)``, ``(z, weights)``,
        ``(z, rows, weights)``. A query that may see no key has z 0, entropy 0, largest weight 0,
        argmax -1, lse -inf, and finite gradients.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
        InputError: a value breaks its rule, for example a mask of integers or of floating 0 and 1.
        UnsupportedError: ``backend`` cannot compute this; the message says why.

    Example:
        >>> import torch, headwise.kernels as kernels
        >>> q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
        >>> v = torch.arange(1.0, 6.0).view(1, 1, 5, 1)
        >>> kernels.attention(q, k, v, causal=True).flatten().tolist()
        [2.5, 3.0]
        >>> z, rows = kernels.attention(q, k, v, causal=True, rows=True)
        >>> rows.visible.flatten().tolist()
        [4, 5]
    """
    for name, asked in (("causal", causal), ("rows", rows), ("weights", weights)):
        if not isinstance(asked, bool):
            raise InputError(f"{name} must be True or False; got {asked!r}.")
    if mask is None and key_padding is None and bias is None and sinks is None and not weights and backend is None:
        found = cpu.quick(q, k, v, causal, window, None, scale, softcap, rows)
        if found is not None:
            z = found[0] if gates is None else _gated(found[0], gates)
            return (z, found[1]) if rows else z
    q, k, v = _one_dtype(q, k, v)
    seen, added = _mask_parts(mask, q, k)
    problem = Problem(
        q,
        k,
        v,
        Visible(causal=causal, window=window, key_padding=key_padding, mask=seen),
        ScoreRule(scale=scale, softcap=softcap, bias=_four_axes("bias", bias, q, k), sinks=sinks, additive_mask=added),
    )
    answer = run(problem, Wanted(rows=rows, weights=weights), backend=backend)
    z = answer.z if gates is None else _gated(answer.z, gates)
    extra = [part for part, asked in ((answer.rows, rows), (answer.weights, weights)) if asked]
    return (z, *extra) if extra else z


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, bring q, k and v of different dtypes to autocast's, as torch's own attention does."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and not q.dtype == k.dtype == v.dtype:
        kind = q.device.type
        if torch.is_autocast_enabled(kind) and all(x.dtype.is_floating_point for x in (q, k, v)):
            dtype = torch.get_autocast_dtype(kind)
            return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _mask_parts(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A mask as (bool, None) or (None, additive), with four axes."""
    if mask is None:
        return None, None
    if isinstance(mask, Tensor) and mask.dtype.is_floating_point:
        _refuse_zeros_and_ones(mask)
        return None, _four_axes("mask", mask, q, k)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return _four_axes("mask", mask, q, k), None
    if not isinstance(mask, Tensor):
        raise ShapeError(f"mask must be a tensor; got {type(mask).__name__}.")
    raise InputError(
        f"mask must be boolean (True = may attend) or floating point (added to the scores); got {mask.dtype}."
        " If 1 means keep, pass mask.bool(); if 1 means drop, pass ~mask.bool()."
    )


def _refuse_zeros_and_ones(mask: Tensor) -> None:
    if not concrete(mask) or mask.numel() == 0:
        return
    values = mask.detach()
    if bool((values == 1).any()) and bool(((values == 0) | (values == 1)).all()):
        raise InputError(
            "mask is floating point and holds only 0 and 1: as a number added to the scores that hides nothing."
            " If 1 means keep, pass mask.bool(); if 1 means drop, pass ~mask.bool(); if it is meant to be"
            " added, pass it as bias."
        )


def _four_axes(name: str, tensor: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """(queries, keys) as (1, 1, queries, keys); four axes as they are; anything else is ambiguous."""
    if tensor is None or not isinstance(tensor, Tensor) or not isinstance(q, Tensor) or q.ndim != 4 or k.ndim != 4:
        return tensor
    if tensor.ndim == 2:
        batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        if tensor.shape[0] != queries or tensor.shape[1] != keys:
            hint = ""
            if tensor.shape[0] == batch and tensor.shape[1] == keys:
                hint = " It looks like (batch, keys): pass that as key_padding."
            raise ShapeError(
                f"{name} with two axes must be (queries, keys) = ({queries}, {keys}); got {shape_of(tensor)}.{hint}"
            )
        return tensor[None, None]
    if tensor.ndim != 4:
        raise ShapeError(
            f"{name} must have two axes (queries, keys) or four (batch, query heads, queries, keys); got"
            f" {tensor.ndim}: {shape_of(tensor)}."
            f" Say which axes are meant: {name}[:, None] for (batch, queries, keys), {name}[None] for (query"
            " heads, queries, keys)."
        )
    return tensor


def _gated(z: Tensor, gates: Tensor) -> Tensor:
    """z times one number per head, or per example and head, in z's dtype."""
    batch, heads = z.shape[0], z.shape[1]
    if not isinstance(gates, Tensor):
        raise ShapeError(f"gates must be a tensor, (query heads,) or (batch, query heads); got {type(gates).__name__}.")
    check_device("gates", gates, z)
    if tuple(gates.shape) == (heads,):
        gates = gates[None]
    elif gates.ndim != 2 or gates.shape[0] != batch or gates.shape[1] != heads:
        raise ShapeError(
            f"gates must be (query heads,) = ({heads},) or (batch, query heads) = ({batch}, {heads}); got"
            f" {shape_of(gates)}."
        )
    return (z * gates[:, :, None, None]).to(z.dtype)

"""Biases that depend on the distance between key and query alone, as a table and not as queries x keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.errors import ShapeError

__all__ = ["alibi", "alibi_slopes", "t5_bias"]


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of ALiBi for a number of heads (Press et al. 2022, "Train Short, Test Long", section 3): (heads,).

    For a power of two the slopes fall geometrically from ``2 ** (-8 / heads)`` to ``2 ** -8``; for other
    numbers every second slope of twice the next lower power of two is appended, as the authors' code does.

    Example:
        >>> from headwise.kernels import alibi_slopes
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if heads < 1:
        raise ShapeError(f"heads must be at least 1; got {heads}.")
    whole = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
    slopes += [2.0 ** (-8.0 * (h + 1) / (2 * whole)) for h in range(0, 2 * (heads - whole), 2)]
    return torch.tensor(slopes)


def alibi(slopes: Tensor, queries: int, keys: int, *, offset: int | None = None) -> tuple[Tensor, int]:
    """ALiBi's bias ``-slope * |i - j|`` as (distance_bias, distance_zero) of a :class:`ScoreRule`.

    Args:
        slopes: (query heads,), positive.
        queries, keys: lengths.
        offset: position of query row 0 counted in keys; ``keys - queries`` by default.

    Returns:
        The table (query heads, queries + keys - 1) and the index of distance 0.

    Example:
        >>> import torch
        >>> from headwise.kernels import alibi
        >>> alibi(torch.tensor([0.5]), 2, 3)
        (tensor([[-1.0000, -0.5000, -0.0000, -0.5000]]), 2)
    """
    distance, zero = _distances(queries, keys, offset, slopes.device)
    return -slopes[:, None] * distance.abs(), zero


def t5_bias(
    weight: Tensor,
    queries: int,
    keys: int,
    *,
    bidirectional: bool,
    max_distance: int = 128,
    offset: int | None = None,
) -> tuple[Tensor, int]:
    """T5's learned bias per bucket of distances as (distance_bias, distance_zero); differentiable in ``weight``.

    Half of the buckets hold one distance each, the other half grow logarithmically up to ``max_distance``
    (Raffel et al. 2020, section 2.1).

    Args:
        weight: (buckets, query heads), the weight of T5's ``relative_attention_bias``.
        queries, keys: lengths.
        bidirectional: an encoder's table, with buckets for later keys; a decoder's has none.
        max_distance: all distances beyond it share the last bucket.
        offset: position of query row 0 counted in keys; ``keys - queries`` by default.

    Returns:
        The table (query heads, queries + keys - 1) and the index of distance 0.

    Example:
        >>> import torch
        >>> from headwise.kernels import t5_bias
        >>> table, zero = t5_bias(torch.arange(8.0)[:, None], 3, 3, bidirectional=False)
        >>> table.tolist(), zero
        ([[2.0, 1.0, 0.0, 0.0, 0.0]], 2)
    """
    if weight.ndim != 2 or weight.shape[0] < 2:
        raise ShapeError(f"weight must be (buckets, query heads) with two buckets or more; got {tuple(weight.shape)}.")
    distance, zero = _distances(queries, keys, offset, weight.device)
    return weight[_buckets(distance, weight.shape[0], bidirectional, max_distance)].T, zero


def _distances(queries: int, keys: int, offset: int | None, device: torch.device) -> tuple[Tensor, int]:
    """Every j - i that occurs, rising, and the index of 0 among them (which may lie outside)."""
    first = keys - queries if offset is None else offset
    low = -(first + queries - 1)
    return torch.arange(low, low + max(queries + keys - 1, 1), device=device), -low


def _buckets(distance: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    base = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        base = torch.where(distance > 0, buckets, 0)
        size = distance.abs()
    else:
        size = (-distance).clamp(min=0)
    exact = buckets // 2
    grown = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + grown.long()).clamp(max=buckets - 1)
    return base + torch.where(size < exact, size, far)

"""The plain case on torch's scaled_dot_product_attention, kept off its dense path and its traps.

torch aligns ``is_causal`` with the top left corner, copies keys and values for grouped heads, goes
dense on CPU when d_v differs from d_k, and lets a NaN in a hidden value through. So causality is
passed on only for square problems, the query heads of a group become rows, the narrower of d_k and
d_v is padded, and what cannot be passed on is refused with the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headwise.kernels.problem import Answer, Problem, Wanted
from headwise.kernels.tracing import concrete, known_true, own_dtypes

__all__ = ["attend", "refusal"]


def refusal(problem: Problem, wanted: Wanted) -> str | None:
    """Why this road cannot compute the problem; None when it can."""
    visible, rule = problem.visible, problem.rule
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if wanted.statistics:
        return "it returns no row statistics, and no identity gives the largest weight of a row"
    for name, value in (
        ("a soft cap", rule.softcap),
        ("a bias", rule.bias),
        ("sinks", rule.sinks),
        ("an additive mask", rule.additive_mask),
        ("a bias by distance", rule.distance_bias),
        ("a sliding window", visible.window),
        ("a predicate", visible.predicate),
    ):
        if value is not None:
            return f"it has no way to pass {name} on without an n x n tensor"
    if known_true(queries == 0) or known_true(keys == 0):
        return "there are no queries or no keys"
    dense = visible.key_padding is not None or visible.mask is not None
    if visible.key_padding is not None and visible.mask is not None:
        return "it takes one mask, and the problem has key padding and a mask"
    if visible.mask is not None and not _same_for_all(visible.mask) and not _clean(problem):
        return "keys or values hold NaN or infinity, and it lets hidden ones through"
    if not _sees_all(problem):
        if not known_true(queries == keys) or not known_true(problem.offset == 0):
            return "its causal mask hangs from the top left corner, and this one does not end there"
        if dense:
            return "it takes a causal flag or a mask, and the problem has both"
        if not _clean(problem):
            return "keys or values hold NaN or infinity, and it lets hidden ones through"
    return None


def _sees_all(problem: Problem) -> bool:
    """Whether causality hides nothing: the first query stands at the last key or beyond."""
    return not problem.visible.causal or known_true(problem.offset >= problem.k.shape[2] - 1)


def _same_for_all(mask: Tensor) -> bool:
    """Whether all queries and heads of a batch entry see the same keys."""
    return mask.shape[1] == 1 and mask.shape[2] == 1


def _clean(problem: Problem) -> bool:
    """Whether keys and values are finite, as far as values may be looked at."""
    return not concrete(problem.k, problem.v) or _finite(problem.k, problem.v)


def _finite(*tensors: Tensor) -> bool:
    """Whether all values are finite, by one sum each (a sum that overflows counts as not finite)."""
    return all(bool(torch.isfinite(tensor.detach().sum(dtype=torch.float32))) for tensor in tensors)


def attend(problem: Problem, wanted: Wanted) -> Answer:
    """z alone; the problem is one that :func:`refusal` lets pass."""
    assert not wanted.statistics
    q, k, v, d_v = problem.q, problem.k, problem.v, problem.v.shape[3]
    visible, scale = problem.visible, problem.scale
    if problem.kv_map is not None:
        k, v = k[:, list(problem.kv_map)], v[:, list(problem.kv_map)]
    width = max(q.shape[3], d_v)
    q, k, v = (pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    mask = visible.mask
    if visible.key_padding is not None:
        mask = visible.key_padding[:, None, None, :]
    if mask is not None and _same_for_all(mask):
        k, v = _without_hidden(k, v, mask)
    causal = visible.causal and not _sees_all(problem)
    with own_dtypes(q):
        z = _grouped(q, k, v, mask, causal, scale)
    return Answer(z[..., :d_v] if d_v < width else z)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    batch, heads, queries, width = q.shape
    groups = k.shape[1]
    share = heads // groups
    if share == 1:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    # A symbolic length is not folded: whether the rows can be a view would become a guard on it.
    foldable = known_true(queries == 1) or concrete(q)
    if foldable and not causal and (mask is None or _same_for_all(mask)):
        rows = q.reshape(batch, groups, share * queries, width)
        z = scaled_dot_product_attention(rows, k, v, mask, scale=scale)
        return z.reshape(batch, heads, queries, width)
    k, v = (torch.repeat_interleave(x, share, dim=1) for x in (k, v))  # small beside queries x keys
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def _without_hidden(k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with zeros where no query of the batch entry sees them, so that NaN there cannot matter."""
    unseen = ~mask[:, 0, 0].expand(k.shape[0], k.shape[2])
    # Reading the hidden part is cheap; copying all of k and v is what decoding cannot afford.
    if concrete(k, v, mask) and _finite(k.transpose(1, 2)[unseen], v.transpose(1, 2)[unseen]):
        return k, v
    return k.masked_fill(unseen[:, None, :, None], 0.0), v.masked_fill(unseen[:, None, :, None], 0.0)

"""Weights on chosen pairs: one key named per query and rule, by O(n) dot products and the row's log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.kernels.masks import at_keys, hiding_value, visible_at
from headwise.kernels.problem import Problem
from headwise.kernels.tracing import concrete

__all__ = ["pair_scores", "pair_weights"]


def pair_weights(problem: Problem, keys_PBQ: Tensor, total_BHQ: Tensor) -> Tensor:
    """The pattern at the named keys, without the pattern.

    Args:
        problem: the attention problem.
        keys_PBQ: int64 (P, B or 1, Q), the key named for each query; -1 for none. With four axes,
            (P, B or 1, H or 1, Q), each head names its own.
        total_BHQ: log-sum-exp of each row, sinks included.

    Returns:
        (P, B, H, Q) weights in [0, 1]; 0 where the key is hidden or -1.
    """
    batch, heads, queries, _ = problem.q.shape
    shape = (keys_PBQ.shape[0], batch, heads, queries)
    if problem.k.shape[2] == 0 or 0 in shape:
        return total_BHQ.new_zeros(shape)
    seen = visible_at(problem, keys_PBQ).expand(shape)
    if concrete(problem.k) and not bool(torch.isfinite(problem.k.detach().sum(dtype=torch.float32))):
        problem = replace(problem, k=torch.where(torch.isfinite(problem.k), problem.k, 0.0))
    scores = torch.stack([pair_scores(problem, keys_BQ) for keys_BQ in keys_PBQ.unbind(0)])
    # Hidden pairs are taken out before the exponential, so that neither they nor an empty row make NaN.
    logits = torch.where(seen, scores - total_BHQ.masked_fill(torch.isneginf(total_BHQ), 0.0), -torch.inf)
    return torch.exp(logits.clamp(max=0.0))  # a large score may round above its row's log-sum-exp


def pair_scores(problem: Problem, keys_BQ: Tensor) -> Tensor:
    """Scores (scale, soft cap, added terms) of one named key per query, hidden or not: (B, H, Q)."""
    dtype = problem.compute_dtype
    j_BHQ = (keys_BQ[:, None] if keys_BQ.ndim == 2 else keys_BQ).clamp(min=0)
    q_BHQD = problem.q.to(dtype) * problem.scale
    scores = _products(problem, q_BHQD, j_BHQ)
    if problem.rule.softcap is not None:
        scores = torch.tanh(scores / problem.rule.softcap) * problem.rule.softcap
    for term in problem.rule.added:
        added = at_keys(term, j_BHQ[None], problem)[0]
        scores = scores + added.to(dtype).masked_fill(added <= hiding_value(term.dtype), 0.0)
    return scores


def _products(problem: Problem, q_BHQD: Tensor, j_BHQ: Tensor) -> Tensor:
    """q . k at the named keys; where all heads name the same key, each group's key is read once."""
    batch, heads, queries, width = q_BHQD.shape
    groups, device = problem.k.shape[1], q_BHQD.device
    share = heads // groups
    b = torch.arange(batch, device=device)[:, None, None]
    if j_BHQ.shape[1] == 1 and problem.kv_map is None:
        g = torch.arange(groups, device=device)[:, None]
        k_BGQD = problem.k[b, g, j_BHQ].to(q_BHQD.dtype)
        folded = q_BHQD.reshape(batch, groups, share, queries, width)
        return (folded * k_BGQD[:, :, None]).sum(-1).flatten(1, 2)
    of_head = problem.kv_map or tuple(h // share for h in range(heads))
    g = torch.tensor(of_head, device=device)[:, None]
    return (q_BHQD * problem.k[b, g, j_BHQ].to(q_BHQD.dtype)).sum(-1)

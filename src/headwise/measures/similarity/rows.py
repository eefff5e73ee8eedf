"""The pattern of a few chosen query rows, for all heads: rows times keys, never n x n."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise import kernels
from headwise.kernels import Problem, Visible, Wanted, visible_block
from headwise.measures.importance.passages import generator_for

__all__ = ["chosen_rows", "patterns_at"]


def chosen_rows(candidates_Q: Tensor, count: int, key: int, seed: int) -> Tensor:
    """Up to ``count`` of the rows that are True, drawn for the passage ``key`` and in ascending order: (R,) int64."""
    at = candidates_Q.nonzero().flatten()
    order = torch.randperm(len(at), generator=generator_for(key, seed, "rows"), device="cpu")[:count]
    return at[order.to(at.device)].sort().values


def patterns_at(problem: Problem, entry: int, rows_R: Tensor) -> Tensor:
    """The weights of chosen rows of one batch entry over all keys, (H, R, K), in float32 at least.

    Where a sink takes mass the weights are renormalised over the keys; a row that sees no key is 0.

    Example:
        >>> q = torch.zeros(1, 1, 3, 2)
        >>> patterns_at(Problem(q, q, q, Visible(causal=True)), 0, torch.tensor([1])).tolist()
        [[[0.5, 0.5, 0.0]]]
    """
    keys, heads = problem.k.shape[2], problem.q.shape[1]
    span = (entry, entry + 1)
    masks = [visible_block(problem, (row, row + 1), (0, keys), span) for row in rows_R.tolist()]
    seen = [
        torch.ones(1, 1, 1, keys, dtype=torch.bool, device=problem.q.device) if one is None else one for one in masks
    ]
    width = max((one.shape[1] for one in seen), default=1)
    mask = torch.cat([one.expand(1, width, 1, keys) for one in seen], dim=2)
    dtype = problem.compute_dtype
    added = [_cut(term.detach(), entry, rows_R) for term in problem.rule.added]
    bias, additive = (*added, None, None)[:2]
    part = Problem(
        problem.q[slice(*span)][:, :, rows_R].detach().to(dtype),
        problem.k[slice(*span)].detach().to(dtype),
        problem.v[slice(*span)].detach().to(dtype),
        Visible(mask=mask.expand(1, heads if width > 1 else 1, len(rows_R), keys)),
        replace(problem.rule, bias=bias, additive_mask=additive, scale=problem.scale),
        problem.kv_map,
    )
    weights = kernels.run(part, Wanted(weights=True), backend="eager").weights
    assert weights is not None
    total = weights[0].sum(-1, keepdim=True)
    return torch.where(total > 0, weights[0] / total, 0.0)


def _cut(term: Tensor, entry: int, rows_R: Tensor) -> Tensor:
    term = term[entry : entry + 1] if term.shape[0] > 1 else term
    return term[:, :, rows_R] if term.shape[2] > 1 else term

"""Attention dropout for training: weights are dropped after the softmax.

Where the scores are plain and few, torch's own attention drops. Elsewhere the weights exist for one block of queries
at a time and are made again in the backward pass from the same random state (``torch.utils.checkpoint``), so memory
stays linear in the length. What is returned to the user, rows or weights, is the pattern before dropout.

Source: Vaswani et al. (2017), section 5.4; the placement is that of their reference code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headwise import kernels
from headwise.kernels.problem import Problem, Wanted

__all__ = ["dropped"]

#: Weights that one block may hold, over all rows and heads.
BLOCK = 1 << 25


def _rows_of(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The query rows ``start`` to ``stop`` of a tensor (..., Q or 1, K)."""
    if tensor is None or tensor.ndim < 2 or tensor.shape[-2] == 1:
        return tensor
    return tensor[..., start:stop, :]


def _block(problem: Problem, start: int, stop: int) -> Problem:
    """The same computation for the query rows ``start`` to ``stop``."""
    visible, rule = problem.visible, problem.rule
    offset = problem.k.shape[2] - problem.q.shape[2] if visible.offset is None else visible.offset
    return replace(
        problem,
        q=problem.q[:, :, start:stop],
        visible=replace(visible, offset=offset + start, mask=_rows_of(visible.mask, start, stop)),
        rule=replace(
            rule, bias=_rows_of(rule.bias, start, stop), additive_mask=_rows_of(rule.additive_mask, start, stop)
        ),
    )


def _attend(problem: Problem, p: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = kernels.run(replace(problem, q=q, k=k, v=v), Wanted(weights=True), backend="eager").weights
    assert weights is not None
    weights_BGRQK = torch.unflatten(functional.dropout(weights, p), 1, (k.shape[1], -1))
    return torch.matmul(weights_BGRQK.to(v.dtype), v[:, :, None]).flatten(1, 2)


def _torch_can(problem: Problem) -> bool:
    """Whether torch's own attention, which can drop weights, computes this: plain scores, no mask but causality."""
    visible, rule = problem.visible, problem.rule
    rules = (
        visible.window,
        visible.key_padding,
        visible.mask,
        visible.predicate,
        rule.softcap,
        rule.sinks,
        *rule.added,
    )
    aligned = not visible.causal or (visible.offset is None and problem.q.shape[2] == problem.k.shape[2])
    return aligned and all(each is None for each in rules)


def dropped(problem: Problem, p: float, *, block: int = BLOCK) -> Tensor:
    """z (B, H, Q, D_v) of a problem whose weights are dropped with probability ``p`` and scaled by 1 / (1 - p)."""
    batch, n_heads, queries, _ = problem.q.shape
    dense = batch * n_heads * queries * problem.k.shape[2] <= block  # torch goes dense on CPU when it drops
    if (dense or problem.q.is_cuda) and _torch_can(problem):
        return functional.scaled_dot_product_attention(
            problem.q, problem.k, problem.v, dropout_p=p, is_causal=problem.visible.causal, scale=problem.rule.scale,
            enable_gqa=problem.q.shape[1] != problem.k.shape[1],
        )  # fmt: skip
    step = max(1, block // max(1, batch * n_heads * problem.k.shape[2]))
    parts = []
    for start in range(0, max(queries, 1), step):
        part = _block(problem, start, min(start + step, queries))
        run: Callable[[Tensor, Tensor, Tensor], Tensor] = partial(_attend, part, p)
        if step >= queries:
            return run(part.q, part.k, part.v)
        parts.append(checkpoint(run, part.q, part.k, part.v, use_reentrant=False))
    return torch.cat(parts, dim=2)

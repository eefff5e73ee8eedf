"""Dense attention in plain torch: the whole (B, H, Q, K) pattern, in float32 at least, any score rule.

The one backend that builds the pattern; ``weights=True`` takes it from here whatever computed z.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.masks import hiding_value
from headwise.kernels.pairs import pair_weights
from headwise.kernels.problem import Answer, Problem, Rows, Wanted
from headwise.kernels.reference import distances, repeat_kv, visible_matrix, weighted_sum
from headwise.kernels.tracing import concrete, own_dtypes

__all__ = ["attend", "pattern"]


@dataclass(frozen=True)
class _Dense:
    """The dense pattern and what is needed beside it: (B, H, Q, K), and (B, H, Q) for lse, alive and sink."""

    scores: Tensor
    own: Tensor  # softmax over the keys alone
    pattern: Tensor  # what multiplies V: the sink has taken its share
    lse: Tensor
    seen: Tensor
    alive: Tensor
    sink: Tensor | None


def attend(problem: Problem, wanted: Wanted) -> Answer:
    """z in q's dtype, rows in float32 (float64 for float64), weights in q's dtype."""
    with own_dtypes(problem.q):
        dense = _dense(problem)
        v_BHKD = repeat_kv(problem, problem.v.to(problem.compute_dtype))
        z = weighted_sum(dense.pattern, v_BHKD, dense.seen).to(problem.q.dtype)
        rows = _rows(problem, wanted, dense) if wanted.statistics else None
    return Answer(z, rows, dense.pattern.to(problem.q.dtype) if wanted.weights else None)


def pattern(problem: Problem) -> Tensor:
    """The weights that multiply v, (B, H, Q, K), in q's dtype (the softmax in float32 at least)."""
    with own_dtypes(problem.q):
        return _dense(problem).pattern.to(problem.q.dtype)


def _dense(problem: Problem) -> _Dense:
    dtype = problem.compute_dtype
    q_BHQD = problem.q.to(dtype) * problem.scale
    scores_BHQK = _products(q_BHQD, repeat_kv(problem, problem.k.to(dtype)))
    if problem.rule.softcap is not None:
        scores_BHQK = torch.tanh(scores_BHQK / problem.rule.softcap) * problem.rule.softcap
    for term in problem.rule.added:
        scores_BHQK = scores_BHQK + term.to(dtype).masked_fill(term <= hiding_value(term.dtype), 0.0)
    seen_BHQK = visible_matrix(problem)
    alive_BHQ = seen_BHQK.any(-1)
    # A large finite number instead of -inf: a row that sees nothing stays finite, and so do its gradients.
    scores_BHQK = scores_BHQK.masked_fill(~seen_BHQK, torch.finfo(dtype).min / 2)
    own_BHQK = torch.softmax(scores_BHQK, dim=-1).masked_fill(~seen_BHQK, 0.0)
    lse_BHQ = torch.logsumexp(scores_BHQK, dim=-1).masked_fill(~alive_BHQ, -torch.inf)
    if problem.rule.sinks is None:
        return _Dense(scores_BHQK, own_BHQK, own_BHQK, lse_BHQ, seen_BHQK, alive_BHQ, None)
    sink_BHQ = torch.sigmoid(problem.rule.sinks.to(dtype).view(1, -1, 1) - lse_BHQ)
    kept_BHQ = torch.sigmoid(lse_BHQ - problem.rule.sinks.to(dtype).view(1, -1, 1))
    return _Dense(scores_BHQK, own_BHQK, own_BHQK * kept_BHQ[..., None], lse_BHQ, seen_BHQK, alive_BHQ, sink_BHQ)


def _products(q_BHQD: Tensor, k_BHKD: Tensor) -> Tensor:
    """q . k; keys that are not finite give no gradient, since 0 times NaN would reach queries that do not see them."""
    if not concrete(k_BHKD) or bool(torch.isfinite(k_BHKD.detach().sum())):
        return q_BHQD @ k_BHKD.transpose(-1, -2)
    finite_BHK = torch.isfinite(k_BHKD).all(-1)
    clean_BHQK = q_BHQD @ k_BHKD.masked_fill(~finite_BHK[..., None], 0.0).transpose(-1, -2)
    return torch.where(finite_BHK[:, :, None], clean_BHQK, q_BHQD.detach() @ k_BHKD.detach().transpose(-1, -2))


def _rows(problem: Problem, wanted: Wanted, dense: _Dense) -> Rows:
    own_BHQK, alive_BHQ = dense.own, dense.alive
    shape = alive_BHQ.shape
    if own_BHQK.shape[-1] == 0:
        max_weight = own_BHQK.new_zeros(shape)
        argmax = torch.full(shape, -1, dtype=torch.int64, device=own_BHQK.device)
    else:
        argmax = dense.scores.argmax(-1)
        max_weight = dense.pattern.gather(-1, argmax[..., None])[..., 0]
        argmax = argmax.masked_fill(~alive_BHQ, -1)
    total_BHQ = dense.lse
    if problem.rule.sinks is not None:
        total_BHQ = torch.logaddexp(total_BHQ, problem.rule.sinks.to(total_BHQ.dtype).view(1, -1, 1))
    return Rows(
        lse=dense.lse,
        entropy=_entropy(dense),
        max_weight=max_weight,
        argmax=argmax,
        visible=dense.seen.sum(-1),
        sink=dense.sink,
        distance=(own_BHQK * distances(problem).to(own_BHQK.dtype)).sum(-1) if wanted.distance else None,
        pairs=None if wanted.pairs is None else pair_weights(problem, wanted.pairs, total_BHQ),
    )


def _entropy(dense: _Dense) -> Tensor:
    """-sum p log p with log p taken from the scores, so that p = 0 has gradient 0 and not infinity."""
    floor = torch.finfo(dense.own.dtype).min
    lse_BHQ1 = dense.lse.masked_fill(~dense.alive, 0.0)[..., None]
    log_own_BHQK = (dense.scores - lse_BHQ1).masked_fill(~dense.seen, 0.0).clamp(min=floor)
    return (dense.own * -log_own_BHQK).sum(-1)

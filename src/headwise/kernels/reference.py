"""The truth: attention in float64, written from the formulas, dense and slow.

Tests, documentation and benchmarks compare everything else with this page. It is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.kernels.masks import hiding_value, visible_at, visible_block
from headwise.kernels.problem import Answer, Problem, Rows, Wanted
from headwise.kernels.tracing import concrete

__all__ = ["attend", "visible_matrix"]


def attend(problem: Problem, wanted: Wanted | None = None) -> Answer:
    """Attention by the definition, in float64 whatever the input: z, and everything wanted.

    Example:
        >>> import torch
        >>> from headwise.kernels import Problem, Visible, Wanted, reference
        >>> q, v = torch.zeros(1, 1, 3, 2), torch.tensor([[[[1.0], [2.0], [6.0]]]])
        >>> answer = reference.attend(Problem(q, q, v, Visible(causal=True)), Wanted(rows=True))
        >>> answer.z.flatten().tolist(), [round(x, 4) for x in answer.rows.entropy.flatten().tolist()]
        ([1.0, 1.5, 3.0], [0.0, 0.6931, 1.0986])
    """
    wanted = wanted or Wanted()
    q_BHQD = problem.q.double()
    k_BHKD, v_BHKD = repeat_kv(problem, problem.k.double()), repeat_kv(problem, problem.v.double())
    seen_BHQK = visible_matrix(problem)
    alive_BHQ = seen_BHQK.any(-1)
    k_BHKD = k_BHKD.masked_fill(~seen_BHQK.any(2)[..., None], 0.0)  # a key that nobody sees may hold NaN

    scores_BHQK = (problem.scale * q_BHQD) @ k_BHKD.transpose(-1, -2)
    if problem.rule.softcap is not None:
        scores_BHQK = problem.rule.softcap * torch.tanh(scores_BHQK / problem.rule.softcap)
    for term in problem.rule.added:
        scores_BHQK = scores_BHQK + term.double().masked_fill(term <= hiding_value(term.dtype), 0.0)

    # A row that sees nothing has no softmax: it is computed as if it saw scores of 0, then set to 0.
    hidden_BHQK = torch.where(alive_BHQ[..., None], ~seen_BHQK, False)
    logits_BHQK = scores_BHQK.masked_fill(~alive_BHQ[..., None], 0.0).masked_fill(hidden_BHQK, -torch.inf)
    own_BHQK = torch.softmax(logits_BHQK, dim=-1).masked_fill(~seen_BHQK, 0.0)
    lse_BHQ = torch.logsumexp(logits_BHQK, dim=-1).masked_fill(~alive_BHQ, -torch.inf)
    pattern_BHQK, sink_BHQ = own_BHQK, None
    if problem.rule.sinks is not None:
        sinks_BHQ1 = problem.rule.sinks.double().view(1, -1, 1, 1).expand(*logits_BHQK.shape[:3], 1)
        with_sink = torch.softmax(torch.cat([logits_BHQK, sinks_BHQ1], dim=-1), dim=-1)
        pattern_BHQK = with_sink[..., :-1].masked_fill(~seen_BHQK, 0.0)
        sink_BHQ = torch.where(alive_BHQ, with_sink[..., -1], 1.0)

    z_BHQD = weighted_sum(pattern_BHQK, v_BHKD, seen_BHQK)
    rows = None
    if wanted.statistics:
        rows = Rows(
            lse=lse_BHQ,
            entropy=entropy(own_BHQK, torch.log_softmax(logits_BHQK, dim=-1)),
            max_weight=pattern_BHQK.amax(-1) if pattern_BHQK.shape[-1] else lse_BHQ.new_zeros(lse_BHQ.shape),
            argmax=first_largest(logits_BHQK, alive_BHQ),
            visible=seen_BHQK.sum(-1),
            sink=sink_BHQ,
            distance=(own_BHQK * distances(problem)).sum(-1) if wanted.distance else None,
            pairs=None if wanted.pairs is None else at_pairs(pattern_BHQK, problem, wanted.pairs),
        )
    return Answer(z_BHQD, rows, pattern_BHQK if wanted.weights else None)


def repeat_kv(problem: Problem, x_BGKD: Tensor) -> Tensor:
    """Give every query head its own keys or values: (B, G, K, D) -> (B, H, K, D)."""
    heads, groups = problem.q.shape[1], x_BGKD.shape[1]
    kv_map = problem.kv_map or tuple(h // (heads // groups) for h in range(heads))
    return x_BGKD[:, list(kv_map)]


def visible_matrix(problem: Problem) -> Tensor:
    """Every query against every key: bool (B, H, Q, K)."""
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    seen = visible_block(problem, (0, queries), (0, keys))
    if seen is None:
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=problem.q.device)
    return seen.expand(batch, heads, queries, keys)


def weighted_sum(pattern_BHQK: Tensor, v_BHKD: Tensor, seen_BHQK: Tensor) -> Tensor:
    """Pattern times V, in which a hidden value counts for nothing, even if it is NaN or infinite."""
    if not concrete(v_BHKD) or torch.isfinite(v_BHKD).all():
        return pattern_BHQK @ v_BHKD
    columns = [(pattern_BHQK * v_BHKD[:, :, None, :, d]).masked_fill(~seen_BHQK, 0.0) for d in range(v_BHKD.shape[3])]
    return torch.stack([column.sum(-1) for column in columns], dim=-1)


def entropy(own_BHQK: Tensor, log_own_BHQK: Tensor) -> Tensor:
    """-sum p log p in nats, with 0 log 0 = 0: (B, H, Q)."""
    return (own_BHQK * -log_own_BHQK.masked_fill(own_BHQK == 0, 0.0)).sum(-1)


def first_largest(logits_BHQK: Tensor, alive_BHQ: Tensor) -> Tensor:
    """The lowest index among the largest logits of a row; -1 for a row without a key."""
    if logits_BHQK.shape[-1] == 0:
        return torch.full(alive_BHQ.shape, -1, dtype=torch.int64, device=alive_BHQ.device)
    is_largest = logits_BHQK == logits_BHQK.amax(-1, keepdim=True)
    return is_largest.int().argmax(-1).masked_fill(~alive_BHQ, -1)


def distances(problem: Problem) -> Tensor:
    """|i - j| in tokens, (Q, K)."""
    i = torch.arange(problem.q.shape[2], device=problem.q.device)[:, None] + problem.offset
    return (i - torch.arange(problem.k.shape[2], device=problem.q.device)).abs().double()


def at_pairs(pattern_BHQK: Tensor, problem: Problem, keys_PBQ: Tensor) -> Tensor:
    """The pattern at the key named for each query, 0 where it is hidden or -1: (P, B, H, Q)."""
    batch, heads, queries, keys = pattern_BHQK.shape
    shape = (keys_PBQ.shape[0], batch, heads, queries)
    if keys == 0:
        return pattern_BHQK.new_zeros(shape)
    where = keys_PBQ.clamp(min=0)[:, :, None, :].expand(shape)
    found = (
        torch.stack([pattern_BHQK.gather(-1, index[..., None])[..., 0] for index in where.unbind(0)])
        if len(where)
        else pattern_BHQK.new_zeros(shape)
    )
    return found.masked_fill(~visible_at(problem, keys_PBQ).expand(shape), 0.0)

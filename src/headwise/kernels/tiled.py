"""Attention block by block with an online softmax: every score rule, every statistic, never n x n.

Plain torch on any device. The query heads of a group are stacked as rows, so keys and values are
read once per group. Forward and backward recompute scores from q, k and the row's log-sum-exp
(Dao et al. 2022, "FlashAttention", section 3.1), with float32 accumulation for half precision input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from headwise.kernels.masks import visible_counts
from headwise.kernels.pairs import pair_weights
from headwise.kernels.problem import Answer, Problem, Rows, Wanted
from headwise.kernels.tiled_core import Raw
from headwise.kernels.tiled_function import attend_core
from headwise.kernels.tracing import concrete, own_dtypes

__all__ = ["Core", "attend", "refusal"]


class Core(Protocol):
    """One differentiable pass over a problem in its dtype of computation, with plain groups and no sinks."""

    def __call__(self, problem: Problem, *, statistics: bool, distance: bool, pairs: Tensor | None = None) -> Raw:
        """Compute the pass."""


def refusal(problem: Problem) -> str | None:
    """Why this road cannot compute the problem; None when it can."""
    if problem.visible.predicate is not None and not concrete(problem.q):
        return "a predicate is a Python function, which tracing cannot follow block by block"
    return None


def attend(problem: Problem, wanted: Wanted, *, core: Core = attend_core) -> Answer:
    """z in q's dtype and rows in float32 (float64 for float64 input); ``wanted.weights`` is not its business.

    ``core`` makes the one pass; the native kernel passes its own.
    """
    with own_dtypes(problem.q):
        work = _prepared(problem)
        raw = core(work, statistics=wanted.statistics, distance=wanted.distance, pairs=wanted.pairs)
        z = raw.z
        if problem.rule.sinks is not None:
            sinks_1H1 = problem.rule.sinks.to(raw.lse.dtype).view(1, -1, 1)
            z = z * torch.sigmoid(raw.lse - sinks_1H1)[..., None]
        rows = _rows(problem, wanted, work, raw) if wanted.statistics else None
    return Answer(z.to(problem.q.dtype), rows)


def _prepared(problem: Problem) -> Problem:
    """The problem in the dtype of computation, with one key-value head per group of neighbouring query heads."""
    dtype = problem.compute_dtype
    k, v = problem.k, problem.v
    if problem.kv_map is not None:
        k, v = k[:, list(problem.kv_map)], v[:, list(problem.kv_map)]
    rule = replace(problem.rule, scale=problem.scale, sinks=None)
    visible = replace(problem.visible, offset=problem.offset)
    return Problem(problem.q.to(dtype), k.to(dtype), v.to(dtype), visible, rule)


def _rows(problem: Problem, wanted: Wanted, work: Problem, raw: Raw) -> Rows:
    total, sink, max_weight, pairs = raw.lse, None, torch.exp(raw.peak), raw.pairs
    if problem.rule.sinks is not None:
        sinks_1H1 = problem.rule.sinks.to(total.dtype).view(1, -1, 1)
        total = torch.logaddexp(raw.lse, sinks_1H1)
        sink = torch.sigmoid(sinks_1H1 - raw.lse)
        kept = torch.sigmoid(raw.lse - sinks_1H1)
        max_weight = max_weight * kept
        pairs = None if pairs is None else pairs * kept
    if wanted.pairs is not None and pairs is None:
        pairs = pair_weights(work, wanted.pairs, total)
    assert raw.entropy is not None
    assert raw.argmax is not None
    return Rows(
        lse=raw.lse,
        entropy=raw.entropy,
        max_weight=max_weight,
        argmax=raw.argmax,
        visible=visible_counts(problem).expand(raw.lse.shape),
        sink=sink,
        distance=raw.distance,
        pairs=pairs,
    )

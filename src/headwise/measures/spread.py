"""How far a row's logits lie apart: what decides how sharp the softmax can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels import Problem, Wanted, visible_block
from headwise.layout import Site
from headwise.measures.measure import Look, RowMeasure, RowValues

__all__ = ["LogitSpread", "logit_spread"]

#: Scores that are held at once.
_BLOCK: int = 2**21


@dataclass(frozen=True, kw_only=True)
class LogitSpread(RowMeasure):
    """Standard deviation of each row's visible logits."""

    name: str = "logit_spread"
    unit: str = "nats"
    low: float | None = 0.0
    description: str = (
        "Population standard deviation of a row's logits (scaled, capped, with bias) over its visible keys. Rows with "
        "one key are left out."
    )
    source: str = "Vaswani et al. 2017, Attention Is All You Need, section 3.2.1 (why the scale is d_k ** -0.5)"

    def wants(self, site: Site, problem: Problem) -> Wanted:  # noqa: ARG002
        """Nothing of the kernels."""
        return Wanted()

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) nats."""
        return logit_spread(look.problem)


def logit_spread(problem: Problem) -> tuple[Tensor, Tensor]:
    """The spread of each row's visible logits (B, H, Q) in float32 at least, and the rows that see two keys or more.

    Works through blocks of query rows, so that memory grows with their number and not its square. Values in float64
    problems stay in float64.
    """
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    dtype = problem.compute_dtype
    kv_map = problem.kv_map or tuple(head // (heads // problem.k.shape[1]) for head in range(heads))
    k_BHDK = problem.k.detach().to(dtype)[:, list(kv_map)].transpose(2, 3)
    spread = torch.zeros(batch, heads, queries, dtype=dtype, device=problem.q.device)
    several = torch.zeros(batch, heads, queries, dtype=torch.bool, device=problem.q.device)
    step = max(1, _BLOCK // max(1, batch * heads * keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        scores = problem.q.detach()[:, :, start:stop].to(dtype) * problem.scale @ k_BHDK
        if problem.rule.softcap is not None:
            scores = torch.tanh(scores / problem.rule.softcap) * problem.rule.softcap
        for term in problem.rule.added:
            part = term.detach()[:, :, start:stop] if term.shape[2] > 1 else term.detach()
            scores = scores + part.to(dtype)
        seen = visible_block(problem, (start, stop), (0, keys))
        spread[:, :, start:stop], several[:, :, start:stop] = _deviation(scores, seen)
    return spread, several


def _deviation(scores: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    seen = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen.expand_as(scores)
    count = seen.sum(-1)
    mean = torch.where(seen, scores, 0.0).sum(-1) / count.clamp(min=1)
    squares = torch.where(seen, scores - mean[..., None], 0.0).square().sum(-1)
    return (squares / count.clamp(min=1)).sqrt(), count > 1

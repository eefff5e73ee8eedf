"""The mean of the values that a query may see: a running mean under a causal mask. No scores, no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.kernels.masks import by_distance_alone, key_range, seen_ranges, visible_block, visible_counts
from headwise.kernels.problem import Problem

__all__ = ["mean_of_visible"]

#: Query rows whose visible keys are looked at together.
_ROWS = 256


def mean_of_visible(problem: Problem) -> Tensor:
    """The mean of the values that each query may see, (B, H, Q, D_v), float64; 0 where it sees none.

    Sums of values over ranges of keys where causality, windows and padding alone decide who sees whom; otherwise the
    visible keys of 256 rows at a time.

    Example:
        >>> from headwise.kernels import Visible
        >>> v = torch.tensor([[[[1.0], [3.0], [8.0]]]])
        >>> mean_of_visible(Problem(v, v, v, Visible(causal=True))).flatten().tolist()
        [1.0, 2.0, 4.0]
    """
    heads = problem.q.shape[1]
    v_BGKD = problem.v.double()
    padding = problem.visible.key_padding
    if padding is not None:
        v_BGKD = torch.where(padding[:, None, : v_BGKD.shape[2], None].to(v_BGKD.device), v_BGKD, 0.0)
    kv_map = problem.kv_map or tuple(head // (heads // problem.k.shape[1]) for head in range(heads))
    if by_distance_alone(problem):
        total_BHQD = _over_ranges(problem, v_BGKD)[:, list(kv_map)]
    else:
        total_BHQD = _over_rows(problem, v_BGKD, list(kv_map))
    return total_BHQD / visible_counts(problem)[..., None].clamp(min=1)


def _over_ranges(problem: Problem, v_BGKD: Tensor) -> Tensor:
    """(B, G, Q, D_v) sums of the values between the first and the last visible key of each query."""
    low_Q, high_Q = seen_ranges(problem)
    before_BGKD = torch.nn.functional.pad(v_BGKD.cumsum(2), (0, 0, 1, 0))
    return before_BGKD[:, :, high_Q.clamp(min=low_Q)] - before_BGKD[:, :, low_Q]


def _over_rows(problem: Problem, v_BGKD: Tensor, kv_map: list[int]) -> Tensor:
    """(B, H, Q, D_v) sums of the visible values."""
    parts = []
    queries = problem.q.shape[2]
    for start in range(0, queries, _ROWS):
        stop = min(start + _ROWS, queries)
        low, high = key_range(problem, start, stop)
        seen = visible_block(problem, (start, stop), (low, high))
        assert seen is not None
        weights = seen.expand(-1, -1, stop - start, high - low).to(v_BGKD.dtype)
        v = v_BGKD[:, :, low:high]
        parts.append((weights @ v)[:, kv_map] if seen.shape[1] == 1 else weights @ v[:, kv_map])
    return torch.cat(parts, dim=2) if parts else v_BGKD[:, kv_map, :0]

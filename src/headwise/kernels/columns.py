"""Attention received: for every key the sum of its weights over the query rows, without the pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.kernels import cpu, eager
from headwise.kernels.check import check_device, check_problem, shape_of
from headwise.kernels.extras import without_distance_bias
from headwise.kernels.masks import Span, cut
from headwise.kernels.problem import Problem, Wanted
from headwise.kernels.registry import run

__all__ = ["received"]

#: Scores of a block of rows in the plain road, about.
_BLOCK_SCORES = 4 * 1024 * 1024


def received(problem: Problem, *, lse: Tensor | None = None, row_weights: Tensor | None = None) -> Tensor:
    """Sum the pattern's columns: ``sum_i w_i p_ij`` for every head and key.

    On the CPU the native kernel makes the scores again and takes the weights from the row's log-sum-exp; elsewhere
    the pattern is built for a block of rows at a time. No gradients.

    Args:
        problem: the attention problem.
        lse: (B, H, Q), each row's log-sum-exp where it is known (``rows.lse``); computed otherwise.
        row_weights: (B or 1, Q), what a row counts, for example 0 for padding; 1 by default.

    Returns:
        float32 (B, H, K) (float64 for float64 input); a key that no row may see has 0.

    Raises:
        ShapeError: ``lse`` or ``row_weights`` does not fit the problem.

    Example:
        >>> import torch
        >>> from headwise.kernels import Problem, Visible, received
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> received(Problem(x, x, x, Visible(causal=True))).tolist()
        [[[1.5, 0.5]]]
    """
    check_problem(problem, Wanted())
    batch, heads, queries, _ = problem.q.shape
    if lse is not None:
        check_device("lse", lse, problem.q)
        if tuple(lse.shape) != (batch, heads, queries):
            raise ShapeError(
                f"lse must be (batch, query heads, queries) = ({batch}, {heads}, {queries}); got {shape_of(lse)}."
            )
    if row_weights is not None:
        check_device("row_weights", row_weights, problem.q)
        if row_weights.ndim != 2 or row_weights.shape[0] not in (1, batch) or row_weights.shape[1] != queries:
            raise ShapeError(
                f"row_weights must be (batch or 1, queries) = ({batch} or 1, {queries}); got {shape_of(row_weights)}."
            )
    with torch.no_grad():
        if cpu.refusal(problem, Wanted(rows=True)) is None and cpu.readable_now(problem):
            if lse is None:
                rows = run(problem, Wanted(rows=True), backend="cpu").rows
                assert rows is not None
                lse = rows.lse
            return cpu.received(problem, lse, row_weights)
        return _by_blocks(without_distance_bias(problem), row_weights)


def _by_blocks(problem: Problem, row_weights: Tensor | None) -> Tensor:
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    wide = replace(problem, q=problem.q.to(problem.compute_dtype), k=problem.k.to(problem.compute_dtype))
    out = torch.zeros((batch, heads, keys), dtype=problem.compute_dtype, device=problem.q.device)
    for rows in _spans(queries, max(1, _BLOCK_SCORES // max(1, batch * heads * keys))):
        weights = eager.pattern(_cut(wide, rows))
        if row_weights is not None:
            weights = weights * row_weights[:, None, rows[0] : rows[1], None]
        out += weights.sum(-2)
    return out


def _spans(length: int, step: int) -> Iterator[Span]:
    for start in range(0, length, step):
        yield start, min(start + step, length)


def _cut(problem: Problem, rows: Span) -> Problem:
    """The problem of some of its query rows."""
    batch, heads, _, _ = problem.q.shape
    whole = ((0, batch), (0, heads), rows, (0, problem.k.shape[2]))

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else cut(tensor, *whole)

    rule, visible = problem.rule, problem.visible
    return replace(
        problem,
        q=problem.q[:, :, rows[0] : rows[1]],
        visible=replace(visible, offset=problem.offset + rows[0], mask=part(visible.mask)),
        rule=replace(rule, bias=part(rule.bias), additive_mask=part(rule.additive_mask)),
    )

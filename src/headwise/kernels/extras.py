"""What a backend need not know itself: weights on classes of keys, ragged lists of pairs, a bias by distance.

The native kernel does these in its own pass. For every other backend they are brought back to what it knows:
the weight on a class is attention with the class's indicator as value, a list is padded to one key per
query and rule, and a bias by distance becomes a dense one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.kernels.masks import hiding_value
from headwise.kernels.problem import Answer, Problem, Wanted

__all__ = ["dense_distance_bias", "with_extras", "without_distance_bias"]

Attend = Callable[[Problem, Wanted], Answer]


def with_extras(attend: Attend) -> Attend:
    """A backend that knows z and row statistics, extended to ``Wanted.classes`` and ``Wanted.pair_lists``."""

    def extended(problem: Problem, wanted: Wanted) -> Answer:
        if wanted.classes is None and wanted.pair_lists is None:
            return attend(problem, wanted)
        plain = replace(wanted, rows=True, classes=None, n_classes=0, pair_lists=None)
        lists = None if wanted.pair_lists is None else _padded(wanted.pair_lists, problem)
        rules = 0 if wanted.pairs is None else wanted.pairs.shape[0]
        if lists is not None:
            named = lists if wanted.pairs is None else torch.cat([wanted.pairs.expand(rules, *lists.shape[1:]), lists])
            plain = replace(plain, pairs=named)
        answer = attend(problem, plain)
        rows = answer.rows
        assert rows is not None
        if lists is not None and wanted.pair_lists is not None:
            assert rows.pairs is not None
            found = _ragged(rows.pairs[rules:], wanted.pair_lists)
            rows = replace(rows, pairs=rows.pairs[:rules] if rules else None, pair_lists=found)
        if wanted.classes is not None:
            rows = replace(rows, classes=_class_weights(attend, problem, wanted))
        return replace(answer, rows=rows)

    return extended


def _class_weights(attend: Attend, problem: Problem, wanted: Wanted) -> Tensor:
    assert wanted.classes is not None
    batch, groups, keys, _ = problem.k.shape
    of = torch.arange(wanted.n_classes, device=problem.q.device)
    marks = (wanted.classes[..., None] == of).to(problem.compute_dtype)
    marks = marks[:, None].expand(batch, groups, keys, wanted.n_classes)
    wide = replace(problem, q=problem.q.to(marks.dtype), k=problem.k.to(marks.dtype), v=marks)
    return attend(wide, Wanted()).z


def _padded(lists: tuple[Tensor, Tensor], problem: Problem) -> Tensor:
    """(offsets, keys) as (P, B, Q), -1 where a row names fewer than P keys, or a key that is not there."""
    offsets, keys = lists
    batch, _, queries, _ = problem.q.shape
    counts = offsets[1:] - offsets[:-1]
    longest = int(counts.max()) if counts.numel() else 0
    out = keys.new_full((longest, batch * queries), -1)
    row, place = _places(offsets, counts)
    out[place, row] = torch.where((keys >= 0) & (keys < problem.k.shape[2]), keys, -1)
    return out.view(longest, batch, queries)


def _places(offsets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The row of every pair, and its place within the row."""
    row = torch.repeat_interleave(torch.arange(counts.numel(), device=offsets.device), counts)
    place = torch.arange(row.numel(), device=offsets.device) - offsets[row]
    return row, place


def _ragged(weights_PBHQ: Tensor, lists: tuple[Tensor, Tensor]) -> Tensor:
    offsets, _ = lists
    row, place = _places(offsets, offsets[1:] - offsets[:-1])
    flat = weights_PBHQ.permute(2, 0, 1, 3).flatten(2)
    return flat[:, place, row]


def dense_distance_bias(problem: Problem) -> Tensor:
    """The bias by distance as a dense (1, H or 1, Q, K) tensor; differentiable."""
    rule, device = problem.rule, problem.q.device
    assert rule.distance_bias is not None
    i = torch.arange(problem.q.shape[2], device=device)[:, None] + problem.offset
    j = torch.arange(problem.k.shape[2], device=device)
    return rule.distance_bias[:, j - i + rule.distance_zero][None]


def without_distance_bias(problem: Problem) -> Problem:
    """The same problem with its bias by distance, if it has one, made dense."""
    rule = problem.rule
    if rule.distance_bias is None:
        return problem
    dense = dense_distance_bias(problem)
    if rule.bias is None:
        bias = dense
    else:
        hidden = rule.bias <= hiding_value(rule.bias.dtype)
        dtype = torch.promote_types(rule.bias.dtype, dense.dtype)
        bias = (rule.bias.to(dtype) + dense.to(dtype)).masked_fill(hidden, -torch.inf)
    return replace(problem, rule=replace(rule, bias=bias, distance_bias=None, distance_zero=0))

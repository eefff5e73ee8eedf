"""Rows of words or of chosen candidates: blocks of the pattern, summed over words, a few query rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headwise.kernels import Predicate, Problem, Wanted, run, visible_block
from headwise.measures.roles.links import Ints
from headwise.measures.roles.plans import GroupRows
from headwise.measures.roles.tally import FIRST_KEY, Baseline, Sums

__all__ = ["RowsSeen", "passage_sums"]

#: Numbers of the pattern that are held at once.
_HELD: Final = 2**22


@dataclass(frozen=True)
class RowsSeen:
    """The pattern of query rows ``[start, stop)`` of one passage: weights (H, rows, K), and which keys they may see."""

    start: int
    stop: int
    weights: Tensor
    seen: Tensor


def passage_sums(problem: Problem, row: int, plans: Sequence[GroupRows]) -> Iterator[tuple[int, Sums]]:
    """The sums of every plan's rows in passage ``row`` of the call; (index of the plan, sums of one label).

    Values have one passage: (1, statistics, heads).
    """
    heads, keys = problem.q.shape[1], problem.k.shape[2]
    most = max(1, _HELD // max(1, heads * keys))
    found: dict[tuple[int, str], Sums] = {}
    for start, stop in _chunks(plans, most):
        block: RowsSeen | None = None
        for index, plan in enumerate(plans):
            inside = np.flatnonzero((plan.first >= start) & (plan.last < stop))
            if len(inside):
                block = block or _pattern(problem, row, start, stop)
                for sums in _of_rows(block, plan, inside):
                    key = (index, sums.label)
                    found[key] = found[key].joined(sums) if key in found else sums
    yield from ((index, sums) for (index, _), sums in found.items())


def _chunks(plans: Sequence[GroupRows], most: int) -> Iterator[tuple[int, int]]:
    """Stretches of query positions, together all rows, each row in one; at most ``most`` long unless one row is longer."""
    spans = sorted({(int(a), int(b)) for plan in plans for a, b in zip(plan.first, plan.last, strict=True)})
    start, stop = spans[0][0], spans[0][1] + 1
    for first, last in spans[1:]:
        if last + 1 - start > most and first >= stop:
            yield start, stop
            start = first
        stop = max(stop, last + 1)
    yield start, stop


def _pattern(problem: Problem, row: int, start: int, stop: int) -> RowsSeen:
    """The pattern of a few query rows of one passage."""
    part = _part(problem, row, start, stop)
    weights = run(part, Wanted(weights=True), backend="eager").weights
    assert weights is not None
    seen = visible_block(part, (0, stop - start), (0, problem.k.shape[2]))
    if seen is None:
        seen = torch.ones(1, dtype=torch.bool, device=weights.device)
    else:
        seen = seen.any(1)[0]
    return RowsSeen(start, stop, weights[0], seen.expand(weights.shape[2:]))


def _part(problem: Problem, row: int, start: int, stop: int) -> Problem:
    def cut(term: Tensor | None) -> Tensor | None:
        if term is None:
            return None
        term = term[row : row + 1] if term.shape[0] > 1 else term
        return term[:, :, start:stop] if term.shape[2] > 1 else term

    visible, rule, dtype = problem.visible, problem.rule, problem.compute_dtype
    k = problem.k[row : row + 1].to(dtype)
    padding = visible.key_padding
    return Problem(
        problem.q[row : row + 1, :, start:stop].to(dtype),
        k,
        k.new_zeros(*k.shape[:3], 1),
        replace(
            visible,
            offset=problem.offset + start,
            key_padding=padding[row : row + 1] if padding is not None and padding.shape[0] > 1 else padding,
            mask=cut(visible.mask),
            predicate=_moved(visible.predicate, row),
        ),
        replace(rule, scale=problem.scale, bias=cut(rule.bias), additive_mask=cut(rule.additive_mask)),
        problem.kv_map,
    )


def _moved(predicate: Predicate | None, row: int) -> Predicate | None:
    if predicate is None:
        return None
    return lambda b, h, i, j: predicate(b + row, h, i, j)


def _of_rows(block: RowsSeen, plan: GroupRows, inside: Ints) -> Iterator[Sums]:
    """The sums of the rows ``inside``, label by label, and those of all labels together."""
    device = block.weights.device
    weights, seen = _by_row(block, plan, inside)
    allowed = seen > 0
    if plan.candidates is not None:
        chosen = plan.candidates if len(plan.candidates) == 1 else plan.candidates[inside]
        allowed = allowed & torch.from_numpy(chosen).to(device)
    own = torch.from_numpy(plan.own[inside]).to(device)
    at = (own >= 0).nonzero()[:, 0]
    allowed[at, own[at]] = False
    weights = weights * allowed
    total = weights.sum(-1)
    best = torch.where(allowed, weights, -1.0).argmax(-1)
    measured = [_on(weights, total, best, allowed, part[inside], plan.renormalised) for part in (plan.targets, plan.null)]
    (has, score, share), (null_has, null_score, null_share) = measured
    some = allowed.sum(-1) > 1
    has, null_has = has & some, null_has & has & some
    stacked = torch.stack(
        [has.expand_as(score), score * has, share * has, null_has.expand_as(score), null_score * null_has, null_share * null_has]
    ).double()  # (statistics, H, R)
    labels = plan.labels[inside]
    counted = has.cpu().numpy()
    every = np.arange(len(inside))
    parts = [(plan.names[label], every[labels == label]) for label in np.unique(labels)]
    if plan.names != ("",):
        parts.append(("", every))
    for name, rows in parts:
        values = stacked[:, :, torch.from_numpy(rows).to(device)].sum(-1).cpu().numpy()[None]
        which = inside[rows[counted[rows]]]
        yield Sums(name, values, _offsets(plan, which), int(len(rows) - counted[rows].sum()))


def _by_row(block: RowsSeen, plan: GroupRows, inside: Ints) -> tuple[Tensor, Tensor]:
    """Weights (H, R, U) from each row's words to each key group, and how many of its tokens may see a group (R, U)."""
    device, dtype = block.weights.device, block.weights.dtype
    number = np.full(len(plan.first), -1, np.int64)
    number[inside] = np.arange(len(inside))
    kept = number[plan.members[:, 0]] >= 0
    row = torch.from_numpy(number[plan.members[kept, 0]]).to(device)
    query = torch.from_numpy(plan.members[kept, 1] - block.start).to(device)
    share = torch.from_numpy(plan.share[kept]).to(device, dtype)
    unit = plan.unit.to(device)
    keys = (unit >= 0).nonzero()[:, 0]
    heads = block.weights.shape[0]
    to_unit = block.weights.new_zeros(heads, block.stop - block.start, plan.units)
    to_unit.index_add_(2, unit[keys], block.weights[:, :, keys])
    weights = block.weights.new_zeros(heads, len(inside), plan.units)
    weights.index_add_(1, row, to_unit[:, query] * share[:, None])
    sees = block.weights.new_zeros(block.stop - block.start, plan.units)
    sees.index_add_(1, unit[keys], block.seen[:, keys].to(dtype))
    seen = block.weights.new_zeros(len(inside), plan.units)
    seen.index_add_(0, row, sees[query])
    return weights, seen


def _on(
    weights: Tensor, total: Tensor, best: Tensor, allowed: Tensor, targets: Ints, renormalised: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows have a target that competes (R,), the weight on it and whether the largest is there, (H, R) each."""
    named = torch.from_numpy(targets).to(weights.device)
    at = named.clamp(min=0)
    there = (named >= 0) & allowed.gather(1, at)
    taken = weights.gather(2, at.expand(weights.shape[0], -1, -1)) * there
    score = taken.sum(-1)
    if renormalised:
        score = score / torch.where(total > 0, total, 1.0)
    share = ((best[..., None] == at) & there).any(-1) & (total > 0)
    return there.any(-1), score, share.to(score.dtype)


def _offsets(plan: GroupRows, rows: Ints) -> Counter[Baseline]:
    named, place = plan.targets[rows], plan.places[rows]
    inside = (named >= 0) & (place[:, None] >= 0)
    rules, count = np.unique((named - place[:, None])[inside], return_counts=True)
    found: Counter[Baseline] = Counter(dict(zip(rules.tolist(), count.tolist(), strict=True)))
    if plan.fixed_first:
        found[FIRST_KEY] = int((named == 0).any(1).sum())
    return found

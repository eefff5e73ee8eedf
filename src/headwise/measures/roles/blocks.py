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
from headwise.measures.roles.links import Bools, Ints
from headwise.measures.roles.plans import GroupPlan, GroupRows
from headwise.measures.roles.tally import FIRST_KEY, STATISTICS, Baseline, Sums

__all__ = ["group_sums"]

#: Numbers of the pattern that are held at once.
_HELD: Final = 2**22


@dataclass(frozen=True)
class _Block:
    """The pattern of query rows ``[start, stop)`` of one passage: weights (H, rows, K), and which keys they may see."""

    start: int
    stop: int
    weights: Tensor
    seen: Tensor


def group_sums(problem: Problem, plans: Sequence[GroupPlan]) -> list[Sums]:
    """The sums of every plan over the rows of a call; the pattern of a passage is made once for all plans."""
    heads = problem.q.shape[1]
    values = [
        torch.zeros(len(plan.rows), len(plan.names), len(STATISTICS), heads, dtype=torch.float64) for plan in plans
    ]
    counted: list[list[Bools]] = [[] for _ in plans]
    for row in range(problem.q.shape[0]):
        present = [(at, rows) for at, plan in enumerate(plans) if (rows := plan.rows[row]) is not None]
        found = _passage(problem, row, [rows for _, rows in present], [values[at][row] for at, _ in present])
        for (at, _), one in zip(present, found, strict=True):
            counted[at].append(one)
    return [_sums(*one) for one in zip(plans, values, counted, strict=True)]


def _passage(problem: Problem, row: int, plans: Sequence[GroupRows], values: Sequence[Tensor]) -> list[Bools]:
    """Add one passage's rows to ``values`` (parts, statistics, heads); which rows of each plan counted."""
    counted = [np.zeros(len(plan.first), np.bool_) for plan in plans]
    if not plans:
        return counted
    most = max(1, _HELD // max(1, problem.q.shape[1] * problem.k.shape[2]))
    for start, stop in _chunks(plans, most):
        block: _Block | None = None
        for plan, into, which in zip(plans, values, counted, strict=True):
            inside = np.flatnonzero((plan.first >= start) & (plan.last < stop))
            if len(inside):
                block = block or _pattern(problem, row, start, stop)
                stacked = _of_rows(block, plan, inside)
                which[inside] = (stacked[0] > 0).any(0).cpu().numpy()
                labels = torch.from_numpy(plan.labels[inside])
                every = stacked.permute(2, 0, 1).double().cpu()
                into.index_add_(0, labels, every)
                into[0] += every[labels > 0].sum(0)
    return counted


def _sums(plan: GroupPlan, values: Tensor, counted: Sequence[Bools]) -> Sums:
    key = b"".join(one.tobytes() for one in counted)
    present = [rows for rows in plan.rows if rows is not None]
    if key not in plan.known:
        plan.known[key] = _fixed(present, counted, len(plan.names))
    hidden = np.zeros(len(plan.names), np.int64)
    for rows, some in zip(present, counted, strict=True):
        np.add.at(hidden, rows.labels[~some], 1)
        hidden[0] += int((rows.labels[~some] > 0).sum())
    return Sums(plan.names, values.numpy(), plan.known[key], hidden)


def _chunks(plans: Sequence[GroupRows], most: int) -> Iterator[tuple[int, int]]:
    """Stretches of query positions, each row in one of them; at most ``most`` long unless a row is longer."""
    spans = sorted({(int(a), int(b)) for plan in plans for a, b in zip(plan.first, plan.last, strict=True)})
    start, stop = spans[0][0], spans[0][1] + 1
    for first, last in spans[1:]:
        if last + 1 - start > most and first >= stop:
            yield start, stop
            start = first
        stop = max(stop, last + 1)
    yield start, stop


def _pattern(problem: Problem, row: int, start: int, stop: int) -> _Block:
    """The pattern of a few query rows of one passage."""
    part = _part(problem, row, start, stop)
    weights = run(part, Wanted(weights=True), backend="eager").weights
    assert weights is not None
    seen = visible_block(part, (0, stop - start), (0, problem.k.shape[2]))
    of_all = torch.ones(1, dtype=torch.bool, device=weights.device) if seen is None else seen.any(1)[0]
    return _Block(start, stop, weights[0], of_all.expand(weights.shape[2:]))


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


def _of_rows(block: _Block, plan: GroupRows, inside: Ints) -> Tensor:
    """The statistics of the rows ``inside``: (statistics, H, R)."""
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
    measured = [
        _on(weights, total, best, allowed, part[inside], plan.renormalised) for part in (plan.targets, plan.null)
    ]
    (has, score, share), (null_has, null_score, null_share) = measured
    some = allowed.sum(-1) > 1
    has, null_has = has & some, null_has & has & some
    return torch.stack(
        [
            has.expand_as(score),
            score * has,
            share * has,
            null_has.expand_as(score),
            null_score * null_has,
            null_share * null_has,
        ]
    )


def _by_row(block: _Block, plan: GroupRows, inside: Ints) -> tuple[Tensor, Tensor]:
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


def _fixed(plans: Sequence[GroupRows], counted: Sequence[Bools], parts: int) -> list[Counter[Baseline]]:
    """How many of the counted rows each fixed rule would hit, part by part."""
    found: list[Counter[Baseline]] = [Counter() for _ in range(parts)]
    for plan, some in zip(plans, counted, strict=True):
        named, place = plan.targets[some], plan.places[some]
        inside = (named >= 0) & (place[:, None] >= 0)
        label = np.broadcast_to(plan.labels[some][:, None], named.shape)[inside]
        for part, rule in zip(label.tolist(), (named - place[:, None])[inside].tolist(), strict=True):
            found[part][rule] += 1
        if plan.fixed_first:
            for part in plan.labels[some][(named == 0).any(1)].tolist():
                found[part][FIRST_KEY] += 1
    for one in found[1:]:
        found[0].update(one)
    return found

"""The weight on large classes of keys, which the kernels sum in the pass that they make anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headwise.kernels import Problem, Wanted, run, visible_counts
from headwise.measures.roles.plans import ClassPlan
from headwise.measures.roles.tally import FIRST_KEY, Baseline, Sums
from headwise.models import AttentionCall

__all__ = ["class_sums", "wanted_classes"]

#: Roles of classes in one pass: a key's class says which of them, and of their nulls, it is in (eight bits).
_TOGETHER: Final = 4


def wanted_classes(plans: Sequence[ClassPlan]) -> Wanted:
    """What to ask of the call's own pass: the weight on the classes of the first few plans."""
    return _wanted(plans[:_TOGETHER]) if plans else Wanted()


def _wanted(plans: Sequence[ClassPlan]) -> Wanted:
    codes = torch.zeros_like(plans[0].members, dtype=torch.uint8)
    for bit, keys in enumerate(part for plan in plans for part in (plan.members, plan.others)):
        codes += keys.to(torch.uint8) << bit
    return Wanted(rows=True, classes=codes, n_classes=int(codes.max()) + 1)


def class_sums(plans: Sequence[ClassPlan], call: AttentionCall, token: Tensor) -> list[tuple[ClassPlan, Sums]]:
    """The sums of every plan over the rows of a call that was asked for :func:`wanted_classes`."""
    rows, found = call.answer.rows, []
    for start in range(0, len(plans), _TOGETHER):
        part = plans[start : start + _TOGETHER]
        rows = run(call.problem, _wanted(part)).rows if start else rows
        assert rows is not None
        assert rows.classes is not None
        weights, code = rows.classes, torch.arange(rows.classes.shape[-1], device=rows.classes.device)
        holds = (code[:, None] >> torch.arange(2 * len(part), device=code.device)) & 1
        masses = (weights @ holds.to(weights.dtype)).unbind(-1)
        for at, plan in enumerate(part):
            found.append((plan, _sums(plan, call, token, masses[2 * at], masses[2 * at + 1])))
    return found


def _sums(plan: ClassPlan, call: AttentionCall, token: Tensor, score: Tensor, null: Tensor) -> Sums:
    rows = call.answer.rows
    assert rows is not None
    members, others = (_seen(call.problem, part) for part in (plan.members, plan.others))
    about = (plan.rows & token)[:, None]
    seen = (members > 0) & (members < rows.visible) & about
    null_seen = (others > 0) & seen
    at = rows.argmax.clamp(min=0)
    hit, null_hit = (
        part[:, None].expand(-1, at.shape[1], -1).gather(2, at) & (rows.argmax >= 0)
        for part in (plan.members, plan.others)
    )
    parts = [
        seen.expand(score.shape), score * seen, hit & seen,
        null_seen.expand(score.shape), null * null_seen, null_hit & null_seen,
    ]  # fmt: skip
    values = torch.stack([one.sum(-1, dtype=torch.float64) for one in parts], dim=1).cpu().numpy()[:, None]
    counted = seen.any(1).cpu().numpy()
    hidden = int((about & (members == 0)).any(1).sum())
    key = (counted.tobytes(), call.site.causal)
    if key not in plan.known:
        plan.known[key] = _offsets(plan, counted, call.site.causal)
    return Sums(("",), values, [plan.known[key]], np.array([hidden]))


def _seen(problem: Problem, members: Tensor) -> Tensor:
    """How many of the members each query may see: (B, H or 1, Q)."""
    padding = problem.visible.key_padding
    real = members if padding is None else members & padding
    return visible_counts(replace(problem, visible=replace(problem.visible, key_padding=real)))


def _offsets(
    plan: ClassPlan, counted: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], causal: bool
) -> Counter[Baseline]:
    """How many rows each fixed offset would hit. A window is not looked at, so the baseline may be a little high."""
    found: Counter[Baseline] = Counter()
    members = plan.members.cpu().numpy()
    for row, passage in enumerate(plan.passages):
        queries = np.flatnonzero(counted[row][passage.queries])
        keys = np.flatnonzero(members[row][passage.keys])
        if not len(queries) or not len(keys):
            continue
        gap = keys[:, None] - (queries if passage.tokens.keys is None else np.zeros_like(queries))
        gap = gap[gap <= 0] if causal and passage.tokens.keys is None else gap.ravel()
        offsets, counts = np.unique(gap, return_counts=True)
        found.update(dict(zip(offsets.tolist(), counts.tolist(), strict=True)))
        if passage.tokens.keys is None and keys[0] == 0:
            found[FIRST_KEY] += len(queries)
    return found

"""The mass on large classes of keys: attention with the classes' indicators as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headwise.kernels import Problem, run, visible_counts
from headwise.measures.roles.plans import ClassPlan
from headwise.measures.roles.tally import FIRST_KEY, Baseline, Sums
from headwise.models import AttentionCall

__all__ = ["class_sums"]


def class_sums(plans: Sequence[ClassPlan], call: AttentionCall, token: Tensor) -> list[tuple[ClassPlan, Sums]]:
    """The sums of every plan over the rows of a call.

    All classes share one pass: column c of the values is 1 at the keys of class c, padded to the width of the keys, so
    that the backends that need equal widths can do it.
    """
    problem = call.problem
    columns = torch.stack([part for plan in plans for part in (plan.members, plan.others)], dim=-1)
    mass = _mass(problem, columns)
    return [(plan, _sums(plan, call, token, mass[..., 2 * at : 2 * at + 2])) for at, plan in enumerate(plans)]


def _mass(problem: Problem, columns_BKC: Tensor) -> Tensor:
    """(B, H, Q, C): the weight that each row puts on each class."""
    count, dtype = columns_BKC.shape[-1], problem.compute_dtype
    v = torch.zeros(
        *problem.k.shape[:3], max(problem.k.shape[-1], count), dtype=dtype, device=problem.k.device
    )  # fmt: skip
    v[..., :count] = columns_BKC[:, None].to(dtype)
    return run(replace(problem, q=problem.q.to(dtype), k=problem.k.to(dtype), v=v)).z[..., :count]


def _sums(plan: ClassPlan, call: AttentionCall, token: Tensor, mass: Tensor) -> Sums:
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
    score, null = mass[..., 0], mass[..., 1]
    parts = [
        seen.expand(score.shape), score * seen, hit & seen,
        null_seen.expand(score.shape), null * null_seen, null_hit & null_seen,
    ]  # fmt: skip
    values = torch.stack([one.sum(-1, dtype=torch.float64) for one in parts], dim=1).cpu().numpy()[:, None]
    counted = seen.expand(score.shape).any(1).cpu().numpy()
    hidden = int((about & (members == 0)).any(1).sum())
    return Sums(("",), values, [_offsets(plan, counted, call.site.causal)], np.array([hidden]))


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

"""Looks on at a trace and sums, for every head and role, how much weight goes where the role says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.data import Batch
from headwise.errors import InputError, UnsupportedError
from headwise.kernels import Problem, Wanted, visible_at
from headwise.layout import Site
from headwise.measures.roles.blocks import group_sums
from headwise.measures.roles.classes import class_sums, wanted_classes
from headwise.measures.roles.plans import ClassPlan, GroupPlan, PairPlan, Plan, plan_of
from headwise.measures.roles.reading import Passage, read_passages_of
from headwise.measures.roles.role import Role
from headwise.measures.roles.tally import FIRST_KEY, Baseline, Draws, Sums, Tally
from headwise.measures.roles.tokens import Lexicon
from headwise.models import AttentionCall
from headwise.trace import TOKEN, row_kinds

__all__ = ["RoleObserver"]

_WRONG_KIND = {"self": "the role is about self-attention", "cross": "the role is about cross-attention"}


class RoleObserver:
    """Sums the evidence of roles for every head; use it with :func:`headwise.trace.run`, or through ``hw.roles``.

    Args:
        roles: what to look for; names are unique.
        tokenizer: turns ids into text, for roles that need it.
        counts: how often each id occurs in the data, for roles that need it.
        seed: of the shuffled pairs and the bootstrap.
        replicates: of the bootstrap.

    Attributes:
        tallies: by role and site.
        absent: by role, the sites where it has no value, and why.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        tokenizer: Any | None = None,
        *,
        counts: Mapping[int, int] | None = None,
        seed: int = 0,
        replicates: int = 1000,
    ) -> None:
        self.roles = tuple(roles)
        repeated = [name for name, count in Counter(role.name for role in self.roles).items() if count > 1]
        if repeated:
            raise InputError(f"two roles are named {repeated[0]!r}; rename one")
        self.tallies: dict[tuple[str, Site], Tally] = {}
        self.absent: dict[str, dict[Site, str]] = {role.name: {} for role in self.roles}
        self.heads: dict[Site, int] = {}
        self._lexicon, self._counts, self._seed = Lexicon(tokenizer), counts, seed
        self._draws = Draws(seed, replicates)
        self._batch: Batch | None = None
        self._read: dict[tuple[object, ...], list[Passage] | str] = {}
        self._plans: dict[tuple[object, ...], Plan | str | None] = {}
        self._asked: list[tuple[Plan, slice | None]] = []

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted | None:
        """The pairs that the roles name, with the shuffled ones."""
        if batch is not self._batch:
            self._batch, self._read, self._plans = batch, {}, {}
        self.heads[site] = problem.q.shape[1]
        self._asked, pairs, start = [], [], 0
        for role in self.roles:
            plan = self._plan(role, site, problem, batch)
            if plan is None:
                continue
            if isinstance(plan, PairPlan):
                stop = start + 2 * plan.keys.shape[0]
                self._asked.append((plan, slice(start, stop)))
                pairs += [plan.keys, plan.null]
                start = stop
            else:
                self._asked.append((plan, None))
        if not self._asked:
            return None
        classes = wanted_classes([plan for plan, _ in self._asked if isinstance(plan, ClassPlan)])
        return replace(classes, rows=True, pairs=torch.cat(pairs) if pairs else None)

    def _plan(self, role: Role, site: Site, problem: Problem, batch: Batch | None) -> Plan | None:
        if site in self.absent[role.name]:
            return None
        if role.kind != site.key.kind:
            self.absent[role.name][site] = _WRONG_KIND[role.kind]
            return None
        shape = (problem.q.shape[2], problem.k.shape[2])
        place = (site.key.stack, site.key.kind, site.causal, shape)
        if place not in self._read:
            self._read[place] = read_passages_of(site, problem, batch, self._lexicon, self._counts)
        passages = self._read[place]
        key = (role.name, *place)
        if key not in self._plans:
            self._plans[key] = passages if isinstance(passages, str) else self._made(role, passages, shape, problem)
        plan = self._plans[key]
        if isinstance(plan, str):
            self.absent[role.name][site] = plan
            return None
        return plan

    def _made(self, role: Role, passages: list[Passage], shape: tuple[int, int], problem: Problem) -> Plan | str | None:
        try:
            return plan_of(role, passages, shape, self._seed, problem.q.device)
        except UnsupportedError as error:
            return str(error)

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Fold one call into the tallies."""
        assert batch is not None
        draws = self._draws.of(batch.passages)
        token = row_kinds(call.site, call.problem, batch) == TOKEN
        groups = [plan for plan, _ in self._asked if isinstance(plan, GroupPlan)]
        classes = [plan for plan, _ in self._asked if isinstance(plan, ClassPlan)]
        for plan, part in self._asked:
            if isinstance(plan, PairPlan):
                assert part is not None
                self._add(plan.role, call.site, _pair_sums(plan, call, part, token, self._where), draws)
        if classes:
            for plan, sums in class_sums(classes, call, token):
                self._add(plan.role, call.site, sums, draws)
        for plan, sums in zip(groups, group_sums(call.problem, groups) if groups else (), strict=True):
            if plan.role.hidden == "error" and sums.hidden.any():
                raise InputError(_hidden(plan.role, self._first_hidden(plan, sums), call.site, None))
            self._add(plan.role, call.site, sums, draws)

    def _add(self, role: Role, site: Site, sums: Sums, draws: Any) -> None:
        key = (role.name, site)
        if key not in self.tallies:
            self.tallies[key] = Tally(self.heads[site], self._draws.replicates)
        self.tallies[key].add(sums, draws)

    def _first_hidden(self, plan: GroupPlan, sums: Sums) -> str:
        """The first passage with a row that did not count."""
        for row, rows in enumerate(plan.rows):
            if rows is not None and len(rows.first) > sums.values[row, 0, 0].max():
                return self._where(row)
        return self._where(0)

    def _where(self, row: int) -> str:
        assert self._batch is not None
        if row < len(self._batch.where):
            return self._batch.where[row]
        return f"passage {self._batch.passages[row]} (counted from 0)"


def _hidden(role: Role, where: str, site: Site, pair: tuple[int, int] | None) -> str:
    said = f"the pair ({pair[0]}, {pair[1]})" if pair else "a row"
    return (
        f"role {role.name!r}, {where}: {said} names a key that its query may not see at {site.key}"
        f"{' (causal)' if site.causal else ''}; leave such pairs out, or give Role(..., hidden='skip') to skip them"
    )


def _pair_sums(plan: PairPlan, call: AttentionCall, part: slice, token: Tensor, where: Any) -> Sums:
    rows = call.answer.rows
    assert rows is not None
    assert rows.pairs is not None
    slots = plan.keys.shape[0]
    weight, null = rows.pairs[part][:slots].sum(0), rows.pairs[part][slots:].sum(0)
    visible = visible_at(call.problem, plan.keys)
    if plan.role.hidden == "error":
        _check_seen(plan, call, visible, token, where)
    counts = token[:, None] & (rows.visible > 1)
    seen = visible.any(0) & counts
    null_seen = visible_at(call.problem, plan.null).any(0) & seen
    hit = ((rows.argmax == plan.keys[:, :, None]) & visible).any(0)
    null_hit = ((rows.argmax == plan.null[:, :, None]) & (plan.null >= 0)[:, :, None]).any(0)
    sums = _summed(weight, hit, seen) + _summed(null, null_hit, null_seen)
    values = torch.stack(sums, dim=1).double().cpu().numpy()
    named = (plan.keys >= 0).any(0) & token
    counted = seen.any(1)
    offsets = plan.offsets[(plan.keys >= 0) & counted]
    baselines = _counter(offsets)
    baselines[FIRST_KEY] = int((plan.first & counted).sum())
    return Sums(("",), values[:, None], [baselines], np.array([int((named & ~counted).sum())]))


def _summed(weight: Tensor, hit: Tensor, counted: Tensor) -> list[Tensor]:
    """Rows, weight and hits, each summed over the rows that count: (B, H)."""
    both = torch.stack([weight, hit.to(weight.dtype)], dim=1)
    if counted.shape[1] == 1:  # all heads count the same rows
        sums = torch.einsum("bshq,bq->bsh", both, counted[:, 0].to(both.dtype))
    else:
        sums = (both * counted[:, None]).sum(-1)
    return [counted.sum(-1).expand(weight.shape[:2]), sums[:, 0], sums[:, 1]]


def _check_seen(plan: PairPlan, call: AttentionCall, visible: Tensor, token: Tensor, where: Any) -> None:
    bad = (plan.keys >= 0) & ~visible.any(2) & token
    if not bool(bad.any()):
        return
    slot, row, query = bad.nonzero()[0].tolist()
    offset = int(plan.offsets[slot, row, query])
    key = int(plan.keys[slot, row, query])
    pair = (key - offset, key) if call.site.key.kind == "self" else (query, key)
    raise InputError(_hidden(plan.role, where(row), call.site, pair))


def _counter(offsets: Tensor) -> Counter[Baseline]:
    if not offsets.numel():
        return Counter()
    low = int(offsets.min())
    counts = torch.bincount(offsets - low)
    at = counts.nonzero()[:, 0]
    return Counter(dict(zip((at + low).tolist(), counts[at].tolist(), strict=True)))

"""Looks on at a trace and sums, for every head and role, how much weight goes where the role says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headwise.data import Batch
from headwise.errors import InputError, UnsupportedError
from headwise.kernels import Problem, Wanted
from headwise.layout import Site
from headwise.measures.roles.blocks import group_sums
from headwise.measures.roles.classes import class_sums, wanted_classes
from headwise.measures.roles.pairs import PairStack, refuse_hidden
from headwise.measures.roles.plans import ClassPlan, GroupPlan, PairPlan, Plan, plan_of
from headwise.measures.roles.reading import Passage, read_passages_of
from headwise.measures.roles.role import Role
from headwise.measures.roles.tally import Draws, Sums, Tally
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
        self._asked: list[Plan] = []
        self._stacks: list[PairStack] = []
        self._stack: PairStack | None = None

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted | None:
        """The pairs that the roles name, with the shuffled ones."""
        if batch is not self._batch:
            self._batch, self._read, self._plans, self._stacks = batch, {}, {}, []
        self.heads[site] = problem.q.shape[1]
        plans = (self._plan(role, site, problem, batch) for role in self.roles)
        self._asked = [plan for plan in plans if plan is not None]
        if not self._asked:
            return None
        self._stack = self._stacked([plan for plan in self._asked if isinstance(plan, PairPlan)])
        classes = wanted_classes([plan for plan in self._asked if isinstance(plan, ClassPlan)])
        return replace(classes, rows=True, pairs=None if self._stack is None else self._stack.keys)

    def _stacked(self, plans: list[PairPlan]) -> PairStack | None:
        """The stack of these plans, made once for a batch."""
        same = [one for one in self._stacks if [id(plan) for plan in one.plans] == [id(plan) for plan in plans]]
        known = same[0] if same else None
        if known is None and plans:
            known = PairStack.build(plans)
            self._stacks.append(known)
        return known

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
        groups = [plan for plan in self._asked if isinstance(plan, GroupPlan)]
        classes = [plan for plan in self._asked if isinstance(plan, ClassPlan)]
        if self._stack is not None:
            for pairs, sums in zip(self._stack.plans, self._stack.sums(call, token, self._where), strict=True):
                self._add(pairs.role, call.site, sums, draws)
        if classes:
            for plan, sums in class_sums(classes, call, token):
                self._add(plan.role, call.site, sums, draws)
        for group, sums in zip(groups, group_sums(call.problem, groups) if groups else (), strict=True):
            if group.role.hidden == "error" and sums.hidden.any():
                refuse_hidden(group.role, self._first_hidden(group, sums), call.site, None)
            self._add(group.role, call.site, sums, draws)

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

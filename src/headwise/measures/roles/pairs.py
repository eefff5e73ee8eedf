"""Roles whose keys are pairs: the sums of all of them over the rows of one call, together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.kernels import visible_at
from headwise.layout import Site
from headwise.measures.roles.plans import PairPlan
from headwise.measures.roles.role import Role
from headwise.measures.roles.tally import FIRST_KEY, Baseline, Sums
from headwise.models import AttentionCall

__all__ = ["PairStack", "refuse_hidden"]


@dataclass(frozen=True)
class PairStack:
    """The keys of several plans for one batch, one after the other: those that a role names, then the shuffled ones.

    Attributes:
        plans: the plans.
        keys: (T, B, Q) positions of the call, -1 for none.
        spans: where those of each plan lie, and where its shuffled ones.
    """

    plans: tuple[PairPlan, ...]
    keys: Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def build(cls, plans: Sequence[PairPlan]) -> PairStack:
        """Put the keys of ``plans`` together."""
        keys = [part for plan in plans for part in (plan.keys, plan.null)]
        ends = list(accumulate(part.shape[0] for part in keys))
        return cls(tuple(plans), torch.cat(keys), tuple(zip([0, *ends[:-1]], ends, strict=True)))

    def sums(self, call: AttentionCall, token: Tensor, where: Callable[[int], str]) -> list[Sums]:
        """The sums of every plan over the token rows of a call that was asked for :attr:`keys` as its pairs.

        Raises:
            InputError: a role whose pairs must be visible names one that is not.
        """
        rows = call.answer.rows
        assert rows is not None
        assert rows.pairs is not None
        visible = visible_at(call.problem, self.keys)
        self._check_seen(call, visible, token, where)
        seen, hit = self._any(visible), self._any((rows.argmax == self.keys[:, :, None]) & visible)
        several = rows.visible[:, : visible.shape[2]] > 1  # where all heads see the same keys, one speaks for all
        about = seen[::2] & token[:, None] & several
        counting = torch.stack([about, seen[1::2] & about], dim=1).flatten(0, 1)
        values = self._summed(rows.pairs, hit, counting).double().cpu().numpy()
        counted = about.any(2)
        return [
            Sums(("",), values[:, at][:, None], *_baselines(plan, counted[at], token))
            for at, plan in enumerate(self.plans)
        ]

    def _any(self, parts: Tensor) -> Tensor:
        """Whether any of the keys of one plan and kind: (2 * plans, ...)."""
        if len(self.spans) == len(parts):
            return parts
        return torch.stack([parts[a] if b - a == 1 else parts[a:b].any(0) for a, b in self.spans])

    def _summed(self, weight: Tensor, hit: Tensor, counted: Tensor) -> Tensor:
        """Rows, weight and hits of each plan, then of its null, summed over the rows that count: (B, plans, 6, H).

        Weights lie in memory as the kernels write them, a row's keys side by side, and are read once in that order.
        """
        slots = torch.tensor([at for at, (a, b) in enumerate(self.spans) for _ in range(b - a)], device=hit.device)
        of_slot = counted.movedim(0, -1)[..., slots].to(weight.dtype).movedim(-1, 0)
        masses = (weight * of_slot).sum(-1)  # (T, B, H)
        mass = masses.new_zeros(len(self.spans), *masses.shape[1:]).index_add_(0, slots, masses)
        if counted.shape[2] == 1:  # all heads count the same rows
            hits = torch.einsum("pbhq,pbq->pbh", hit.to(mass.dtype), counted[:, :, 0].to(mass.dtype))
        else:
            hits = (hit & counted).sum(-1)
        rows = counted.sum(-1).expand_as(mass)
        every = torch.stack([rows.to(mass.dtype), mass, hits.to(mass.dtype)], dim=1)  # (2 * plans, 3, B, H)
        return every.reshape(-1, 6, *every.shape[2:]).permute(2, 0, 1, 3)

    def _check_seen(self, call: AttentionCall, visible: Tensor, token: Tensor, where: Callable[[int], str]) -> None:
        start = 0
        for plan in self.plans:
            slots = plan.keys.shape[0]
            if plan.role.hidden == "error":
                bad = (plan.keys >= 0) & ~visible[start : start + slots].any(2) & token
                if bool(bad.any()):
                    slot, row, query = bad.nonzero()[0].tolist()
                    offset, key = int(plan.offsets[slot, row, query]), int(plan.keys[slot, row, query])
                    pair = (key - offset, key) if call.site.key.kind == "self" else (query, key)
                    refuse_hidden(plan.role, where(row), call.site, pair)
            start += 2 * slots


def refuse_hidden(role: Role, where: str, site: Site, pair: tuple[int, int] | None) -> None:
    """Say that a rule names a key which its query may not see.

    Raises:
        InputError: always.
    """
    said = f"the pair ({pair[0]}, {pair[1]})" if pair else "a row"
    raise InputError(
        f"role {role.name!r}, {where}: {said} names a key that its query may not see at {site.key}"
        f"{' (causal)' if site.causal else ''}; leave such pairs out, or give Role(..., hidden='skip') to skip them"
    )


def _baselines(plan: PairPlan, counted: Tensor, token: Tensor) -> tuple[list[Counter[Baseline]], np.ndarray]:
    """How many counted rows each fixed rule would hit, and how many rows were left out; made once for equal rows."""
    key = counted.cpu().numpy().tobytes() + token.cpu().numpy().tobytes()
    if key not in plan.known:
        named = plan.keys >= 0
        rules = _counter(plan.offsets[named & counted])
        rules[FIRST_KEY] = int((plan.first & counted).sum())
        plan.known[key] = (rules, int((named.any(0) & token & ~counted).sum()))
    rules, hidden = plan.known[key]
    return [rules], np.array([hidden])


def _counter(offsets: Tensor) -> Counter[Baseline]:
    if not offsets.numel():
        return Counter()
    low = int(offsets.min())
    counts = torch.bincount(offsets - low)
    at = counts.nonzero()[:, 0]
    return Counter(dict(zip((at + low).tolist(), counts[at].tolist(), strict=True)))

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
        weight, seen = self._joined(rows.pairs), self._joined(visible)
        hit = self._joined((rows.argmax == self.keys[:, :, None]) & visible)
        several = rows.visible[:, : visible.shape[2]] > 1  # where all heads see the same keys, one speaks for all
        about = seen[::2] & token[:, None] & several
        counting = torch.stack([about, seen[1::2] & about], dim=1).flatten(0, 1)
        values = _summed(weight, hit.to(weight.dtype), counting).double().cpu().numpy()
        counted = about.any(2)
        return [
            Sums(("",), values[:, at][:, None], *_baselines(plan, counted[at], token))
            for at, plan in enumerate(self.plans)
        ]

    def _joined(self, parts: Tensor) -> Tensor:
        """Over the keys of one plan and kind the sum, of bools whether any is True: (2 * plans, ...)."""
        if len(self.spans) == len(parts):
            return parts
        over = torch.any if parts.dtype == torch.bool else torch.sum
        return torch.stack([parts[a] if b - a == 1 else over(parts[a:b], dim=0) for a, b in self.spans])

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


def _summed(weight: Tensor, hit: Tensor, counted: Tensor) -> Tensor:
    """Rows, weight and hits of each plan, then of its null, summed over the rows that count: (B, plans, 6, H)."""
    if counted.shape[2] == 1:  # all heads count the same rows
        of = counted[:, :, 0].to(weight.dtype)
        sums = [torch.einsum("pbhq,pbq->pbh", part, of) for part in (weight, hit)]
    else:
        sums = [(part * counted).sum(-1) for part in (weight, hit)]
    rows = counted.sum(-1).expand(weight.shape[:3]).to(weight.dtype)
    every = torch.stack([rows, *sums], dim=1)  # (2 * plans, 3, B, H)
    return every.reshape(-1, 6, *every.shape[2:]).permute(2, 0, 1, 3)


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

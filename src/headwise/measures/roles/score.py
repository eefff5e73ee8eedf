"""The evidence for one head and role, and whether the head has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headwise.layout import HeadId, Site
from headwise.measures.roles.role import Role
from headwise.measures.roles.tally import Baseline, Part
from headwise.measures.roles.verdict import Criterion

__all__ = ["RoleAbout", "RoleScore", "scores_of"]


@dataclass(frozen=True)
class RoleAbout:
    """What a role is: for people who read a table."""

    name: str
    kind: str
    description: str
    source: str


@dataclass(frozen=True)
class RoleScore:
    """The evidence for one head and role.

    Attributes:
        role: name of the role; a part of one is named ``"role:part"`` (``"head:nsubj"``).
        head: the head.
        layer: its layer, a label for people.
        rows, passages: how many query rows (words, for roles of words) and passages the numbers are over.
        score: mean weight on the role's key; among the candidates where the role has some.
        share: share of rows whose largest weight is there.
        score_low, score_high, share_low, share_high: bootstrap intervals over passages.
        null_score, null_share: the same on shuffled pairs.
        fixed: the rule of position that hits most rows: ``"offset -2"``, ``"first key"``, for cross-attention
            ``"key 7"``; empty where there is none.
        fixed_share: the share of rows that it hits.
        assigned: whether the head has the role.
        reason: where it has not, what was missing.
    """

    role: str
    head: HeadId
    layer: int
    rows: int
    passages: int
    score: float
    score_low: float
    score_high: float
    share: float
    share_low: float
    share_high: float
    null_score: float
    null_share: float
    fixed: str
    fixed_share: float
    assigned: bool
    reason: str = ""

    def __str__(self) -> str:
        best = f"best {self.fixed} {self.fixed_share:.2f}" if self.fixed else "no fixed offset"
        return (
            f"{self.role}: layer {self.layer} head {self.head.head}, share {self.share:.2f} "
            f"({self.share_low:.2f} to {self.share_high:.2f}), weight {self.score:.2f}; {best}, shuffled "
            f"{self.null_share:.2f}; {self.rows} rows"
        )


def scores_of(role: Role, label: str, site: Site, tally: Part, criterion: Criterion) -> list[RoleScore]:
    """The evidence for the heads of one site and one part of a role."""
    rule, fixed_share = tally.fixed(role.baseline)
    numbers = {name: tally.mean(name) for name in ("score", "share", "null_score", "null_share")}
    ends = {name: tally.interval(name, criterion.level) for name in ("score", "share")}
    found = []
    for head, rows in enumerate(tally.rows):
        if rows == 0:
            continue
        values = {name: float(value[head]) for name, value in numbers.items()}
        for name, (low, high) in ends.items():
            values |= {f"{name}_low": float(low[head]), f"{name}_high": float(high[head])}
        reason = _missing(values, fixed_share, int(rows), tally.passages, criterion)
        found.append(
            RoleScore(
                role=f"{role.name}:{label}" if label else role.name,
                head=HeadId(site.key, head),
                layer=site.layer,
                rows=int(rows),
                passages=tally.passages,
                fixed=_said(rule, role.kind),
                fixed_share=fixed_share,
                assigned=not reason,
                reason=reason,
                **values,
            )
        )
    return found


def _said(rule: Baseline | None, kind: str) -> str:
    if rule is None or isinstance(rule, str):
        return rule or ""
    return f"key {rule}" if kind == "cross" else f"offset {rule:+d}"


def _missing(values: Mapping[str, float], fixed_share: float, rows: int, passages: int, criterion: Criterion) -> str:
    """The first condition that does not hold; empty where all do."""
    if rows < criterion.rows or passages < criterion.passages:
        return f"{rows} rows in {passages} passages are too few"
    null_share, null_score = (
        0.0 if math.isnan(values[name]) else values[name] for name in ("null_share", "null_score")
    )
    for name, least in (("the best fixed rule", fixed_share), ("shuffled pairs", null_share)):
        if not values["share"] - least >= criterion.margin:
            return f"share {values['share']:.2f} is not {criterion.margin:g} above that of {name}, {least:.2f}"
        if not values["share_low"] > least:
            return f"the interval of the share, from {values['share_low']:.2f}, reaches {name}, {least:.2f}"
    if not values["score"] - null_score >= criterion.score_margin:
        return (
            f"weight {values['score']:.3f} is not {criterion.score_margin:g} above that of shuffled pairs, "
            f"{null_score:.3f}"
        )
    if not values["score_low"] > null_score:
        return f"the interval of the weight, from {values['score_low']:.3f}, reaches shuffled pairs, {null_score:.3f}"
    return ""

"""The evidence for every head and role, and which heads are assigned which role."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError
from headwise.layout import HeadId, HeadLayout, Site, SiteKey
from headwise.measures.roles.role import Role
from headwise.measures.roles.tally import Tally
from headwise.measures.roles.verdict import Criterion

if TYPE_CHECKING:
    import pandas as pd

    from headwise.measures.roles.observer import RoleObserver

__all__ = ["RoleAbout", "RoleScore", "RoleTable"]


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
        offset: the fixed offset that hits most rows (for cross-attention: the fixed key), or None.
        offset_share: the share of rows that it hits.
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
    offset: int | None
    offset_share: float
    assigned: bool
    reason: str = ""

    def __str__(self) -> str:
        best = "no fixed offset" if self.offset is None else f"offset {self.offset:+d} {self.offset_share:.2f}"
        return (
            f"{self.role}: layer {self.layer} head {self.head.head}, share {self.share:.2f} "
            f"({self.share_low:.2f} to {self.share_high:.2f}), weight {self.score:.2f}; {best}, shuffled "
            f"{self.null_share:.2f}; {self.rows} rows"
        )


class RoleTable:
    """For each role and head the evidence; iterating gives every :class:`RoleScore`.

    Attributes:
        layout: where the heads sit.
        about: the roles that were looked for.
        absent: by role, the sites where it has no value, and why.
        criterion: when a head was assigned a role.
        model, weight_hash: which model.
        parts: names of the pieces of data.
    """

    def __init__(
        self,
        layout: HeadLayout,
        scores: Sequence[RoleScore],
        about: Sequence[RoleAbout],
        *,
        absent: Mapping[str, Mapping[SiteKey, str]],
        criterion: Criterion,
        model: str | None = None,
        weight_hash: str | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.layout, self.about, self.criterion = layout, tuple(about), criterion
        self.absent = {name: dict(sites) for name, sites in absent.items()}
        self.model, self.weight_hash, self.parts = model, weight_hash, tuple(parts)
        self._scores = tuple(scores)
        self._by_role: dict[str, list[RoleScore]] = {}
        for score in self._scores:
            self._by_role.setdefault(score.role, []).append(score)

    @classmethod
    def build(
        cls,
        layout: HeadLayout,
        observer: RoleObserver,
        criterion: Criterion,
        *,
        model: str | None = None,
        weight_hash: str | None = None,
        parts: Sequence[str] = (),
    ) -> RoleTable:
        """The table of what an observer has seen."""
        by_name = {role.name: role for role in observer.roles}
        order = {site.key: at for at, site in enumerate(layout.sites)}
        place = {name: at for at, name in enumerate(by_name)}
        keys = sorted(observer.tallies, key=lambda key: (place[key[0]], key[1], order[key[2].key]))
        scores = [
            score
            for name, label, site in keys
            for score in scores_of(by_name[name], label, site, observer.tallies[name, label, site], criterion)
        ]
        about = [RoleAbout(role.name, role.kind, role.description, role.source) for role in observer.roles]
        absent: dict[str, dict[SiteKey, str]] = {}
        measured = {(name, site) for name, _, site in observer.tallies}
        for name in by_name:
            for site in layout.sites:
                if (name, site) not in measured:
                    reason = observer.absent[name].get(site) or "the role names no pair that this attention may see"
                    absent.setdefault(name, {})[site.key] = reason
        return cls(
            layout, scores, about, absent=absent, criterion=criterion, model=model, weight_hash=weight_hash, parts=parts
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles and parts of roles that have a value somewhere."""
        return tuple(self._by_role)

    def __iter__(self) -> Iterator[RoleScore]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, role: str) -> list[RoleScore]:
        """The evidence for every head of one role, in the order of a forward pass."""
        if role not in self._by_role:
            known = ", ".join(self._by_role) or "none"
            named = self.absent.get(role)
            why = f" ({next(iter(named.values()))})" if named else ""
            raise InputError(f"there is no role {role!r} in this table{why}; it has {known}")
        return list(self._by_role[role])

    def best(self, role: str) -> RoleScore:
        """The head with the largest share, and of equal ones the largest weight."""
        return max(self[role], key=lambda one: (one.share, one.score))

    def assigned(self, role: str | None = None) -> list[RoleScore]:
        """The heads that have a role (this one, or any), best first within a role."""
        names = self.roles if role is None else (role,)
        found: list[RoleScore] = []
        for name in names:
            mine = [one for one in self[name] if one.assigned] if name in self._by_role or role is None else self[name]
            found += sorted(mine, key=lambda one: (-one.share, -one.score))
        return found

    def of(self, head: HeadId) -> list[RoleScore]:
        """The evidence for one head, best role first."""
        return sorted((one for one in self._scores if one.head == head), key=lambda one: (-one.assigned, -one.share))

    def to_pandas(self) -> pd.DataFrame:
        """One line per role and head."""
        import pandas as pd

        lines = []
        for one in self._scores:
            site = one.head.site
            line = {
                "role": one.role, "stack": site.stack, "kind": site.kind, "layer": one.layer, "module": site.module,
                "call": site.call, "head": one.head.head,
            }  # fmt: skip
            line |= {name: value for name, value in asdict(one).items() if name not in ("role", "head", "layer")}
            lines.append(line)
        return pd.DataFrame(lines)

    def summary(self) -> pd.DataFrame:
        """One line per role: the best head beside the best fixed offset and the shuffled pairs.

        In the form of Clark et al. 2019, table 1, with intervals.
        """
        import pandas as pd

        lines = []
        for role in self.roles:
            one = self.best(role)
            lines.append(
                {
                    "role": role,
                    "head": f"{one.layer}-{one.head.head}",
                    "share": one.share,
                    "low": one.share_low,
                    "high": one.share_high,
                    "weight": one.score,
                    "offset": one.offset,
                    "offset_share": one.offset_share,
                    "shuffled": one.null_share,
                    "rows": one.rows,
                    "heads": sum(other.assigned for other in self[role]),
                }
            )
        frame = pd.DataFrame(lines)
        return frame.set_index("role") if lines else frame

    def __repr__(self) -> str:
        if not self._scores:
            return "RoleTable(no role has a value)"
        return f"RoleTable({self.model or 'model'}; {self.criterion})\n{self.summary().to_string(float_format='%.3f')}"

    def _repr_html_(self) -> str:
        return str(self.summary().to_html(float_format="%.3f"))


def scores_of(role: Role, label: str, site: Site, tally: Tally, criterion: Criterion) -> list[RoleScore]:
    """The evidence for the heads of one site."""
    offset, offset_share = tally.best_offset(role.offset)
    numbers = {name: tally.mean(name) for name in ("score", "share", "null_score", "null_share")}
    ends = {name: tally.interval(name, criterion.level) for name in ("score", "share")}
    found = []
    for head, rows in enumerate(tally.rows):
        if rows == 0:
            continue
        values = {name: float(value[head]) for name, value in numbers.items()}
        for name, (low, high) in ends.items():
            values |= {f"{name}_low": float(low[head]), f"{name}_high": float(high[head])}
        reason = _missing(values, offset_share, int(rows), tally.passages, criterion)
        found.append(
            RoleScore(
                role=f"{role.name}:{label}" if label else role.name,
                head=HeadId(site.key, head),
                layer=site.layer,
                rows=int(rows),
                passages=tally.passages,
                offset=offset,
                offset_share=offset_share,
                assigned=not reason,
                reason=reason,
                **values,
            )
        )
    return found


def _missing(values: Mapping[str, float], offset_share: float, rows: int, passages: int, criterion: Criterion) -> str:
    """The first condition that does not hold; empty where all do."""
    if rows < criterion.rows or passages < criterion.passages:
        return f"{rows} rows in {passages} passages are too few"
    null_share, null_score = (0.0 if math.isnan(values[name]) else values[name] for name in ("null_share", "null_score"))
    for name, least in (("the best fixed offset", offset_share), ("shuffled pairs", null_share)):
        if not values["share"] - least >= criterion.margin:
            return f"share {values['share']:.2f} is not {criterion.margin:g} above that of {name}, {least:.2f}"
        if not values["share_low"] > least:
            return f"the interval of the share, from {values['share_low']:.2f}, reaches {name}, {least:.2f}"
    if not values["score"] - null_score >= criterion.score_margin:
        return f"weight {values['score']:.3f} is not {criterion.score_margin:g} above that of shuffled pairs, {null_score:.3f}"
    if not values["score_low"] > null_score:
        return f"the interval of the weight, from {values['score_low']:.3f}, reaches shuffled pairs, {null_score:.3f}"
    return ""

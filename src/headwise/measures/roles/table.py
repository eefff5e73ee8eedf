"""The evidence for every head and role, and which heads are assigned which role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise import artifacts
from headwise.errors import InputError
from headwise.layout import HeadId, HeadLayout, SiteKey
from headwise.measures.roles import document as _document
from headwise.measures.roles.score import RoleAbout, RoleScore, scores_of
from headwise.measures.roles.verdict import Criterion

if TYPE_CHECKING:
    import pandas as pd

    from headwise.measures.roles.observer import RoleObserver

__all__ = ["RoleTable"]


class RoleTable:
    """For each role and head the evidence; iterating gives every :class:`RoleScore`.

    Attributes:
        heads: all heads that were looked at, in the order of a forward pass.
        layers: for each site the label for people.
        about: the roles that were looked for.
        absent: by role, the sites where it has no value, and why.
        criterion: when a head was assigned a role.
        model, weight_hash: which model.
        parts: names of the pieces of data.
    """

    def __init__(
        self,
        heads: Sequence[HeadId],
        layers: Mapping[SiteKey, int],
        scores: Sequence[RoleScore],
        about: Sequence[RoleAbout],
        *,
        absent: Mapping[str, Mapping[SiteKey, str]],
        criterion: Criterion,
        model: str | None = None,
        weight_hash: str | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.heads, self.layers = tuple(heads), dict(layers)
        self.about, self.criterion = tuple(about), criterion
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
        observers: RoleObserver | Sequence[RoleObserver],
        criterion: Criterion | None = None,
        *,
        model: str | None = None,
        weight_hash: str | None = None,
        parts: Sequence[str] = (),
    ) -> RoleTable:
        """The table of what observers have seen: one, or several of different roles."""
        criterion = criterion or Criterion()
        scores: list[RoleScore] = []
        about: list[RoleAbout] = []
        absent: dict[str, dict[SiteKey, str]] = {}
        order = {site.key: at for at, site in enumerate(layout.sites)}
        for observer in observers if isinstance(observers, Sequence) else (observers,):
            by_name = {role.name: role for role in observer.roles}
            for name, role in by_name.items():
                mine = [(site, tally) for (other, site), tally in observer.tallies.items() if other == name]
                mine.sort(key=lambda pair: order[pair[0].key])
                for label in sorted({label for _, tally in mine for label in tally.labels}):
                    for site, tally in mine:
                        if label in tally.labels:
                            scores += scores_of(role, label, site, tally.part(label), criterion)
            about += [RoleAbout(role.name, role.kind, role.description, role.source) for role in observer.roles]
            absent |= _absent(layout, observer)
        return cls(
            tuple(layout.heads()),
            {site.key: site.layer for site in layout.sites},
            scores,
            about,
            absent=absent,
            criterion=criterion,
            model=model,
            weight_hash=weight_hash,
            parts=parts,
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
            mine = [one for one in self[name] if one.assigned]
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
            place = {"role": one.role, "stack": site.stack, "kind": site.kind, "layer": one.layer}
            place |= {"module": site.module, "call": site.call, "head": one.head.head}
            numbers = {name: value for name, value in vars(one).items() if name not in ("role", "head", "layer")}
            lines.append(place | numbers)
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
                    "fixed": one.fixed,
                    "fixed_share": one.fixed_share,
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
        return self.summary().to_html(float_format=lambda value: f"{value:.3f}")

    def to_document(self) -> dict[str, Any]:
        """The table as plain lists and dictionaries: ``headwise.roles`` (docs/format.md)."""
        return _document.to_document(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> RoleTable:
        """The table that :meth:`to_document` described.

        Raises:
            RunError: it is not of this format, or its parts contradict each other.
        """
        return _document.from_document(cls, document)

    def save(self, path: str | Path) -> Path:
        """Write the table as JSON; a file that is there is replaced in one step.

        Raises:
            RunError: the file cannot be written.
        """
        return artifacts.write_document(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path) -> RoleTable:
        """Read a table that :meth:`save` wrote.

        Raises:
            RunError: the file is missing, damaged, of another format or of a newer version.
        """
        return cls.from_document(artifacts.read_document(path, artifacts.ROLES_FORMAT))


def _absent(layout: HeadLayout, observer: RoleObserver) -> dict[str, dict[SiteKey, str]]:
    measured = set(observer.tallies)
    found: dict[str, dict[SiteKey, str]] = {}
    for role in observer.roles:
        for site in layout.sites:
            if (role.name, site) not in measured:
                reason = observer.absent[role.name].get(site) or "the role names no key that a query here may see"
                found.setdefault(role.name, {})[site.key] = reason
    return found

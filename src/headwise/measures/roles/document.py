"""A table of roles as plain lists and dictionaries, and back (docs/format.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

from headwise import artifacts
from headwise.errors import InputError, RunError
from headwise.layout import HeadId, SiteKey
from headwise.measures.roles.score import RoleAbout, RoleScore
from headwise.measures.roles.verdict import Criterion

if TYPE_CHECKING:
    from headwise.measures.roles.table import RoleTable

__all__ = ["from_document", "to_document"]

#: Columns of the scores that are taken as they are.
_COLUMNS: Final = tuple(field.name for field in fields(RoleScore) if field.name not in ("head", "layer"))


def to_document(table: RoleTable) -> dict[str, Any]:
    """The heads, the roles, and the evidence in columns; NaN is null."""
    at = {head: index for index, head in enumerate(table.heads)}
    scores = list(table)
    columns: dict[str, list[Any]] = {"head": [at[one.head] for one in scores]}
    for name in _COLUMNS:
        columns[name] = [_plain(getattr(one, name)) for one in scores]
    sites = list(dict.fromkeys(head.site for head in table.heads))
    return {
        "format": artifacts.ROLES_FORMAT,
        "version": artifacts.ROLES_VERSION,
        "model": {"name": table.model, "weight_hash": table.weight_hash},
        "parts": list(table.parts),
        "heads": [_head(head, table.layers[head.site]) for head in table.heads],
        "criterion": asdict(table.criterion),
        "roles": [asdict(one) for one in table.about],
        "scores": columns,
        "absent": [
            {
                "role": role,
                "stack": site.stack,
                "kind": site.kind,
                "module": site.module,
                "call": site.call,
                "reason": reason,
            }
            for role, missing in table.absent.items()
            for site, reason in missing.items()
            if site in sites
        ],
    }


def _head(head: HeadId, layer: int) -> dict[str, Any]:
    return {**asdict(head.site), "layer": layer, "head": head.head}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def from_document(kind: type[RoleTable], document: Mapping[str, Any]) -> RoleTable:
    """The table that :func:`to_document` described.

    Raises:
        RunError: it is not of this format, or its parts contradict each other.
    """
    artifacts.check_document(document, artifacts.ROLES_FORMAT)
    columns = document["scores"]
    lengths = {name: len(column) for name, column in columns.items() if name in ("head", *_COLUMNS)}
    if len(set(lengths.values())) > 1:
        raise RunError(f"the headwise.roles document has columns of unequal length: {lengths}")
    heads = [HeadId(_site(one), one["head"]) for one in document["heads"]]
    layers = {_site(one): one["layer"] for one in document["heads"]}
    if len(set(heads)) < len(heads):
        raise RunError("the headwise.roles document lists a head twice")
    scores = []
    for row, at in enumerate(columns["head"]):
        if at >= len(heads):
            raise RunError(f"the headwise.roles document names head {at} of {len(heads)}")
        values = {name: _number(columns[name][row]) for name in _COLUMNS}
        scores.append(RoleScore(head=heads[at], layer=layers[heads[at].site], **values))
    absent: dict[str, dict[SiteKey, str]] = {}
    for one in document["absent"]:
        absent.setdefault(one["role"], {})[_site(one)] = one["reason"]
    try:
        criterion = Criterion(**{field.name: document["criterion"][field.name] for field in fields(Criterion)})
    except InputError as error:
        raise RunError(f"the headwise.roles document has a criterion that cannot be: {error}") from error
    about = [RoleAbout(*(one[field.name] for field in fields(RoleAbout))) for one in document["roles"]]
    return kind(
        heads,
        layers,
        scores,
        about,
        absent=absent,
        criterion=criterion,
        model=document["model"]["name"],
        weight_hash=document["model"]["weight_hash"],
        parts=document["parts"],
    )


def _site(entry: Mapping[str, Any]) -> SiteKey:
    return SiteKey(entry["stack"], entry["kind"], entry["module"], entry["call"])


def _number(value: Any) -> Any:
    return math.nan if value is None else value

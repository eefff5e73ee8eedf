"""Which heads of a table satisfy conditions on where they sit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from headwise.errors import InputError
from headwise.layout import HeadId

if TYPE_CHECKING:
    from headwise.heads._table import HeadTable

T = TypeVar("T")


def positions(
    table: HeadTable,
    *,
    stack: str | Iterable[str] | None,
    kind: str | Iterable[str] | None,
    layer: int | Iterable[int] | None,
    module: str | Iterable[str] | None,
    heads: int | HeadId | Iterable[int | HeadId] | None,
) -> list[int]:
    """Positions, in order, of the heads that satisfy every condition that is not None."""
    layers = {site.key: site.layer for site in table.layout.sites}
    ids = table.heads
    keep = [True] * len(ids)
    for name, given, own in (
        ("stack", stack, [head.site.stack for head in ids]),
        ("kind", kind, [head.site.kind for head in ids]),
        ("layer", layer, [layers[head.site] for head in ids]),
    ):
        if given is not None:
            wanted = set(_several(name, given))
            _known(name, wanted, set(own))
            keep = [k and value in wanted for k, value in zip(keep, own, strict=True)]
    if module is not None:
        prefixes = _several("module", module)
        paths = {head.site.module for head in ids}
        for prefix in prefixes:
            if not any(_under(path, prefix) for path in paths):
                raise InputError(f"no head of the table has module {prefix!r}; {_some('modules are', paths)}")
        keep = [k and any(_under(head.site.module, p) for p in prefixes) for k, head in zip(keep, ids, strict=True)]
    if heads is not None:
        wanted_heads = set(_several("heads", heads))
        _known_heads(wanted_heads, table)
        keep = [k and (head in wanted_heads or head.head in wanted_heads) for k, head in zip(keep, ids, strict=True)]
    return [at for at, kept in enumerate(keep) if kept]


def _several(name: str, given: Any) -> list[Any]:
    single = not isinstance(given, Iterable) or isinstance(given, str)
    values = [given] if single else list(given)
    kinds = {"layer": (int, np.integer), "heads": (int, np.integer, HeadId)}.get(name, (str,))
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kinds):
            words = {"layer": "whole numbers", "heads": "whole numbers or HeadIds"}.get(name, "strings")
            raise InputError(f"{name} must be {words}, one or several; got {value!r}")
    return values


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")


def _known(name: str, wanted: set[T], own: set[T]) -> None:
    unknown = wanted - own
    if unknown:
        raise InputError(f"no head of the table has {name} {min(unknown, key=str)!r}; {_some('there is', own)}")


def _known_heads(wanted: set[Any], table: HeadTable) -> None:
    indices = {head.head for head in table.heads}
    for value in wanted:
        if isinstance(value, HeadId):
            if value not in table:
                raise InputError(f"there is no head {value} ({value.site.stack}, {value.site.kind}) in this table")
        elif value not in indices:
            raise InputError(f"no site of the table has a head {value}; {_some('there is', indices)}")


def _some(lead: str, own: set[Any]) -> str:
    listed = sorted(own, key=lambda value: (str(type(value)), value))
    shown = ", ".join(str(value) for value in listed[:12])
    return f"{lead} {shown}{f' and {len(listed) - 12} more' if len(listed) > 12 else ''}" if listed else "it is empty"

"""The roles that have a name, and what a caller's list of names, functions and roles means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from headwise.errors import InputError
from headwise.measures.roles.alignment import monotonic
from headwise.measures.roles.brackets import PARTNERS
from headwise.measures.roles.lexical import LEXICAL
from headwise.measures.roles.positional import POSITIONAL
from headwise.measures.roles.role import Role, as_role

__all__ = ["NAMED", "resolve_roles"]

#: Every role that needs nothing but the passage, by name.
NAMED: Final[Mapping[str, Role]] = MappingProxyType(
    {role.name: role for role in (*POSITIONAL, *LEXICAL, *PARTNERS, monotonic())}
)


def resolve_roles(asked: Any = None, more: Iterable[Role] = ()) -> tuple[Role, ...]:
    """The roles that a caller means.

    Args:
        asked: names, :class:`Role` objects and plain functions, one or several; None for all named ones.
        more: further roles (of a parse, of a file), which always take part; they may also be asked for by name.

    Raises:
        InputError: an unknown name (with the nearest one), or something that is no role.

    >>> [role.name for role in resolve_roles(["previous", "first"])]
    ['previous', 'first']
    """
    further = {role.name: role for role in more}
    if asked is None:
        listed: list[Any] = [*NAMED.values(), *further.values()]
    elif isinstance(asked, str | Role) or not isinstance(asked, Iterable):
        listed = [asked]
    else:
        listed = list(asked)
    found: dict[str, Role] = {}
    for one in listed:
        role = _named(one, further) if isinstance(one, str) else as_role(one)
        if found.setdefault(role.name, role) is not role and found[role.name] != role:
            raise InputError(f"roles holds two different roles named {role.name!r}; rename one")
    for role in further.values():
        found.setdefault(role.name, role)
    if not found:
        raise InputError("roles is empty; name at least one, or leave it out for all")
    return tuple(found.values())


def _named(name: str, further: Mapping[str, Role]) -> Role:
    known = {**NAMED, **further}
    if name in known:
        return known[name]
    if name in ("head", "dependent", "coreference"):
        raise InputError(f"role {name!r} needs a parse: give conllu= or spacy= (--conllu, --spacy)")
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    raise InputError(f"roles: there is no role {name!r}; {hint}")

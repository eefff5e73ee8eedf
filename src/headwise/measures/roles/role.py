"""What a role is: a rule that names, for each query, the key it should look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InputError
from headwise.measures.roles.links import Groups, Pairs, pairs_of
from headwise.measures.roles.tally import Baseline
from headwise.measures.roles.tokens import Tokens

__all__ = ["Candidates", "Found", "Ints", "Role", "as_role", "found_by"]

Ints: TypeAlias = NDArray[np.int64]
#: What a rule may give for one passage.
Found: TypeAlias = Pairs | Groups | Iterable[tuple[int, int]]
#: The keys that compete for each query: one set for all queries, or one for each.
Candidates: TypeAlias = Iterable[int] | Mapping[int, Iterable[int]]


@dataclass(frozen=True)
class Role:
    """A rule from the tokens of a passage to pairs of a query and the key that it should look at.

    Args:
        name: how tables call it.
        find: called with the :class:`Tokens` of one passage; gives (query, key) pairs of positions. Several pairs with
            one query mean that any of these keys will do: their weights are summed, and the largest weight may be on
            any. A query without a pair is no row of the role. Queries that are special tokens are left out.
        candidates: called with the same tokens; gives the keys among which the largest weight is sought, and over which
            weights are renormalised: one set for all queries, or a mapping from query to set. All visible keys by
            default.
        kind: ``"self"`` or ``"cross"``: what attention the rule is about.
        description: one sentence for people.
        source: the paper that the rule comes from.
        baseline: where the rule is itself one of position, that rule, which is then no baseline for it: an offset
            (previous: -1) or ``"first key"``.
        hidden: what a pair whose key the query may not see means: ``"error"``, or ``"skip"`` (no row).
        needs_counts: whether the rule reads ``tokens.counts``.

    Example:
        >>> def two_back(tokens):
        ...     return [(i, i - 2) for i in range(2, len(tokens))]
        >>> Role("two_back", two_back, baseline=-2).kind
        'self'
    """

    name: str
    find: Callable[[Tokens], Found]
    candidates: Callable[[Tokens], Candidates] | None = None
    kind: Literal["self", "cross"] = "self"
    description: str = ""
    source: str = ""
    baseline: Baseline | None = None
    hidden: Literal["error", "skip"] = "error"
    needs_counts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or "\n" in self.name:
            raise InputError(f"a role's name must be a line of text, and is {self.name!r}")
        if not callable(self.find):
            raise InputError(f"role {self.name!r}: find must be a function from tokens to pairs, not {self.find!r}")
        if self.kind not in ("self", "cross"):
            raise InputError(f"role {self.name!r}: kind must be 'self' or 'cross', and is {self.kind!r}")
        if self.hidden not in ("error", "skip"):
            raise InputError(f"role {self.name!r}: hidden must be 'error' or 'skip', and is {self.hidden!r}")


def as_role(given: Any) -> Role:
    """A role from what a user gives: a :class:`Role`, or a plain function, which lends its name.

    >>> def the_one_before(tokens):
    ...     return [(i, i - 1) for i in range(1, len(tokens))]
    >>> as_role(the_one_before).name
    'the_one_before'
    """
    if isinstance(given, Role):
        return given
    if callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        said = (getattr(given, "__doc__", None) or "").strip().partition("\n")[0]
        return Role(name, given, description=said)
    raise InputError(f"a role is a Role or a function from tokens to pairs, not a {type(given).__name__}")


def found_by(role: Role, tokens: Tokens) -> Pairs | Groups | None:
    """What the rule names in one passage, checked; None where it names nothing.

    Raises:
        InputError: pairs that are no pairs, or positions outside the passage.
    """
    keys = tokens if tokens.keys is None else tokens.keys
    given = role.find(tokens)
    if isinstance(given, Pairs | Groups):
        found = given
    else:
        found = pairs_of(given, len(tokens), len(keys), f"role {role.name!r}, {tokens.where}")
    if not len(found):
        return None
    if role.candidates is not None:
        if isinstance(found, Groups):
            raise InputError(f"role {role.name!r}: candidates go with pairs of tokens; groups name their own")
        return found.among(role.candidates(tokens), len(keys), f"role {role.name!r}, {tokens.where}")
    return found

"""What a rule named in one passage: pairs of positions, or pairs of words."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InputError

__all__ = ["Groups", "Pairs", "pairs_of", "ragged"]

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Pairs:
    """Rows of single tokens that compete among all visible keys.

    Attributes:
        queries: (R,) positions, each once.
        keys: (R, S) positions of the keys that count as hit, -1 where a row has fewer than S; (1, S) where all rows
            name the same keys.
    """

    queries: Ints
    keys: Ints

    def __len__(self) -> int:
        return len(self.queries)

    @staticmethod
    def of(queries: Any, keys: Any) -> Pairs:
        """From two lists of positions of the same length."""
        return Pairs(np.asarray(queries, np.int64), np.asarray(keys, np.int64).reshape(-1, 1))

    def rows(self) -> Ints:
        """The keys of every row, (R, S)."""
        return np.broadcast_to(self.keys, (len(self.queries), self.keys.shape[1]))

    def among(self, candidates: Any, count: int, where: str) -> Groups:
        """The same rows, competing among ``candidates``.

        Raises:
            InputError: no set of positions, or a target that is no candidate.
        """
        if isinstance(candidates, Mapping):
            sets = [_positions(candidates.get(int(query), ()), count, where) for query in self.queries]
            allowed = np.zeros((len(self), count), np.bool_)
            for row, chosen in enumerate(sets):
                allowed[row, chosen] = True
        else:
            allowed = np.zeros((1, count), np.bool_)
            allowed[0, _positions(candidates, count, where)] = True
        for row, (query, keys) in enumerate(zip(self.queries, self.rows(), strict=True)):
            mine = allowed[row if len(allowed) > 1 else 0]
            outside = [int(key) for key in keys if key >= 0 and not mine[key]]
            if outside:
                raise InputError(
                    f"{where}: the key {outside[0]} of query {int(query)} is not among its candidates; add it, or "
                    "leave the pair out"
                )
        return Groups([(int(one),) for one in self.queries], self.queries, self.rows(), None, allowed)


@dataclass(frozen=True)
class Groups:
    """Rows of words (groups of tokens), or of tokens that compete among chosen keys.

    The weight on a group of keys is the sum over its tokens, from a group of queries the mean over its tokens (Clark et
    al. 2019, section 4.1).

    Attributes:
        queries: for each row the positions of its query tokens.
        places: (R,) for each row its place among the key groups, for the fixed-offset baseline and to leave a word out
            of its own candidates; -1 where it has none.
        targets: (R, S) indices of the key groups that count as hit, -1 where a row has fewer.
        groups: the key groups as positions; None: every position is one.
        candidates: (1 or R, number of groups) bool, the groups that compete; None: all of them.
        own: whether a word competes in its own row.
        labels: for each row a name that results are split by, or None.
        renormalised: whether weights are divided by the weight on all candidates.
    """

    queries: Sequence[tuple[int, ...]]
    places: Ints
    targets: Ints
    groups: Sequence[tuple[int, ...]] | None = None
    candidates: Bools | None = None
    own: bool = True
    labels: Sequence[str] | None = None
    renormalised: bool = True

    def __len__(self) -> int:
        return len(self.queries)


def pairs_of(given: Any, queries: int, keys: int, where: str) -> Pairs:
    """Checked pairs from what a user's rule gave; keys of one query are joined into one row.

    >>> found = pairs_of([(2, 0), (2, 1), (1, 0)], 3, 3, "here")
    >>> found.queries.tolist(), found.keys.tolist()
    ([1, 2], [[0, -1], [0, 1]])
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"{where}: a role gives (query, key) pairs, and gave {_said(given)}")
    rows: dict[int, list[int]] = {}
    for pair in given:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
            raise InputError(f"{where}: a role gives (query, key) pairs, and one of them is {_said(pair)}")
        query, key = (_whole(one, where) for one in pair)
        for name, value, limit in (("query", query, queries), ("key", key, keys)):
            if not 0 <= value < limit:
                raise InputError(
                    f"{where}: the pair ({query}, {key}) is out of range: {name} {value}, and the passage has "
                    f"positions 0 to {limit - 1}"
                )
        row = rows.setdefault(query, [])
        if key not in row:
            row.append(key)
    ordered = sorted(rows)
    return Pairs(np.array(ordered, np.int64), ragged([rows[query] for query in ordered]))


def ragged(rows: Sequence[Sequence[int]]) -> Ints:
    """Rows of unequal length as one array, filled with -1.

    >>> ragged([[4], [5, 6]]).tolist()
    [[4, -1], [5, 6]]
    """
    width = max((len(row) for row in rows), default=1)
    out = np.full((len(rows), max(width, 1)), -1, np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def _positions(given: Any, count: int, where: str) -> list[int]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"{where}: candidates are positions of keys, and {_said(given)} was given")
    found = [_whole(one, where) for one in given]
    for one in found:
        if not 0 <= one < count:
            raise InputError(f"{where}: candidate {one} is out of range; the passage has positions 0 to {count - 1}")
    return found


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool):
        raise InputError(f"{where}: positions are whole numbers, and {value!r} was given")
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{where}: positions are whole numbers, and {_said(value)} was given") from None


def _said(value: Any) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"

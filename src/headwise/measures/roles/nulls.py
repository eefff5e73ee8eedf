"""The shuffled-pairs null: each row gets the target of another row of its passage.

The other row is drawn (seeded by the run, the passage and the role, so that batches change nothing) among those whose
target differs and may be seen from this row. Where there is none, as for a role that names one key for the whole
passage, the target is a key drawn among all others that may be seen.
"""

from __future__ import annotations

import zlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwise.measures.roles.links import Bools, Groups, Ints, Pairs
from headwise.measures.roles.tokens import Tokens

__all__ = ["chance_of", "shuffled_groups", "shuffled_pairs"]

Floats: TypeAlias = NDArray[np.float64]
#: Rounds of drawing again where a draw is not allowed.
_ROUNDS = 8


def chance_of(seed: int, passage: int, name: str) -> np.random.Generator:
    """The generator of one passage and role."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, passage, zlib.crc32(name.encode())])))


def shuffled_pairs(pairs: Pairs, tokens: Tokens, chance: np.random.Generator) -> Ints:
    """For each row the keys of another row, (R, S); -1 where there is no other key."""
    rows = pairs.rows()
    keys = len(tokens if tokens.keys is None else tokens.keys)
    limit = pairs.queries if tokens.causal and tokens.keys is None else np.full(len(rows), keys - 1)
    if len(pairs.keys) == 1:
        return _other_keys(rows, limit, chance)

    def differs(drawn: Ints, which: Ints) -> Bools:
        return np.asarray((rows[drawn] != rows[which]).any(1))

    source = _permuted(rows.max(1), limit, differs, chance)
    return np.where((source >= 0)[:, None], rows[source], _other_keys(rows, limit, chance))


def shuffled_groups(
    groups: Groups, allowed: Bools, last: Ints, first: Ints, causal: bool, chance: np.random.Generator
) -> Ints:
    """For each row the target groups of another row, (R, S).

    Args:
        groups: the rows.
        allowed: (R, U) which groups compete in each row.
        last: (U,) the last position of each key group.
        first: (R,) the first query position of each row.
        causal: whether a row sees only groups that end at or before it.
        chance: the generator.
    """
    rows = groups.targets
    limit = first if causal else np.full(len(rows), last.max(initial=0))
    top = np.where(rows >= 0, last[rows], -1).max(1)
    if causal:
        allowed = allowed & (last[None] <= first[:, None])

    def fits(drawn: Ints, which: Ints) -> Bools:
        taken = rows[drawn]
        inside = allowed[which[:, None], taken.clip(0)] | (taken < 0)
        return np.asarray((taken != rows[which]).any(1) & inside.all(1))

    source = _permuted(top, limit, fits, chance)
    return np.where((source >= 0)[:, None], rows[source], _other_groups(rows, allowed, chance))


def _permuted(top: Ints, limit: Ints, fits: object, chance: np.random.Generator) -> Ints:
    """For each row another row whose keys end at or before ``limit`` and that fits; -1 where none was drawn."""
    order = np.argsort(top, kind="stable")
    count = np.searchsorted(top[order], limit, side="right")
    source = np.full(len(top), -1, np.int64)
    for _ in range(_ROUNDS):
        open_rows = np.flatnonzero((source < 0) & (count > 0))
        if not len(open_rows):
            break
        drawn = order[(chance.random(len(open_rows)) * count[open_rows]).astype(np.int64)]
        good = fits(drawn, open_rows)  # type: ignore[operator]
        source[open_rows[good]] = drawn[good]
    return source


def _other_keys(rows: Ints, limit: Ints, chance: np.random.Generator) -> Ints:
    """As many keys per row as it names, none of them its own, drawn from 0 to ``limit``; -1 where none was found."""
    out = np.full(rows.shape, -1, np.int64)
    for slot in range(rows.shape[1]):
        for _ in range(_ROUNDS):
            empty = np.flatnonzero((out[:, slot] < 0) & (rows[:, slot] >= 0))
            if not len(empty):
                break
            drawn = (chance.random(len(empty)) * (limit[empty] + 1)).astype(np.int64)
            used = (rows[empty] == drawn[:, None]).any(1) | (out[empty] == drawn[:, None]).any(1)
            out[empty[~used], slot] = drawn[~used]
    return out


def _other_groups(rows: Ints, allowed: Bools, chance: np.random.Generator) -> Ints:
    free = np.array(np.broadcast_to(allowed, (len(rows), allowed.shape[1])))
    at, slot = np.nonzero(rows >= 0)
    free[at, rows[at, slot]] = False
    rank = np.where(free, chance.random(free.shape), 2.0)
    order = np.argsort(rank, axis=1)[:, : rows.shape[1]]
    if order.shape[1] < rows.shape[1]:
        order = np.pad(order, ((0, 0), (0, rows.shape[1] - order.shape[1])))
    usable = (np.arange(rows.shape[1])[None] < free.sum(1)[:, None]) & (rows >= 0)
    return np.where(usable, order, -1)

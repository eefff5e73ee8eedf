"""What a role asks of one batch: pairs, the mass on a class of keys, or blocks of the pattern.

Three roads, by what the rule named:

* few keys per row, all visible keys competing: their weights come from the kernels' pairs, the largest weight from the
  rows' argmax (O(n));
* one large class of keys for the whole passage: attention with indicator columns as values (O(n));
* words, or chosen candidates: the pattern of a few rows at a time, summed over words (never n x n).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.measures.roles.links import Bools, Groups, Ints, Pairs
from headwise.measures.roles.nulls import chance_of, shuffled_groups, shuffled_pairs
from headwise.measures.roles.reading import Passage
from headwise.measures.roles.role import Role, found_by
from headwise.measures.roles.tally import Baseline

__all__ = ["ClassPlan", "GroupPlan", "GroupRows", "PairPlan", "Plan", "plan_of"]

#: Keys per row up to which pairs are asked for one by one.
MOST_PAIRS: Final = 8


@dataclass(frozen=True)
class PairPlan:
    """Pairs: keys and shuffled keys (S, B, Q) in the positions of the call, -1 for none; offsets (S, B, Q) and whether
    a key is the passage's first (B, Q) for the baseline, whose counts are known once made."""

    role: Role
    keys: Tensor
    null: Tensor
    offsets: Tensor
    first: Tensor
    known: dict[bytes, tuple[Counter[Baseline], int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ClassPlan:
    """A class of keys: members and as many other keys (B, K); rows that it is about (B, Q); the fixed
    offsets, counted once."""

    role: Role
    members: Tensor
    others: Tensor
    rows: Tensor
    passages: Sequence[Passage]
    known: dict[tuple[bytes, bool], Counter[Baseline]] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupRows:
    """The rows of one passage, as tensors.

    Attributes:
        first, last: (R,) first and last query position of each row, in the call.
        members: (M, 2) of row and query position, for each query token of each row.
        share: (M,) one over the number of query tokens of the row.
        unit: (K of the call,) the key group of each key position, -1 for none.
        units: number of key groups.
        targets, null: (R, S) key groups, -1 for none.
        candidates: (1 or R, U) bool or None.
        own: (R,) the group that does not compete in its own row, -1 for none.
        places: (R,) the row's place among the key groups, -1 for none.
        labels: (R,) for each row an index into the names of the plan.
        renormalised: whether weights are divided by that on all candidates.
        fixed_first: whether always looking at the first key is a baseline (in cross-attention every fixed key is).
    """

    first: Ints
    last: Ints
    members: Ints
    share: NDArray[np.float64]
    unit: Tensor
    units: int
    targets: Ints
    null: Ints
    candidates: Bools | None
    own: Ints
    places: Ints
    labels: Ints
    renormalised: bool
    fixed_first: bool


@dataclass(frozen=True)
class GroupPlan:
    """Words or chosen candidates: the rows of each passage of the batch, and the names of the parts of the role.

    The first name is "", for all parts together.
    """

    role: Role
    rows: Sequence[GroupRows | None]
    names: tuple[str, ...] = ("",)
    known: dict[bytes, list[Counter[Baseline]]] = field(default_factory=dict)


Plan: TypeAlias = PairPlan | ClassPlan | GroupPlan


def plan_of(
    role: Role, passages: Sequence[Passage], shape: tuple[int, int], seed: int, device: torch.device
) -> Plan | None:
    """What ``role`` asks of a batch; None where it names nothing in it.

    Args:
        role: the role.
        passages: the passages of the batch.
        shape: query and key positions of the call.
        seed: of the shuffled pairs.
        device: where tensors go.
    """
    found = [_of_tokens(found_by(role, passage.tokens), passage) for passage in passages]
    if all(one is None for one in found):
        return None
    if any(isinstance(one, Groups) for one in found):
        listed = [_as_groups(one) for one in found]
        return _group_plan(role, listed, passages, shape[1], seed)
    pairs = [one if isinstance(one, Pairs) else None for one in found]
    width = max(one.keys.shape[1] for one in pairs if one is not None)
    if width <= MOST_PAIRS:
        return _pair_plan(role, pairs, passages, shape, width, seed, device)
    if all(one is None or len(one.keys) == 1 for one in pairs):
        return _class_plan(role, pairs, passages, shape, seed, device)
    return _group_plan(role, [_as_groups(one) for one in pairs], passages, shape[1], seed)


def _of_tokens(found: Pairs | Groups | None, passage: Passage) -> Pairs | Groups | None:
    """Without the rows of special tokens."""
    special = np.array(passage.tokens.special, np.bool_)
    if found is None or not special.any():
        return found
    if isinstance(found, Pairs):
        kept = ~special[found.queries]
        if not kept.any():
            return None
        return Pairs(found.queries[kept], found.keys if len(found.keys) == 1 and len(kept) > 1 else found.rows()[kept])
    keep = [row for row, query in enumerate(found.queries) if not all(special[at] for at in query)]
    if len(keep) == len(found):
        return found
    if not keep:
        return None
    at = np.array(keep, np.int64)
    return Groups(
        [found.queries[row] for row in keep],
        found.places[at],
        found.targets[at],
        found.groups,
        found.candidates if found.candidates is None or len(found.candidates) == 1 else found.candidates[at],
        found.own,
        None if found.labels is None else [found.labels[row] for row in keep],
        found.renormalised,
    )


def _as_groups(found: Pairs | Groups | None) -> Groups | None:
    if found is None or isinstance(found, Groups):
        return found
    return Groups([(int(one),) for one in found.queries], found.queries, found.rows(), renormalised=False)


def _pair_plan(
    role: Role,
    pairs: Sequence[Pairs | None],
    passages: Sequence[Passage],
    shape: tuple[int, int],
    width: int,
    seed: int,
    device: torch.device,
) -> PairPlan:
    keys, null, offsets = (np.full((width, len(passages), shape[0]), -1, np.int64) for _ in range(3))
    first = np.zeros((len(passages), shape[0]), np.bool_)
    for row, (one, passage) in enumerate(zip(pairs, passages, strict=True)):
        if one is None:
            continue
        at = passage.queries[one.queries]
        drawn = shuffled_pairs(one, passage.tokens, chance_of(seed, passage.tokens.passage, role.name))
        for into, named in ((keys, one.rows()), (null, drawn)):
            into[: named.shape[1], row, at] = np.where(named >= 0, passage.keys[named.clip(0)], -1).T
        place = np.zeros(len(one), np.int64) if passage.tokens.keys is not None else one.queries
        offsets[: one.keys.shape[1], row, at] = (one.rows() - place[:, None]).T
        first[row, at] = (one.rows() == 0).any(1) & (passage.tokens.keys is None)
    on_device = [torch.from_numpy(part).to(device) for part in (keys, null, offsets, first)]
    return PairPlan(role, on_device[0], on_device[1], on_device[2], on_device[3])


def _class_plan(
    role: Role,
    pairs: Sequence[Pairs | None],
    passages: Sequence[Passage],
    shape: tuple[int, int],
    seed: int,
    device: torch.device,
) -> ClassPlan:
    members, others = (np.zeros((len(passages), shape[1]), np.bool_) for _ in range(2))
    rows = np.zeros((len(passages), shape[0]), np.bool_)
    for row, (one, passage) in enumerate(zip(pairs, passages, strict=True)):
        if one is None:
            continue
        named = one.keys[0][one.keys[0] >= 0]
        free = np.setdiff1d(np.arange(len(passage.keys)), named)
        chance = chance_of(seed, passage.tokens.passage, role.name)
        drawn = chance.permutation(free)[: len(named)]
        members[row, passage.keys[named]] = True
        others[row, passage.keys[drawn]] = True
        rows[row, passage.queries[one.queries]] = True
    on_device = [torch.from_numpy(part).to(device) for part in (members, others, rows)]
    return ClassPlan(role, on_device[0], on_device[1], on_device[2], passages)


def _group_plan(
    role: Role, listed: Sequence[Groups | None], passages: Sequence[Passage], keys: int, seed: int
) -> GroupPlan:
    names = tuple(dict.fromkeys(["", *(name for one in listed if one is not None for name in one.labels or ())]))
    place = {name: at for at, name in enumerate(names)}
    rows = [
        None if one is None else _rows(role, one, passage, keys, seed, place)
        for one, passage in zip(listed, passages, strict=True)
    ]
    return GroupPlan(role, rows, names)


def _rows(
    role: Role, groups: Groups, passage: Passage, keys: int, seed: int, place: Mapping[str, int]
) -> GroupRows | None:
    if not len(groups):
        return None
    unit, last, count = _units(groups, passage, keys)
    lengths = np.array([len(query) for query in groups.queries], np.int64)
    row_of = np.repeat(np.arange(len(groups)), lengths)
    flat = passage.queries[np.concatenate([np.array(query, np.int64) for query in groups.queries])]
    first = np.array([min(query) for query in groups.queries], np.int64)
    cross = passage.tokens.keys is not None
    own = np.full(len(groups), -1, np.int64) if groups.own else groups.places
    allowed = (
        np.ones((len(groups), count), np.bool_)
        if groups.candidates is None
        else np.array(np.broadcast_to(groups.candidates, (len(groups), count)))
    )
    at = np.flatnonzero(own >= 0)
    allowed[at, own[at]] = False
    chance = chance_of(seed, passage.tokens.passage, role.name)
    labels = np.array([place[one] for one in groups.labels or [""] * len(groups)], np.int64)
    return GroupRows(
        first=np.minimum.reduceat(flat, np.concatenate([[0], np.cumsum(lengths)[:-1]])),
        last=np.maximum.reduceat(flat, np.concatenate([[0], np.cumsum(lengths)[:-1]])),
        members=np.stack([row_of, flat], axis=1),
        share=1.0 / lengths[row_of],
        unit=torch.from_numpy(unit),
        units=count,
        targets=groups.targets,
        null=shuffled_groups(groups, allowed, last, first, passage.tokens.causal and not cross, chance),
        candidates=groups.candidates,
        own=own,
        places=np.zeros(len(groups), np.int64) if cross else groups.places,
        labels=labels,
        renormalised=groups.renormalised,
        fixed_first=not cross,
    )


def _units(groups: Groups, passage: Passage, keys: int) -> tuple[Ints, Ints, int]:
    """The key group of each key of the call, the last passage position of each group, and their number."""
    unit = np.full(keys, -1, np.int64)
    if groups.groups is None:
        unit[passage.keys] = np.arange(len(passage.keys))
        return unit, np.arange(len(passage.keys)), len(passage.keys)
    last = np.array([max(one) for one in groups.groups], np.int64)
    for index, positions in enumerate(groups.groups):
        unit[passage.keys[list(positions)]] = index
    return unit, last, len(groups.groups)

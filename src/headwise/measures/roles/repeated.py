"""Repeated random tokens: where only induction can know what comes next (Olsson et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwise.errors import InputError
from headwise.measures.roles.given import given_pairs
from headwise.measures.roles.role import Role

__all__ = ["INDUCTION_REPEATED", "repeated_tokens"]

INDUCTION_REPEATED = "induction_repeated"
_OLSSON = "Olsson et al. 2022, In-context Learning and Induction Heads"


def repeated_tokens(
    ids: Sequence[int], *, before: Sequence[int] = (), passages: int = 16, longest: int = 48, seed: int = 0
) -> tuple[list[dict[str, list[int]]], Role]:
    """Passages that hold a block of random tokens twice, and the role of induction on them.

    In the second copy, each token's key is the one after its first copy. No token occurs twice within a block, and the
    blocks have different lengths, so that no fixed offset finds more than a share of the keys.

    Args:
        ids: the ids to draw from.
        before: ids that begin every passage (``<s>``).
        passages: how many.
        longest: tokens of the longest block; the shortest has half as many.
        seed: of the draw.

    Returns:
        Inputs for :func:`headwise.roles`, and the role.

    Raises:
        InputError: fewer ids than a block has tokens.

    >>> inputs, role = repeated_tokens(range(10, 99), passages=2, longest=4)
    >>> [len(one["input_ids"]) for one in inputs]
    [4, 8]
    """
    if len(ids) < longest:
        raise InputError(f"blocks of {longest} different random tokens need as many ids, and {len(ids)} were given")
    chance = np.random.Generator(np.random.Philox(seed))
    inputs, pairs = [], []
    for index in range(passages):
        length = longest // 2 + (longest - longest // 2) * index // max(1, passages - 1)
        block = [int(ids[at]) for at in chance.choice(len(ids), length, replace=False)]
        start = len(before)
        inputs.append({"input_ids": [*before, *block, *block]})
        pairs.append([(start + length + at, start + at + 1) for at in range(length - 1)])
    role = given_pairs(
        INDUCTION_REPEATED,
        pairs,
        description="Induction on repeated random tokens: the token after the first copy",
        hidden="error",
    )
    return inputs, Role(**{**vars(role), "source": _OLSSON})

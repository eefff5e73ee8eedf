"""Roles of the tokens themselves: separators, punctuation, repeats, the rarest token."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headwise.errors import UnsupportedError
from headwise.measures.roles.links import Pairs
from headwise.measures.roles.role import Role
from headwise.measures.roles.tokens import Tokens

__all__ = ["LEXICAL", "duplicate", "induction", "is_punctuation"]

_CLARK: Final = "Clark et al. 2019, What Does BERT Look At?, section 3.2"
_WANG: Final = "Wang et al. 2023, Interpretability in the Wild, section 3"
_OLSSON: Final = "Olsson et al. 2022, In-context Learning and Induction Heads"
_VOITA: Final = "Voita et al. 2019, Analyzing Multi-Head Self-Attention, section 5.1"


@dataclass(frozen=True)
class _Class:
    """Every row names all tokens of a class."""

    chosen: Callable[[Tokens], list[int]]

    def __call__(self, tokens: Tokens) -> Pairs:
        keys = self.chosen(tokens)
        rows = np.arange(len(tokens) if keys else 0)
        return Pairs(rows, np.array(keys, np.int64).reshape(1, -1))


def _separators(tokens: Tokens) -> list[int]:
    if tokens.ids is None:
        raise UnsupportedError("positions are no tokens, so there are no separators")
    marks = tokens.lexicon.separators
    return [at for at, one in enumerate(tokens.ids) if one in marks]


def _punctuation(tokens: Tokens) -> list[int]:
    special = tokens.lexicon.special
    return [
        at
        for at, (one, piece, added) in enumerate(zip(tokens.ids or (), tokens.pieces, tokens.special, strict=True))
        if not added and one not in special and is_punctuation(piece)
    ]


def is_punctuation(piece: str) -> bool:
    """Whether a token is nothing but punctuation (Unicode categories P).

    >>> is_punctuation("),"), is_punctuation("a."), is_punctuation("")
    (True, False, False)
    """
    return bool(piece) and all(unicodedata.category(one).startswith("P") for one in piece)


@dataclass(frozen=True)
class _Rarest:
    """The tokens whose id occurs least often in the data, where at most ``most`` share that place.

    Special tokens are left out, and so is the token that begins the passage: without a space before it, byte-level
    tokenizers give it an id that is rare, and it is where heads without anything to do look.
    """

    most: int

    def __call__(self, tokens: Tokens) -> Pairs:
        if tokens.ids is None:
            raise UnsupportedError("positions are no tokens, so none is the rarest")
        counts, special = tokens.counts or {}, tokens.lexicon.special
        real = [at for at, one in enumerate(tokens.ids) if not tokens.special[at] and one not in special][1:]
        least = min((counts.get(tokens.ids[at], 0) for at in real), default=0)
        keys = [at for at in real if counts.get(tokens.ids[at], 0) == least]
        rows = np.arange(len(tokens) if 0 < len(keys) <= self.most else 0)
        return Pairs(rows, np.array(keys[: self.most], np.int64).reshape(1, -1))


@dataclass(frozen=True)
class _Repeat:
    """The ``most`` latest earlier occurrences of the query's token, each moved on by ``step``."""

    step: int
    most: int

    def __call__(self, tokens: Tokens) -> Pairs:
        if tokens.ids is None:
            raise UnsupportedError("positions are no tokens, so none occurs twice")
        ids = np.array(tokens.ids, np.int64)
        keys = np.full((len(ids), self.most), -1, np.int64)
        earlier = found = _earlier(ids)
        for slot in range(self.most):
            keys[:, slot] = np.where(found >= 0, found + self.step, -1)
            found = np.where(found >= 0, earlier[found.clip(0)], -1)
        # What follows the token just before is the query itself: no induction.
        at = np.arange(len(ids))
        keys = np.where(keys < at[:, None], keys, -1)
        rows = np.flatnonzero((keys >= 0).any(1))
        return Pairs(rows, keys[rows])


def _earlier(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each position the latest earlier one with the same id, or -1.

    >>> _earlier(np.array([5, 6, 5, 5])).tolist()
    [-1, -1, 0, 2]
    """
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    out = np.full(len(ids), -1, np.int64)
    out[order[1:][same]] = order[:-1][same]
    return out


def duplicate(most: int = 4) -> Role:
    """The ``most`` latest earlier occurrences of the query's own token."""
    said = f"An earlier occurrence of the same token (the {most} latest)"
    return Role("duplicate", _Repeat(0, most), description=said, source=_WANG, hidden="skip")


def induction(most: int = 4) -> Role:
    """The tokens that followed the ``most`` latest earlier occurrences of the query's token."""
    said = f"The token after an earlier occurrence of the same token (the {most} latest)"
    return Role("induction", _Repeat(1, most), description=said, source=_OLSSON, hidden="skip")


LEXICAL: Final[tuple[Role, ...]] = (
    Role("separator", _Class(_separators), description="Separators: [SEP], </s>", source=_CLARK, hidden="skip"),
    Role("punctuation", _Class(_punctuation), description="Punctuation", source=_CLARK, hidden="skip"),
    duplicate(),
    induction(),
    Role(
        "rarest",
        _Rarest(3),
        description="The rarest token of the passage, by frequency in the data (at most 3 that are equally rare)",
        source=_VOITA,
        hidden="skip",
        needs_counts=True,
    ),
)

"""Roles of position: the token before, the token after, the token itself, the first of the passage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from headwise.measures.roles.links import Pairs
from headwise.measures.roles.role import Role
from headwise.measures.roles.tally import FIRST_KEY
from headwise.measures.roles.tokens import Tokens

__all__ = ["POSITIONAL", "at_offset"]

_CLARK: Final = "Clark et al. 2019, What Does BERT Look At?, section 3.1"
_XIAO: Final = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, section 3"


@dataclass(frozen=True)
class _Offset:
    by: int

    def __call__(self, tokens: Tokens) -> Pairs:
        at = np.arange(max(0, -self.by), min(len(tokens), len(tokens) - self.by))
        return Pairs.of(at, at + self.by)


@dataclass(frozen=True)
class _First:
    def __call__(self, tokens: Tokens) -> Pairs:
        return Pairs(np.arange(1, len(tokens)), np.zeros((1, 1), np.int64))


def at_offset(by: int, name: str | None = None) -> Role:
    """The token ``by`` positions after the query (before it where negative).

    >>> at_offset(-2).name
    'offset_-2'
    """
    named = {-1: "previous", 0: "own", 1: "next"}.get(by, f"offset_{by}")
    said = {-1: "the token before", 0: "the token itself", 1: "the token after"}.get(by, f"the token at offset {by}")
    return Role(name or named, _Offset(by), description=said.capitalize(), source=_CLARK, baseline=by, hidden="skip")


POSITIONAL: Final[tuple[Role, ...]] = (
    at_offset(-1),
    at_offset(1),
    at_offset(0),
    Role(
        "first",
        _First(),
        description="The first token of the passage (sink)",
        source=_XIAO,
        hidden="skip",
        baseline=FIRST_KEY,
    ),
)

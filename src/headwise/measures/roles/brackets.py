"""The partner of a bracket or of a quotation mark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from headwise.measures.roles.links import Pairs, ragged
from headwise.measures.roles.role import Role
from headwise.measures.roles.tokens import Tokens

__all__ = ["PARTNERS", "partners"]

_BRACKETS: Final = {")": "(", "]": "[", "}": "{", "⟩": "⟨", "）": "（", "】": "【", "」": "「", "』": "『"}
_QUOTES: Final = {"”": "“", "»": "«", "’": "‘"}
#: Marks that open and close alike; ' is left out, being mostly an apostrophe.
_STRAIGHT: Final = ('"',)


def _marks(tokens: Tokens) -> Iterator[tuple[int, str]]:
    """(position, character) of every mark in the passage, in order; apostrophes inside words are none."""
    special = tokens.lexicon.special
    for at, piece in enumerate(tokens.pieces):
        if tokens.special[at] or (tokens.ids is not None and tokens.ids[at] in special):
            continue
        for place, character in enumerate(piece):
            if character == "’" and place + 1 < len(piece) and piece[place + 1].isalpha():
                continue
            yield at, character


def partners(tokens: Tokens, *, quotes: bool) -> list[tuple[int, int]]:
    """(opening, closing) positions of brackets, or of quotation marks, properly nested ones only."""
    closing = _QUOTES if quotes else _BRACKETS
    opening = set(closing.values())
    stack: list[tuple[int, str]] = []
    found: list[tuple[int, int]] = []
    for at, mark in _marks(tokens):
        if quotes and mark in _STRAIGHT:
            if stack and stack[-1][1] == mark:
                found.append((stack.pop()[0], at))
            else:
                stack.append((at, mark))
        elif mark in opening:
            stack.append((at, mark))
        elif mark in closing:
            # A closing mark without its opening one closes nothing; one inside that was never closed is given up.
            match = next((depth for depth in range(len(stack) - 1, -1, -1) if stack[depth][1] == closing[mark]), None)
            if match is not None:
                found.append((stack[match][0], at))
                del stack[match:]
    return [(a, b) for a, b in found if a != b]


def _both_ways(found: list[tuple[int, int]]) -> Pairs:
    rows: dict[int, list[int]] = {}
    for a, b in found:
        rows.setdefault(b, []).append(a)
        rows.setdefault(a, []).append(b)
    ordered = sorted(rows)
    return Pairs(np.array(ordered, np.int64), ragged([rows[one] for one in ordered]))


def _of_brackets(tokens: Tokens) -> Pairs:
    return _both_ways(partners(tokens, quotes=False))


def _of_quotes(tokens: Tokens) -> Pairs:
    return _both_ways(partners(tokens, quotes=True))


PARTNERS: Final[tuple[Role, ...]] = (
    Role("bracket", _of_brackets, description="The partner of a bracket", hidden="skip"),
    Role("quote", _of_quotes, description="The partner of a quotation mark", hidden="skip"),
)

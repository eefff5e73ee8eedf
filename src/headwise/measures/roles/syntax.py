"""Roles of grammar: the syntactic head, its dependents, each relation, coreference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from headwise.errors import DataError
from headwise.measures.roles.links import Groups, ragged
from headwise.measures.roles.parse import Parse, pieces_of
from headwise.measures.roles.role import Role
from headwise.measures.roles.tokens import Tokens

__all__ = ["Parses", "coreference_role", "syntax_roles"]

#: Gives the parse of a passage: a list of parses in the order of the passages, or a function of the tokens.
Parses: TypeAlias = Sequence[Parse] | Callable[[Tokens], Parse]

_CLARK: Final = "Clark et al. 2019, What Does BERT Look At?, section 4.2"
_COREFERENCE: Final = "Clark et al. 2019, What Does BERT Look At?, section 4.3"


def _parse_of(parses: Parses, tokens: Tokens) -> Parse:
    if not isinstance(parses, Sequence):
        return parses(tokens)
    if tokens.passage >= len(parses):
        raise DataError(
            f"{tokens.where}: there are parses of {len(parses)} passages, and this is passage {tokens.passage} "
            "(counted from 0); give a parse for each"
        )
    return parses[tokens.passage]


@dataclass(frozen=True)
class _Words:
    """The words of a passage that have tokens, numbered anew: word units of a :class:`Groups`."""

    units: list[tuple[int, ...]]
    number: dict[int, int]

    @staticmethod
    def of(parse: Parse, tokens: Tokens) -> _Words:
        pieces = pieces_of(parse, tokens)
        kept = [word for word, positions in enumerate(pieces) if positions]
        return _Words([pieces[word] for word in kept], {word: at for at, word in enumerate(kept)})

    def groups(self, rows: Sequence[tuple[int, Sequence[int]]], labels: Sequence[str] | None) -> Groups:
        """Rows of a query word and its target words, all other words of the passage competing."""
        return Groups(
            queries=[self.units[query] for query, _ in rows],
            places=np.array([query for query, _ in rows], np.int64),
            targets=ragged([list(targets) for _, targets in rows]),
            groups=self.units,
            own=False,
            labels=labels,
        )


@dataclass(frozen=True)
class _Heads:
    """From a word to its syntactic head, or (``reverse``) from a word to its dependents, by relation."""

    parses: Parses
    reverse: bool
    subtypes: bool

    def __call__(self, tokens: Tokens) -> Groups:
        parse = _parse_of(self.parses, tokens)
        words = _Words.of(parse, tokens)
        found: dict[tuple[int, str], list[int]] = {}
        for word, (head, relation) in enumerate(zip(parse.heads, parse.relations, strict=True)):
            if head < 0 or word not in words.number or head not in words.number:
                continue
            name = relation if self.subtypes else relation.partition(":")[0]
            query, target = (head, word) if self.reverse else (word, head)
            found.setdefault((words.number[query], name), []).append(words.number[target])
        rows = [(query, targets) for (query, _), targets in found.items()]
        return words.groups(rows, [name for _, name in found])


@dataclass(frozen=True)
class _Antecedents:
    """From the head word of a mention to the head words of earlier mentions of the same entity."""

    parses: Parses

    def __call__(self, tokens: Tokens) -> Groups:
        parse = _parse_of(self.parses, tokens)
        words = _Words.of(parse, tokens)
        earlier: dict[str, list[int]] = {}
        rows: dict[int, set[int]] = {}
        for mention in sorted(parse.mentions, key=lambda one: (one.start, -one.stop)):
            mine = words.number.get(mention.head)
            if mine is None:
                continue
            known = earlier.setdefault(mention.entity, [])
            rows.setdefault(mine, set()).update(one for one in known if one != mine)
            known.append(mine)
        return words.groups([(query, sorted(targets)) for query, targets in rows.items() if targets], None)


def syntax_roles(parses: Parses, *, subtypes: bool = False) -> tuple[Role, ...]:
    """``"head"`` (dependent to head) and ``"dependent"`` (head to dependents), each also by relation.

    Words compete with all other words of the passage; special tokens and the word itself do not (Clark et al.).

    Args:
        parses: parses in the order of the passages, or a function from tokens to the passage's parse.
        subtypes: keep ``nmod:poss`` apart from ``nmod``.
    """
    return (
        Role(
            "head",
            _Heads(parses, False, subtypes),
            description="From a word to its syntactic head",
            source=_CLARK,
            hidden="skip",
        ),
        Role(
            "dependent",
            _Heads(parses, True, subtypes),
            description="From a word to its dependents of one relation",
            source=_CLARK,
            hidden="skip",
        ),
    )


def coreference_role(parses: Parses) -> Role:
    """``"coreference"``: from the head word of a mention to the head words of its antecedents."""
    return Role(
        "coreference",
        _Antecedents(parses),
        description="From a mention to its antecedents (head words)",
        source=_COREFERENCE,
        hidden="skip",
    )

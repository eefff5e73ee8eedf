"""A parsed passage: words, their heads and relations, mentions; and the words found among the model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import DataError
from headwise.measures.roles.tokens import Span, Tokens

__all__ = ["Mention", "Parse", "pieces_of"]


@dataclass(frozen=True)
class Mention:
    """One mention of an entity: the entity's name, its words ``[start, stop)`` and its head word."""

    entity: str
    start: int
    stop: int
    head: int


@dataclass(frozen=True)
class Parse:
    """The words of a passage and what is known of them.

    Attributes:
        text: the passage.
        words: for each word its characters in ``text``; None for a word without characters of its own.
        heads: for each word the index of its syntactic head; -1 for a root.
        relations: for each word the name of its relation to its head.
        mentions: mentions of entities, where the source has them.
        where: where it stands, for messages.

    Raises:
        DataError: lists of unequal length, or a head that is no word.
    """

    text: str
    words: Sequence[Span | None]
    heads: Sequence[int]
    relations: Sequence[str]
    mentions: Sequence[Mention] = ()
    where: str = ""

    def __post_init__(self) -> None:
        if not len(self.words) == len(self.heads) == len(self.relations):
            raise DataError(
                f"{self.where}: {len(self.words)} words, {len(self.heads)} heads and {len(self.relations)} relations; "
                "there must be as many of each"
            )
        for word, head in enumerate(self.heads):
            if not -1 <= head < len(self.words) or head == word:
                raise DataError(
                    f"{self.where}: word {word} has the head {head}, which is no other word and not -1 (root)"
                )


def pieces_of(parse: Parse, tokens: Tokens) -> list[tuple[int, ...]]:
    """For each word the positions of its tokens; empty where it has none (cut off, or without characters).

    A token that reaches over several words belongs to the one in which it begins.

    Raises:
        DataError: the parse is of another text.
    """
    if tokens.text is not None and tokens.text != parse.text:
        raise DataError(_mismatch(parse, tokens))
    owner = _owners(parse)
    pieces: list[list[int]] = [[] for _ in parse.words]
    for at, span in enumerate(tokens.spans):
        if span is None or span[0] == span[1]:
            continue
        word = owner.get(span[0])
        if word is not None:
            pieces[word].append(at)
    return [tuple(one) for one in pieces]


def _owners(parse: Parse) -> dict[int, int]:
    """For each character the word that it is of; the first one where several share it."""
    owner: dict[int, int] = {}
    for word, span in enumerate(parse.words):
        for character in range(*span) if span is not None else ():
            owner.setdefault(character, word)
    return owner


def _mismatch(parse: Parse, tokens: Tokens) -> str:
    text = tokens.text or ""
    at = next(
        (i for i, (a, b) in enumerate(zip(text, parse.text, strict=False)) if a != b), min(len(text), len(parse.text))
    )
    mine, theirs = text[at : at + 30], parse.text[at : at + 30]
    return (
        f"{tokens.where} does not match {parse.where or 'its parse'}: they differ at character {at}, where the text "
        f"has {mine!r} and the parse {theirs!r}; give the text that was parsed, in the same order"
    )

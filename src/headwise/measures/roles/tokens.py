"""A passage as a role sees it: token ids, what they spell, where they stand in the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from headwise.errors import DataError, UnsupportedError

__all__ = ["Lexicon", "Span", "Tokens"]

#: Characters ``[start, stop)`` of the text.
Span = tuple[int, int]

_CONTINUES: Final = "##"


class Lexicon:
    """What a tokenizer knows of its ids, asked once per id.

    Args:
        tokenizer: a transformers tokenizer, a ``tokenizers.Tokenizer``, a plain function, or None.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._rust = tokenizer is not None and hasattr(tokenizer, "id_to_token")
        self._decodes = tokenizer is not None and hasattr(tokenizer, "decode")

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, of the tokenizer's own list and of tokens that were added as special ones."""
        found = set(getattr(self.tokenizer, "all_special_ids", None) or ())
        added = getattr(self.tokenizer, "added_tokens_decoder", None)
        if self._rust and hasattr(self.tokenizer, "get_added_tokens_decoder"):
            added = self.tokenizer.get_added_tokens_decoder()  # type: ignore[union-attr]
        for index, token in (added or {}).items():
            if getattr(token, "special", False):
                found.add(int(index))
        return frozenset(int(one) for one in found)

    @cached_property
    def separators(self) -> frozenset[int]:
        """Ids of the tokens that end or part passages: ``[SEP]``, ``</s>``."""
        named = (getattr(self.tokenizer, name, None) for name in ("sep_token_id", "eos_token_id"))
        return frozenset(one for one in named if isinstance(one, int))

    def piece(self, index: int) -> str:
        """What one id spells, without white space around it and without a mark of continuation.

        Raises:
            UnsupportedError: the tokenizer cannot turn ids into text.
        """
        known = self._pieces.get(index)
        if known is None:
            if not self._decodes:
                kind = "no tokenizer" if self.tokenizer is None else f"a {type(self.tokenizer).__name__}"
                raise UnsupportedError(
                    f"what a token spells is not known: the model has {kind}, which cannot turn ids into text; give a "
                    "tokenizer with decode(), or roles that go by ids and positions"
                )
            known = self._pieces[index] = self._decoded(index)
        return known

    def _decoded(self, index: int) -> str:
        assert self.tokenizer is not None
        if self._rust:
            text = self.tokenizer.decode([index], skip_special_tokens=False)
        else:
            text = self.tokenizer.decode([index])
        text = str(text).strip()
        return text.removeprefix(_CONTINUES) if len(text) > len(_CONTINUES) else text

    def spans(self, text: str, ids: Sequence[int], special: Sequence[bool], where: str) -> tuple[Span | None, ...]:
        """For each token of a passage the characters of ``text`` that it covers; None for special tokens.

        Raises:
            DataError: the tokens are not those of the text.
            UnsupportedError: the tokenizer does not say where its tokens stand.
        """
        encoded, offsets, marks = self._located(text)
        inner = [(one, (a, b)) for one, (a, b), mark in zip(encoded, offsets, marks, strict=True) if not mark]
        mine = [one for one, mark in zip(ids, special, strict=True) if not mark]
        start = 0
        if getattr(self.tokenizer, "truncation_side", "right") == "left":
            start = max(0, len(inner) - len(mine))
        part = inner[start : start + len(mine)]
        if [one for one, _ in part] != mine:
            raise DataError(
                f"{where}: its tokens are not those that the tokenizer gives for its text, so words cannot be found in "
                "it; give the text itself, or roles that go by ids and positions"
            )
        found = iter(_without_space(text, span) for _, span in part)
        return tuple(None if mark else next(found) for mark in special)

    def _located(self, text: str) -> tuple[Sequence[int], Sequence[Span], Sequence[int]]:
        if self._rust and self.tokenizer is not None:
            encoding = self.tokenizer.encode(text)
            return encoding.ids, encoding.offsets, encoding.special_tokens_mask
        if not getattr(self.tokenizer, "is_fast", False):
            kind = "no tokenizer" if self.tokenizer is None else f"a {type(self.tokenizer).__name__}"
            raise UnsupportedError(
                f"roles of words need a tokenizer that says where its tokens stand in the text, and the model has "
                f"{kind}; give one with offset mappings (a fast one)"
            )
        assert self.tokenizer is not None
        found = self.tokenizer(
            text, return_offsets_mapping=True, return_special_tokens_mask=True, truncation=False, verbose=False
        )
        return found["input_ids"], found["offset_mapping"], found["special_tokens_mask"]


def _without_space(text: str, span: Span) -> Span:
    """The span without white space at its ends (byte-level tokens take the space before a word)."""
    start, stop = span
    while start < stop and text[start].isspace():
        start += 1
    while stop > start and text[stop - 1].isspace():
        stop -= 1
    return start, stop


@dataclass(frozen=True)
class Tokens:
    """The tokens of one passage, padding left out; positions in pairs count from 0 here, special tokens included.

    Attributes:
        ids: the token ids; None where positions are no tokens (images, audio).
        count: how many positions there are.
        special: for each position whether the tokenizer added it ([CLS], <s>, ...).
        passage: index of the passage in the source.
        where: where the passage stands, for messages.
        text: the text that the tokens were made from, or None.
        lexicon: what the tokenizer knows of the ids.
        causal: whether a query sees only itself and what stands before it.
        counts: how often each id occurs in the data, where a role asked for it.
        keys: for cross-attention the passage that the keys are of; None for self-attention.

    >>> tokens = Tokens(ids=(7, 3, 7), count=3, special=(False, False, False), passage=0)
    >>> len(tokens), tokens.ids
    (3, (7, 3, 7))
    """

    ids: tuple[int, ...] | None
    count: int
    special: tuple[bool, ...]
    passage: int
    where: str = ""
    text: str | None = None
    lexicon: Lexicon = field(default_factory=lambda: Lexicon(None))
    causal: bool = False
    counts: Mapping[int, int] | None = None
    keys: Tokens | None = None

    def __len__(self) -> int:
        return self.count

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """What each token spells, without white space around it.

        Raises:
            UnsupportedError: there are no tokens, or the tokenizer cannot turn ids into text.
        """
        if self.ids is None:
            raise UnsupportedError(f"{self.where}: the positions of this input are no tokens, so they spell nothing")
        return tuple(self.lexicon.piece(one) for one in self.ids)

    @cached_property
    def spans(self) -> tuple[Span | None, ...]:
        """The characters of ``text`` that each token covers, white space left out; None for special tokens.

        Raises:
            DataError: the text of the passage is not known, or the tokens are not its own.
            UnsupportedError: the tokenizer does not say where its tokens stand.
        """
        if self.ids is None or self.text is None:
            raise DataError(
                f"{self.where}: roles of words need the passage's text, and only its tokens are known; give texts (not "
                "ready inputs, not windows of a longer text)"
            )
        return self.lexicon.spans(self.text, self.ids, self.special, self.where)

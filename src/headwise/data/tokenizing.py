"""From text to token ids: any tokenizer, known by how it is called and not by what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import InputError

__all__ = ["Encoded", "Encoder"]


@dataclass(frozen=True)
class Encoded:
    """Token ids of one passage; ``special`` marks the tokens that the tokenizer added (1) beside those of the text (0).

    ``types`` are token type ids where the tokenizer gives them; ``cut`` counts the tokens that truncation took away.
    """

    ids: tuple[int, ...]
    special: tuple[int, ...]
    types: tuple[int, ...] | None = None
    cut: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the text, special ones not counted."""
        return len(self.ids) - sum(self.special)


class Encoder:
    """Calls a tokenizer without changing it.

    Accepts the tokenizers of transformers, a ``tokenizers.Tokenizer``, and any function that takes a string and gives
    a list of ids (or a mapping with ``"input_ids"``); of a plain function every id counts as a token of the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._transformers = hasattr(tokenizer, "model_input_names") and callable(tokenizer)
        self._rust = not callable(tokenizer) and hasattr(tokenizer, "encode")
        if not (self._transformers or self._rust or callable(tokenizer)):
            raise InputError(
                f"tokenizer is a {type(tokenizer).__name__}; give a transformers tokenizer, a "
                "tokenizers.Tokenizer, or a "
                f"function from a string to a list of ids"
            )
        if self._rust and (tokenizer.truncation is not None or tokenizer.padding is not None):
            self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    def encode(self, text: str, *, target: bool = False) -> Encoded:
        """Ids of ``text`` with the special tokens that the tokenizer adds; ``target`` encodes it as decoder text."""
        if self._transformers:
            return self._encode_transformers(text, target)
        if self._rust:
            found = self.tokenizer.encode(text)
            real = [i for i, shown in enumerate(found.attention_mask) if shown]
            return Encoded(tuple(found.ids[i] for i in real), tuple(found.special_tokens_mask[i] for i in real))
        found = self.tokenizer(text)
        if not isinstance(found, Sequence) and hasattr(found, "keys"):
            found = found["input_ids"]
        return Encoded(*_plain_ids(found))

    def _encode_transformers(self, text: str, target: bool) -> Encoded:
        given = {"text_target": text} if target else {"text": text}
        found = self.tokenizer(
            **given,
            return_special_tokens_mask=True,
            padding=False,
            truncation=False,
            verbose=False,
            return_tensors=None,
        )
        ids = tuple(int(one) for one in found["input_ids"])
        special = tuple(int(one) for one in found.get("special_tokens_mask", [0] * len(ids)))
        types = found.get("token_type_ids")
        return Encoded(ids, special, tuple(int(one) for one in types) if types is not None else None)

    def shorten(self, encoded: Encoded, length: int) -> Encoded:
        """At most ``length`` tokens: the special tokens at both ends stay, text is cut from its end (or, where the
        tokenizer says ``truncation_side="left"``, from its beginning).

        Raises:
            InputError: ``length`` leaves no room for a token of the text.
        """
        over = len(encoded.ids) - length
        if over <= 0:
            return encoded
        before, after = _ends(encoded.special)
        if length <= before + after:
            raise InputError(
                f"max_length={length} leaves no room for text: the tokenizer adds {before + after} special "
                "tokens; give at "
                f"least {before + after + 1}"
            )
        stop = len(encoded.ids) - after
        gone = range(before, before + over) if self._cuts_left() else range(stop - over, stop)
        keep = [i for i in range(len(encoded.ids)) if i not in gone]
        return _picked(encoded, keep, cut=over - sum(encoded.special[i] for i in gone))

    def _cuts_left(self) -> bool:
        return getattr(self.tokenizer, "truncation_side", "right") == "left"

    def windows(self, pieces: Iterable[str], length: int) -> Iterator[Encoded]:
        """The windows of one document that arrives in pieces: ``length`` tokens each, with the special tokens that a
        passage of its own would have; the last window holds what is left.

        Raises:
            InputError: ``length`` leaves no room for a token of the text.
        """
        held: list[int] = []
        room: int | None = None
        frame: tuple[Encoded, Encoded] | None = None
        for piece in pieces:
            encoded = self.encode(piece)
            before, after = _ends(encoded.special)
            inner = range(before, len(encoded.ids) - after)
            if not len(inner):
                continue
            if frame is None:
                frame = _picked(encoded, range(before)), _picked(encoded, range(inner.stop, len(encoded.ids)))
                room = length - before - after
                if room < 1:
                    raise InputError(
                        f"window={length} leaves no room for text: the tokenizer adds {before + after} special "
                        "tokens; give "
                        f"at least {before + after + 1}"
                    )
            held += encoded.ids[inner.start : inner.stop]
            start = 0
            while room is not None and len(held) - start >= room:
                yield _framed(frame, held[start : start + room])
                start += room
            del held[:start]
        if held and frame is not None:
            yield _framed(frame, held)


def _ends(special: Sequence[int]) -> tuple[int, int]:
    """How many special tokens stand before and after the text."""
    if all(special):
        return len(special), 0
    before = next(i for i, mark in enumerate(special) if not mark)
    after = next(i for i, mark in enumerate(reversed(special)) if not mark)
    return before, after


def _picked(encoded: Encoded, keep: Iterable[int], cut: int = 0) -> Encoded:
    keep = list(keep)
    types = tuple(encoded.types[i] for i in keep) if encoded.types is not None else None
    return Encoded(tuple(encoded.ids[i] for i in keep), tuple(encoded.special[i] for i in keep), types, cut)


def _framed(frame: tuple[Encoded, Encoded], ids: Sequence[int]) -> Encoded:
    before, after = frame
    types = None
    if before.types is not None and after.types is not None:
        inner = before.types[-1] if before.types else 0
        types = (*before.types, *([inner] * len(ids)), *after.types)
    return Encoded((*before.ids, *ids, *after.ids), (*before.special, *([0] * len(ids)), *after.special), types)


def _plain_ids(found: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ids = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(ids, list | tuple) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise InputError(
            f"the tokenizer gave a {type(found).__name__} for a string; it must give a flat list of whole numbers"
        )
    return tuple(ids), (0,) * len(ids)

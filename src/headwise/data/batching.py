"""From passages or ready inputs to padded batches.

Padding goes to the right, whatever side the tokenizer prefers. There it can change nothing: positions counted from the
left edge are those that the passage has alone, a causal query never sees later keys, and a bidirectional one has them
hidden by the attention mask. Left padding is there for those who want to see what it does; positions are then passed
where the model takes them, and refused where it would number them wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, groupby, islice
from pathlib import Path
from typing import Any, Final

from headwise.data import check
from headwise.data.batch import PADDING, SPECIAL, TOKEN, Batch
from headwise.data.collate import Row, collate, from_example, from_ready, shifted_right
from headwise.data.facts import Facts
from headwise.data.passages import Passage, Passages, as_passages
from headwise.data.ready import Example, ReadyBatch, ReadyInputs, as_ready
from headwise.data.rules import InputRules, TakesInput
from headwise.data.tokenizing import Encoded, Encoder
from headwise.errors import DataError, InputError

__all__ = ["Batches", "batches"]

#: passages are sorted by length within so many batches' worth
_BUCKET: Final = 64

#: what the decoder reads, by whether the passage came with a text of its own for it
_SAID: Final = {
    False: "the passage itself, shifted right behind the decoder's start token",
    True: "the target text, shifted right behind the decoder's start token",
}


class Batches:
    """Padded batches of one source; going through it again starts again.

    Attributes:
        facts: counts of the latest pass; whole when its last batch was taken.
    """

    def __init__(self, start: Callable[[Facts], Iterator[Batch]]) -> None:
        self._start = start
        self.facts = Facts()

    def __iter__(self) -> Iterator[Batch]:
        self.facts = Facts()
        return self._start(self.facts)


@dataclass(frozen=True)
class _Plan:
    rules: InputRules
    batch_size: int
    max_length: int | None
    left: bool


def batches(
    model: TakesInput,
    source: Any,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    limit: int | None = None,
    padding_side: str = "right",
) -> Batches:
    """Batches for ``model`` from text or ready inputs.

    Passages of similar length share a batch: they are sorted by length, stably, within stretches of 64 batches. Nothing
    is drawn at random, and no number measured depends on which passages share a batch.

    Args:
        model: what the batches are for; gives a tokenizer and its :class:`InputRules`.
        source: :class:`Passages`, :class:`ReadyInputs`, a path, a list of strings, or an iterable of mappings from
            input names to tensors.
        batch_size: passages in a batch.
        max_length: cut longer passages to so many tokens, special tokens included.
        limit: use only the first so many passages.
        padding_side: ``"right"``, ``"left"``, or ``"tokenizer"`` for the side that the tokenizer prefers.

    Raises:
        InputError: an argument has a value that its rule does not allow.
        DataError: while batches are taken: text for a model without tokenizer, token ids outside the vocabulary, a
            passage longer than the model has positions, no passage with a token in it.
    """
    for name, value in (("batch_size", batch_size), ("max_length", max_length), ("limit", limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} must be a whole number of at least 1, and is {value!r}")
    if padding_side not in ("right", "left", "tokenizer"):
        raise InputError(f"padding_side must be right, left or tokenizer, and is {padding_side!r}")
    side = getattr(model.tokenizer, "padding_side", "right") if padding_side == "tokenizer" else padding_side
    # Larger than any source is the same as no limit, and islice counts in machine words.
    plan = _Plan(model.input_rules, min(batch_size, sys.maxsize // _BUCKET), max_length, side == "left")
    if plan.left:
        check.left_padding(plan.rules)
    found = _opened(source)
    if isinstance(found, ReadyInputs):
        ready = found
        return Batches(lambda facts: _from_ready(ready, plan, _least(limit, ready.limit), facts))
    check.takes_text(model)
    encoder, text = Encoder(model.tokenizer), found
    return Batches(lambda facts: _from_text(text, encoder, plan, _least(limit, text.limit), facts))


def _least(*limits: int | None) -> int | None:
    return min((min(one, sys.maxsize) for one in limits if one is not None), default=None)


def _opened(source: Any) -> Passages | ReadyInputs:
    if isinstance(source, Passages | ReadyInputs):
        return source
    if isinstance(source, Mapping):
        return as_ready(source)
    if isinstance(source, str | bytes | Path) or not isinstance(source, Iterable):
        return as_passages(source)
    if iter(source) is source:
        first = next(iter(source), None)
        source = chain([] if first is None else [first], source)
    else:
        first = next(iter(source), None)
    if first is None:
        raise DataError("the source of texts or inputs is empty; give at least one passage")
    return as_passages(source) if isinstance(first, str | tuple) else as_ready(source)


def _from_text(passages: Passages, encoder: Encoder, plan: _Plan, limit: int | None, facts: Facts) -> Iterator[Batch]:
    facts.files = [dict(file) for file in passages.files]
    facts.notes = list(passages.notes)
    facts.window = passages.window
    if passages.window is None:
        rows = _rows(islice(passages.open(), limit), encoder, plan, facts)
    else:
        rows = islice(_windows(passages.open(), passages.window, encoder, plan, facts), limit)
    yield from _batched(rows, plan, facts)
    if facts.passages == 0:
        named = ", ".join(file["path"] for file in facts.files) or "the texts given"
        read = f"{facts.skipped_passages} were read" if facts.skipped_passages else "nothing but white space was read"
        raise DataError(f"{named}: no passage holds a token of text ({read}); give text with words in it")


def _rows(passages: Iterator[Passage], encoder: Encoder, plan: _Plan, facts: Facts) -> Iterator[Row]:
    for index, passage in enumerate(passages):
        for text in filter(None, (passage.text, passage.target)):
            check.whole_characters(text, passage.where)
        encoded = encoder.encode(passage.text) if passage.text.strip() else None
        if encoded is None or encoded.tokens == 0:
            facts.skipped_passages += 1
            continue
        if passage.target is not None and not plan.rules.encoder_decoder:
            raise InputError(
                f"{passage.where}: comes with a text for the decoder (target_field), and this model has no "
                "decoder; leave it out"
            )
        row = _row(index, passage.where, encoded, encoder, plan, facts)
        if plan.rules.encoder_decoder:
            target = encoded if passage.target is None else encoder.encode(passage.target, target=True)
            if target.tokens == 0:
                facts.skipped_passages += 1
                continue
            row = replace(_with_decoder(row, target, encoder, plan), target=passage.target or passage.text)
            facts.decoder = _SAID[passage.target is not None]
        yield replace(row, text=passage.text)


def _windows(passages: Iterator[Passage], window: int, encoder: Encoder, plan: _Plan, facts: Facts) -> Iterator[Row]:
    index = count(0)
    for document in _documents(passages):
        first = next(document)
        found = False
        texts = map(_whole, chain([first], document))
        for part, encoded in enumerate(encoder.windows(texts, window)):
            found = True
            row = _row(next(index), f"{first.where}, window {part}", encoded, encoder, plan, facts)
            if plan.rules.encoder_decoder:
                row = _with_decoder(row, encoded, encoder, plan)
                facts.decoder = _SAID[False]
            yield row
        facts.skipped_passages += not found


def _whole(piece: Passage) -> str:
    check.whole_characters(piece.text, piece.where)
    return piece.text


def _documents(passages: Iterator[Passage]) -> Iterator[Iterator[Passage]]:
    number = 0

    def document(passage: Passage) -> int:
        nonlocal number
        number += not passage.continues
        return number

    for _, pieces in groupby(passages, document):
        yield pieces


def _row(index: int, where: str, encoded: Encoded, encoder: Encoder, plan: _Plan, facts: Facts) -> Row:
    rules = plan.rules
    if plan.max_length is not None:
        encoded = encoder.shorten(encoded, plan.max_length)
    facts.truncated_passages += encoded.cut > 0
    facts.truncated_tokens += encoded.cut
    check.ids_in_vocabulary(encoded.ids, rules.vocabulary, where, "the tokenizer's output")
    check.length(len(encoded.ids), rules.positions, where)
    values: dict[str, Sequence[int]] = {"input_ids": encoded.ids}
    if rules.takes("attention_mask"):
        values["attention_mask"] = (1,) * len(encoded.ids)
    if encoded.types is not None and rules.takes("token_type_ids"):
        values["token_type_ids"] = encoded.types
    return Row(index, where, values, [SPECIAL if mark else TOKEN for mark in encoded.special])


def _with_decoder(row: Row, target: Encoded, encoder: Encoder, plan: _Plan) -> Row:
    rules = plan.rules
    if plan.max_length is not None:
        target = encoder.shorten(target, plan.max_length)
    ids, kinds = shifted_right(target.ids, target.special, rules)
    check.ids_in_vocabulary(ids, rules.decoder_vocabulary, row.where, "the decoder's input")
    check.length(len(ids), rules.decoder_positions, row.where, what="decoder tokens")
    values = {**row.values, "decoder_input_ids": ids}
    if rules.takes("decoder_attention_mask"):
        values["decoder_attention_mask"] = [1] * len(ids)
    return replace(row, values=values, decoder_kinds=kinds)


def _batched(rows: Iterable[Row], plan: _Plan, facts: Facts) -> Iterator[Batch]:
    """Batches of rows of similar length; of equal length where the model takes no attention mask."""
    facts.padding_side = "left" if plan.left else "right"
    masked = plan.rules.takes("attention_mask")
    waiting = iter(rows)
    while bucket := list(islice(waiting, _BUCKET * plan.batch_size)):
        bucket.sort(key=lambda row: (row.length, len(row.decoder_kinds or ())))
        for _, group in groupby(bucket, lambda row: None if masked else row.length):
            members = list(group)
            for first in range(0, len(members), plan.batch_size):
                batch = collate(members[first : first + plan.batch_size], plan.rules, left=plan.left)
                _count(batch, plan.rules, facts)
                yield batch


def _from_ready(ready: ReadyInputs, plan: _Plan, limit: int | None, facts: Facts) -> Iterator[Batch]:
    facts.files = [dict(file) for file in ready.files]
    left = limit
    next_index = 0
    for together, items in groupby(ready.open(plan.batch_size), lambda item: isinstance(item, Example)):
        before = facts.passages
        if together:
            examples = (item for item in islice(items, left) if isinstance(item, Example))
            rows = (_example_row(item, index, plan, facts) for index, item in enumerate(examples, next_index))
            yield from _batched(rows, plan, facts)
        else:
            whole = (item for item in items if not isinstance(item, Example))
            yield from _taken(whole, next_index, left, plan, facts)
        done = facts.passages - before
        next_index += done
        left = None if left is None else left - done
        if left == 0:
            break
    if facts.passages == 0:
        raise DataError("the inputs hold no example; give at least one")


def _taken(
    items: Iterator[ReadyBatch | Batch], first: int, left: int | None, plan: _Plan, facts: Facts
) -> Iterator[Batch]:
    done = 0
    for item in items:
        batch = _ready_batch(item, first + done, None if left is None else left - done, plan)
        _count(batch, plan.rules, facts)
        done += len(batch.passages)
        yield batch
        if left is not None and done >= left:
            return


def _example_row(item: Example, index: int, plan: _Plan, facts: Facts) -> Row:
    row = from_example(item, index, plan.rules, plan.max_length)
    facts.truncated_passages += row.cut > 0
    facts.truncated_tokens += row.cut
    return row


def _ready_batch(item: ReadyBatch | Batch, first: int, left: int | None, plan: _Plan) -> Batch:
    if plan.max_length is not None:
        raise InputError(
            "max_length cuts text and lists of token ids; ready batches are taken as they are, so cut them yourself"
        )
    if isinstance(item, Batch):
        return item
    if left is not None:
        item = ReadyBatch({name: value[:left] for name, value in item.tensors.items()}, item.where)
    return from_ready(item, first, plan.rules)


def _count(batch: Batch, rules: InputRules, facts: Facts) -> None:
    facts.batches += 1
    facts.passages += len(batch.passages)
    facts.tokens += batch.tokens
    for rows in (batch.input_rows, batch.decoder_rows):
        if rows is None:
            continue
        facts.special_tokens += int((rows == SPECIAL).sum())
        facts.padding += int((rows == PADDING).sum())
        real = (rows != PADDING).sum(-1)
        facts.longest = max(facts.longest, int(real.max()))
        if rules.trained_length is not None:
            over = int((real > rules.trained_length).sum())
            if over and not facts.over_trained_length:
                facts.notes.append(
                    f"some passages are longer than the {rules.trained_length} tokens that the model was trained "
                    "for; they are "
                    f"measured all the same"
                )
            facts.over_trained_length += over

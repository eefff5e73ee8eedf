"""Whether input fits the model: ids, lengths, names. Each refusal names the passage and the number."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from torch import Tensor

from headwise.data.rules import InputRules, TakesInput
from headwise.errors import DataError, InputError

__all__ = ["ids_in_vocabulary", "left_padding", "length", "names_accepted", "takes_text", "whole_characters"]


def takes_text(model: TakesInput) -> None:
    """Refuse text for a model that reads something else or has no tokenizer."""
    rules = model.input_rules
    if rules.main_input != "input_ids":
        raise DataError(
            f"text was given, and this model takes {rules.main_input}; give ready inputs: a .safetensors file of "
            "named tensors "
            f"(--inputs, or read_inputs), or batches in Python"
        )
    if model.tokenizer is None:
        why = getattr(model, "tokenizer_note", None)
        raise DataError(
            f"text was given, and this model has no tokenizer{f' ({why})' if why else ''}; give token ids: a "
            'file with a line such as {"input_ids": [3, 1, 4]} per passage, named .jsonl (--inputs, or read_inputs), '
            "or a tokenizer in Python (wrap(module, tokenizer))"
        )


def whole_characters(text: str, where: str) -> None:
    """Refuse half of a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = text[error.start]
        raise DataError(
            f"{where}: holds the lone surrogate \\u{ord(bad):04x} at character {error.start + 1}, which is half of a "
            "character (or a byte that is not UTF-8); write the whole character, or take it out"
        ) from None


def left_padding(rules: InputRules) -> None:
    """Refuse left padding where the model would number its tokens from the left edge and cannot be told otherwise."""
    if rules.positions_from == "left" and not rules.takes("position_ids"):
        raise InputError(
            "padding_side='left' would give short passages wrong positions: this model counts positions from the "
            "left edge and "
            "takes no position_ids; use padding_side='right', which changes nothing"
        )
    if not rules.takes("attention_mask"):
        raise InputError(
            "padding_side='left' needs an attention_mask, which this model does not take; use padding_side='right'"
        )


#: What says how a model is to run, and is no data: headwise sets it itself.
_SETTINGS: Final = frozenset(
    {"use_cache", "cache", "past_key_values", "output_attentions", "output_hidden_states", "return_dict"}
)


def names_accepted(names: Collection[str], rules: InputRules, where: str) -> None:
    """Refuse input names that the model's forward does not have, or that are settings and no data."""
    for name in names:
        if name in _SETTINGS:
            raise DataError(f"{where}: {name!r} says how the model runs, and headwise sets it itself; leave it out")
        if not rules.takes(name):
            accepted = ", ".join(sorted(rules.accepts or ()))
            raise DataError(f"{where}: the model takes no input named {name!r}; it takes {accepted}")


def ids_in_vocabulary(ids: Sequence[int] | Tensor, vocabulary: int | None, where: str, name: str = "input_ids") -> None:
    """Refuse ids below 0 or beyond the embedding."""
    flat = ids.flatten().tolist() if isinstance(ids, Tensor) else ids
    if not len(flat) or (min(flat) >= 0 and (vocabulary is None or max(flat) < vocabulary)):
        return
    position, bad = next(
        (at, one) for at, one in enumerate(flat) if one < 0 or (vocabulary is not None and one >= vocabulary)
    )
    if isinstance(ids, Tensor):
        row, column = divmod(position, ids.shape[-1])
        at = f"row {row}, position {column}"
    else:
        at = f"position {position}"
    if bad < 0:
        hint = "; -100 marks labels, not ids, and padding is any id with attention_mask 0" if name != "labels" else ""
        raise DataError(f"{where}: {name} holds the negative id {bad} at {at}{hint}")
    raise DataError(
        f"{where}: {name} holds id {bad} at {at}, and the model's vocabulary has ids 0 to "
        f"{(vocabulary or 0) - 1}; the tokenizer "
        f"or the ids belong to another model"
    )


def length(count: int, limit: int | None, where: str, *, what: str = "tokens", cut: bool = True) -> None:
    """Refuse a passage that is longer than the model has positions."""
    if limit is not None and count > limit:
        shorter = f"cut it with max_length={limit} (--max-length {limit})"
        way = f"{shorter}, or cut text into windows with window={limit} (--window {limit})"
        raise DataError(
            f"{where}: has {count} {what}, and the model has positions for {limit}; "
            f"{way if cut else 'give shorter examples'}"
        )

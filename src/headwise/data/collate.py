"""Rows of one batch put together: padding, masks, positions, and which rows count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from headwise.data import check
from headwise.data.batch import PADDING, SPECIAL, TOKEN, Batch, pad
from headwise.data.ready import Example, ReadyBatch
from headwise.data.rules import InputRules
from headwise.errors import DataError

__all__ = ["Row", "collate", "from_example", "from_ready", "shifted_right"]

_IGNORED_LABEL: Final = -100
_DECODER: Final = ("decoder_input_ids", "decoder_attention_mask")


@dataclass(frozen=True)
class Row:
    """One example before padding.

    Attributes:
        index: its passage, counted from 0 in the order of the source.
        where: for messages.
        values: named lists of whole numbers; those of the encoder side are equally long, and so are the decoder's.
        kinds, decoder_kinds: for each position 0 padding, 1 token, 2 special token.
        cut: tokens taken away by ``max_length``.
        text, target: the texts that the two sides were made from, where they were.
    """

    index: int
    where: str
    values: dict[str, Sequence[int]]
    kinds: Sequence[int]
    decoder_kinds: Sequence[int] | None = None
    cut: int = 0
    decoder: str | None = field(default=None)
    text: str | None = None
    target: str | None = None

    @property
    def length(self) -> int:
        """Positions on the encoder side (the only side of most models)."""
        return len(self.kinds)


def shifted_right(ids: Sequence[int], special: Sequence[int], rules: InputRules) -> tuple[list[int], list[int]]:
    """Decoder input for a decoder that is to predict ``ids``: the start token, then all but the last. With row kinds.

    Raises:
        DataError: the model's config names no start token.
    """
    if rules.decoder_start is None:
        raise DataError(
            "the decoder's first token is not known (the config has no decoder_start_token_id); give ready inputs with "
            "decoder_input_ids"
        )
    kinds = [SPECIAL, *(SPECIAL if mark else TOKEN for mark in special[:-1])]
    return [rules.decoder_start, *ids[:-1]], kinds


def collate(rows: Sequence[Row], rules: InputRules, *, left: bool = False) -> Batch:
    """One batch from rows of any lengths; every row has the same names."""
    fills = {"labels": _IGNORED_LABEL, "input_ids": rules.padding_id, "decoder_input_ids": rules.padding_id}
    inputs: dict[str, Tensor] = {}
    for name in rows[0].values:
        for row in rows:
            if name not in row.values:
                raise DataError(
                    f"{row.where}: has no {name}, which {rows[0].where} has; all examples need the same names"
                )
        side = left and name not in _DECODER and not (rules.encoder_decoder and name == "labels")
        inputs[name] = pad([row.values[name] for row in rows], fills.get(name, 0), left=side)
    for row in rows:
        extra = next((name for name in row.values if name not in inputs), None)
        if extra is not None:
            raise DataError(f"{rows[0].where}: has no {extra}, which {row.where} has; all examples need the same names")
    kinds = pad([row.kinds for row in rows], PADDING, left=left, dtype=torch.int8)
    if left and "position_ids" not in inputs and rules.positions_from != "padding_id" and rules.takes("position_ids"):
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    decoder_kinds = None
    if rows[0].decoder_kinds is not None:
        decoder_kinds = pad([row.decoder_kinds or () for row in rows], PADDING, dtype=torch.int8)
    tokens = int((kinds == TOKEN).sum()) + (int((decoder_kinds == TOKEN).sum()) if decoder_kinds is not None else 0)
    return Batch(
        inputs,
        tuple(row.index for row in rows),
        kinds,
        decoder_kinds,
        tokens,
        where=tuple(row.where for row in rows),
        texts=tuple(row.text for row in rows),
        targets=tuple(row.target for row in rows),
    )


def from_example(example: Example, index: int, rules: InputRules, max_length: int | None) -> Row:
    """A row from a ready example: checked, its mask completed, its decoder input made from labels where it has none."""
    values: dict[str, Sequence[int]] = dict(example.values)
    where = example.where
    if "input_ids" not in values or not len(values["input_ids"]):
        raise DataError(f"{where}: input_ids is empty; give at least one id, or leave the example out")
    values.setdefault("attention_mask", [1] * len(values["input_ids"]))
    check.names_accepted([name for name in values if name != "attention_mask"], rules, where)
    cut = 0
    if max_length is not None and len(values["input_ids"]) > max_length:
        cut = len(values["input_ids"]) - max_length
        values = {
            name: value if name in _DECODER or (rules.encoder_decoder and name == "labels") else value[:max_length]
            for name, value in values.items()
        }
    check.ids_in_vocabulary(values["input_ids"], rules.vocabulary, where)
    check.length(len(values["input_ids"]), rules.positions, where)
    kinds = [TOKEN if shown else PADDING for shown in values["attention_mask"]]
    if TOKEN not in kinds:
        raise DataError(f"{where}: attention_mask hides every position; an example needs at least one real token")
    if not rules.encoder_decoder:
        if "labels" in values and len(values["labels"]) != len(values["input_ids"]):
            raise DataError(
                f"{where}: labels has {len(values['labels'])} entries and input_ids {len(values['input_ids'])}; "
                "they must be as "
                f"long as each other"
            )
        return _without_mask(Row(index, where, values, kinds, cut=cut), rules)
    ids, decoder_kinds = _decoder_of(values, where, rules)
    values["decoder_input_ids"] = ids
    if rules.takes("decoder_attention_mask"):
        values["decoder_attention_mask"] = [int(kind != PADDING) for kind in decoder_kinds]
    return _without_mask(Row(index, where, values, kinds, decoder_kinds, cut), rules)


def _without_mask(row: Row, rules: InputRules) -> Row:
    if rules.takes("attention_mask"):
        return row
    if PADDING in row.kinds:
        raise DataError(f"{row.where}: attention_mask hides positions, and this model takes no attention_mask")
    row.values.pop("attention_mask")
    return row


def _decoder_of(values: dict[str, Sequence[int]], where: str, rules: InputRules) -> tuple[Sequence[int], Sequence[int]]:
    if "decoder_input_ids" in values:
        ids = values["decoder_input_ids"]
        mask = values.get("decoder_attention_mask", [1] * len(ids))
        kinds: Sequence[int] = [TOKEN if shown else PADDING for shown in mask]
    elif "labels" in values:
        labels = values["labels"]
        ids, kinds = shifted_right(labels, [0] * len(labels), rules)
        real = [True, *(label != _IGNORED_LABEL for label in labels[:-1])]
        ids = [one if kept else rules.padding_id for one, kept in zip(ids, real, strict=True)]
        kinds = [kind if kept else PADDING for kind, kept in zip(kinds, real, strict=True)]
    else:
        raise DataError(f"{where}: an encoder-decoder model needs decoder_input_ids or labels beside input_ids")
    if not len(ids):
        raise DataError(f"{where}: decoder_input_ids is empty; give at least the start token")
    check.ids_in_vocabulary(ids, rules.decoder_vocabulary, where, "decoder_input_ids")
    check.length(len(ids), rules.decoder_positions, where, what="decoder tokens", cut=False)
    return ids, kinds


def from_ready(batch: ReadyBatch, first: int, rules: InputRules) -> Batch:
    """A batch from ready tensors: checked, floats cast, and its real rows told from padding."""
    tensors, where = dict(batch.tensors), batch.where
    check.names_accepted(tensors, rules, where)
    rows = _rows_of(tensors, "input_ids" if "input_ids" in tensors else "inputs_embeds", "attention_mask", where)
    if rows is not None and "input_ids" in tensors:
        check.ids_in_vocabulary(tensors["input_ids"], rules.vocabulary, where)
    if rows is not None:
        check.length(rows.shape[1], rules.positions, where, cut=False)
    decoder_rows = None
    if rules.encoder_decoder:
        _decoder_tensors(tensors, where, rules)
        decoder_rows = _rows_of(tensors, "decoder_input_ids", "decoder_attention_mask", where)
        check.ids_in_vocabulary(tensors["decoder_input_ids"], rules.decoder_vocabulary, where, "decoder_input_ids")
        check.length(
            tensors["decoder_input_ids"].shape[1], rules.decoder_positions, where, what="decoder tokens", cut=False
        )
    inputs = {
        name: value.to(torch.int64) if name.endswith("attention_mask") else _cast(value, rules, name, where)
        for name, value in tensors.items()
    }
    count = next(iter(tensors.values())).shape[0]
    tokens = sum(int((part == TOKEN).sum()) for part in (rows, decoder_rows) if part is not None)
    said = tuple(f"{where} example {row}" for row in range(count))
    return Batch(inputs, tuple(range(first, first + count)), rows, decoder_rows, tokens, where=said)


def _cast(value: Tensor, rules: InputRules, name: str, where: str) -> Tensor:
    if value.is_floating_point():
        if not bool(torch.isfinite(value).all()):
            raise DataError(f"{where}: {name} holds values that are not finite (NaN or infinity)")
        return value if rules.float_dtype is None else value.to(rules.float_dtype)
    return value if value.dtype == torch.bool else value.to(torch.int64)


def _rows_of(tensors: dict[str, Tensor], main: str, mask_name: str, where: str) -> Tensor | None:
    if main not in tensors:
        return None
    ids = tensors[main]
    axes = 3 if main == "inputs_embeds" else 2
    if ids.ndim != axes or (main != "inputs_embeds" and (ids.is_floating_point() or ids.dtype == torch.bool)):
        raise DataError(
            f"{where}: {main} must be {'whole numbers of ' if axes == 2 else ''}shape (examples, "
            f"length{', width' * (axes == 3)}), "
            f"and is {ids.dtype} of shape {tuple(ids.shape)}"
        )
    if ids.shape[1] == 0:
        raise DataError(f"{where}: {main} has length 0")
    rows = torch.full(ids.shape[:2], TOKEN, dtype=torch.int8)
    mask = tensors.get(mask_name)
    if mask is None:
        return rows
    if mask.shape != ids.shape[:2]:
        raise DataError(
            f"{where}: {mask_name} must have the shape of {main}, {tuple(ids.shape[:2])}, and has {tuple(mask.shape)}"
        )
    shown = mask.to("cpu") != 0
    if not bool((mask.to("cpu").to(torch.float64) == shown).all()):
        raise DataError(f"{where}: {mask_name} holds values other than 0 and 1; 1 marks a real token and 0 padding")
    if not bool(shown.any(-1).all()):
        row = int((~shown.any(-1)).nonzero()[0])
        raise DataError(
            f"{where}: {mask_name} hides every position of row {row}; an example needs at least one real token"
        )
    return rows * shown.to(torch.int8)


def _decoder_tensors(tensors: dict[str, Tensor], where: str, rules: InputRules) -> None:
    if "decoder_input_ids" in tensors:
        return
    labels = tensors.get("labels")
    if labels is None:
        raise DataError(
            f"{where}: an encoder-decoder model needs decoder_input_ids or labels beside {rules.main_input}"
        )
    pairs = [_decoder_of({"labels": row}, where, rules) for row in labels.tolist()]
    tensors["decoder_input_ids"] = torch.tensor([list(ids) for ids, _ in pairs])
    if rules.takes("decoder_attention_mask"):
        tensors["decoder_attention_mask"] = torch.tensor(
            [[int(kind != PADDING) for kind in kinds] for _, kinds in pairs]
        )

"""What a model demands of its input, read from its weights first and from its config second."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from headwise.data import InputRules
from headwise.models.families import field_of

__all__ = ["input_rules"]

#: last parts of the paths of position tables: GPT-2, BERT, BART, OPT, CLIP text, OpenAI GPT, ...
_POSITION_TABLES: Final = (
    "wpe",
    "position_embeddings",
    "position_embedding",
    "embed_positions",
    "positions_embed",
    "pos_embed",
    "pos_embedding",
    "embed_position",
)
_NOT_TEXT: Final = ("vision", "visual", "image", "video", "audio", "speech", "pixel", "patch", "tower")
#: the same of word tables, for models that do not say where theirs is
_WORD_TABLES: Final = ("word_embeddings", "embed_tokens", "wte", "token_embedding", "tok_embeddings")


def input_rules(module: nn.Module) -> InputRules:
    """The demands of ``module`` on its input.

    The limit on positions is the size of the table of learned (or tabulated) positions, less what the model keeps free
    in front of it: 2 rows in RoBERTa, BART and OPT. A model with rotary or relative positions has none; its
    ``max_position_embeddings`` is the length it was trained for.
    """
    config = getattr(module, "config", None)
    text = _text_config(config)
    accepts = _accepts(module)
    both = bool(getattr(config, "is_encoder_decoder", False)) and (accepts is None or "decoder_input_ids" in accepts)
    table = _table_of(module, decoder=False if both else None)
    other = _table_of(module, decoder=True) if both else None
    relative = _is_relative(text)
    trained = _number(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    padding = table.padding_idx if table is not None else None
    return InputRules(
        main_input=_main_input(module, accepts),
        accepts=accepts,
        vocabulary=_vocabulary(module, decoder=False),
        positions=table.limit if table is not None else None,
        trained_length=None if table is not None or relative or both else trained,
        positions_from=table.counted if table is not None else ("none" if relative else "left"),
        padding_id=padding if padding is not None else _padding_id(text),
        encoder_decoder=both,
        decoder_start=_start(module, config) if both else None,
        decoder_vocabulary=_vocabulary(module, decoder=True) if both else None,
        decoder_positions=other.limit if other is not None else None,
        float_dtype=next((value.dtype for value in module.parameters() if value.is_floating_point()), None),
    )


def _main_input(module: nn.Module, accepts: frozenset[str] | None) -> str:
    named = str(getattr(module, "main_input_name", None) or "input_ids")
    if accepts is None or named in accepts:
        return named
    return next((name for name in inspect.signature(module.forward).parameters if name in accepts), named)


def _accepts(module: nn.Module) -> frozenset[str] | None:
    parameters = inspect.signature(module.forward).parameters.values()
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        body = getattr(module, "base_model", None)
        if body is None:
            return None
        if body is not module and isinstance(body, nn.Module):
            names |= _accepts(body) or frozenset()
    return frozenset(names)


def _text_config(config: Any) -> Any:
    if config is None:
        return None
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def _number(config: Any, *names: str) -> int | None:
    for name in names:
        value = field_of(config, name, kind=int)
        if value is not None and 0 < value < 1 << 40:
            return int(value)
    return None


def _is_relative(config: Any) -> bool:
    """T5's buckets and ALiBi: any length runs as it was trained."""
    return field_of(config, "relative_attention_num_buckets") is not None or field_of(config, "alibi") is True


def _padding_id(config: Any) -> int:
    value = field_of(config, "pad_token_id", kind=int)
    return int(value) if value is not None and value >= 0 else 0


@dataclass(frozen=True)
class _Table:
    """A table of positions: how many can be used, how tokens are numbered, the id that the numbering skips."""

    limit: int
    counted: str
    padding_idx: int | None = None


def _table_of(module: nn.Module, *, decoder: bool | None) -> _Table | None:
    """The smallest table of positions of a stack; None where positions are rotary, relative or computed."""
    found: list[_Table] = []
    for path, part in module.named_modules():
        names = path.split(".")
        if any(word in name for name in names for word in _NOT_TEXT):
            continue
        if decoder is not None and ("decoder" in names) is not decoder:
            continue
        tables = [_read(child) for name, child in part.named_children() if name in _POSITION_TABLES]
        numbers = part._buffers.get("position_ids")
        for table in tables:
            if table is not None and numbers is not None and numbers.ndim == 2:
                table = replace(table, limit=min(table.limit, numbers.shape[1]))
            if table is not None:
                found.append(table)
        rotary = part._buffers.get("embed_positions")
        if rotary is not None and rotary.ndim == 2:
            found.append(_Table(rotary.shape[0], "left"))
    return min(found, key=lambda table: table.limit, default=None)


def _read(part: nn.Module) -> _Table | None:
    weight = getattr(part, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not hasattr(part, "padding_idx"):
        return None
    if hasattr(part, "make_weight") or hasattr(part, "make_weights"):
        return None  # sinusoids that grow as needed
    rows = int(weight.shape[0])
    offset = getattr(part, "offset", None)
    if isinstance(offset, int):
        counted = "mask" if "attention_mask" in inspect.signature(part.forward).parameters else "left"
        return _Table(rows - offset, counted)
    padding = part.padding_idx
    if isinstance(padding, int) and type(part).__name__ in ("Embedding", "QuantEmbedding"):
        return _Table(rows - padding - 1, "padding_id", padding)
    return _Table(rows, "left")


def _vocabulary(module: nn.Module, *, decoder: bool) -> int | None:
    owner: Any = module
    if decoder:
        getter = getattr(module, "get_decoder", None)
        owner = getter() if callable(getter) else module
    getter = getattr(owner, "get_input_embeddings", None)
    try:
        table = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):
        table = None
    found = _rows(table)
    if found is None and isinstance(owner, nn.Module):
        named = (part for path, part in owner.named_modules() if path.rsplit(".", 1)[-1] in _WORD_TABLES)
        found = next((rows for rows in map(_rows, named) if rows is not None), None)
    return found


def _rows(table: Any) -> int | None:
    weight = getattr(table, "weight", None)
    if not hasattr(table, "padding_idx") or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return None
    return int(weight.shape[0])


def _start(module: nn.Module, config: Any) -> int | None:
    for owner in (config, getattr(config, "decoder", None), getattr(module, "generation_config", None)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            value = getattr(owner, name, None)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
    return None

"""What a model demands of its input, read from its weights first and from its config second."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn

from headwise.data import InputRules

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
_NOT_TEXT: Final = ("vision", "visual", "image", "audio", "speech", "pixel", "patch")


def input_rules(module: nn.Module) -> InputRules:
    """The demands of ``module`` on its input.

    The limit on positions is the size of the table of learned (or tabulated) positions, less what the model keeps
    free in
    front of it: 2 rows in RoBERTa, BART and OPT. A model with rotary or relative positions has none; its
    ``max_position_embeddings`` is the length it was trained for.
    """
    config = getattr(module, "config", None)
    both = bool(getattr(config, "is_encoder_decoder", False))
    first = _stack_limit(module, decoder=False if both else None)
    second = _stack_limit(module, decoder=True) if both else None
    text = _text_config(config)
    trained = _number(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    accepts = _accepts(module)
    table, kind, padding = first
    if table is None and kind == "none":
        relative = _is_relative(text)
        trained = None if relative or both else trained
    return InputRules(
        main_input=str(getattr(module, "main_input_name", "input_ids") or "input_ids"),
        accepts=accepts,
        vocabulary=_vocabulary(module, decoder=False),
        positions=table,
        trained_length=None if table is not None else trained,
        positions_from=kind,
        padding_id=padding if padding is not None else _padding_id(text),
        encoder_decoder=both,
        decoder_start=_start(module, config) if both else None,
        decoder_vocabulary=_vocabulary(module, decoder=True) if both else None,
        decoder_positions=second[0] if second is not None else None,
        float_dtype=next((value.dtype for value in module.parameters() if value.is_floating_point()), None),
    )


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
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return value
    return None


def _is_relative(config: Any) -> bool:
    """T5's buckets and ALiBi: any length runs as it was trained."""
    return (
        getattr(config, "relative_attention_num_buckets", None) is not None or getattr(config, "alibi", False) is True
    )


def _padding_id(config: Any) -> int:
    value = getattr(config, "pad_token_id", None)
    return value if isinstance(value, int) and value >= 0 else 0


def _stack_limit(module: nn.Module, *, decoder: bool | None) -> tuple[int | None, str, int | None]:
    """(rows of the position table that can be used, how tokens are numbered, the id that numbering skips)."""
    limits: list[tuple[int, str, int | None]] = []
    for path, part in module.named_modules():
        names = path.split(".")
        if any(word in name for name in names for word in _NOT_TEXT):
            continue
        if decoder is not None and ("decoder" in names) is not decoder:
            continue
        if names[-1] in _POSITION_TABLES:
            found = _table_limit(part)
            if found is not None:
                limits.append(found)
        buffer = part._buffers.get("embed_positions")
        if buffer is not None and buffer.ndim == 2:
            limits.append((buffer.shape[0], "left", None))
        ids = part._buffers.get("position_ids")
        if ids is not None and ids.ndim == 2 and limits:
            limits[-1] = (min(limits[-1][0], ids.shape[1]), *limits[-1][1:])
    if not limits:
        return None, "none", None
    return min(limits, key=lambda one: one[0])


def _table_limit(part: nn.Module) -> tuple[int, str, int | None] | None:
    weight = getattr(part, "weight", None)
    if not isinstance(part, nn.Embedding) or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return None
    rows = weight.shape[0]
    offset = getattr(part, "offset", None)
    if isinstance(offset, int):
        counted = "mask" if "attention_mask" in inspect.signature(part.forward).parameters else "left"
        return rows - offset, counted, None
    if part.padding_idx is not None and type(part) is nn.Embedding:
        return rows - part.padding_idx - 1, "padding_id", part.padding_idx
    return rows, "left", None


def _vocabulary(module: nn.Module, *, decoder: bool) -> int | None:
    owner: Any = module
    if decoder:
        getter = getattr(module, "get_decoder", None)
        owner = getter() if callable(getter) else module
    getter = getattr(owner, "get_input_embeddings", None)
    if not callable(getter):
        return None
    try:
        found = getter()
    except (NotImplementedError, AttributeError):
        return None
    weight = getattr(found, "weight", None)
    if not isinstance(found, nn.Embedding) or not isinstance(weight, torch.Tensor):
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

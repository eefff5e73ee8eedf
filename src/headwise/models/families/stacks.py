"""Which stack a module belongs to, and whether it attends across: from paths, config and arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.models.families.counts import nearest_config

__all__ = ["is_cross", "stack_of", "takes_cache"]

_VISION: Final = frozenset({"vision", "visual", "image", "pixel", "video", "vit"})
_AUDIO: Final = frozenset({"audio", "speech", "acoustic", "wav"})
_TEXT: Final = frozenset({"text", "language", "lm"})
_CROSS_NAMES: Final = frozenset(
    {"cross", "crossattention", "cross_attn", "encdecattention", "multihead_attn", "encoder_attn"}
)
_FOREIGN: Final = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "encoder_states",
    "context",
    "memory",
    "kv_states",
)


def words_of(path: str) -> list[str]:
    """The words of a dotted path: split at dots and underscores, lower case."""
    return [word for word in re.split(r"[._]", path.lower()) if word]


def is_cross(path: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the keys come from another sequence: the name says so, or a foreign argument is a tensor of its own."""
    parts = path.lower().split(".")
    if any(
        part in _CROSS_NAMES or part.startswith(("cross_att", "crossatt", "encoder_att", "encdec")) for part in parts
    ):
        return True
    query, key = arguments.get("query"), arguments.get("key")
    if isinstance(query, Tensor) and isinstance(key, Tensor) and query is not key:
        return query.shape != key.shape or not torch.equal(query, key)
    own = next((arguments[name] for name in ("hidden_states", "query", "queries", "x") if name in arguments), None)
    for name in _FOREIGN:
        foreign = arguments.get(name)
        if isinstance(foreign, Tensor) and foreign is not own and not _same_storage(foreign, own):
            return True
    return False


def _same_storage(left: Tensor, right: Any) -> bool:
    return isinstance(right, Tensor) and left.shape == right.shape and left.data_ptr() == right.data_ptr()


def _plain_stack(root: nn.Module, path: str) -> str | None:
    """The stack of a module in a model without a config, where torch's own classes or patches of images tell it."""
    parts = path.split(".")
    around = [root, *(root.get_submodule(".".join(parts[: length + 1])) for length in range(len(parts)) if path)]
    if any(isinstance(part, (nn.TransformerDecoder, nn.TransformerDecoderLayer)) for part in around):
        return "decoder"
    children = {name for name, _ in root.named_children()}
    if {"encoder", "decoder"} <= children and parts[0] in ("encoder", "decoder"):
        return parts[0]
    return "vision" if any(isinstance(part, nn.Conv2d) for part in root.modules()) else None


def stack_of(root: nn.Module, path: str, causal: bool) -> str:
    """``"encoder"`` (of text that is only read), ``"decoder"``, ``"vision"`` or ``"audio"``.

    A word of the path decides (vision, audio); in an encoder-decoder model the words encoder and decoder; in a model of
    one stack what it reads (``main_input_name``, or patches where there is no vocabulary), and for text whether it
    is causal.
    """
    words = words_of(path)
    config = getattr(root, "config", None)
    if config is None:
        known = _plain_stack(root, path)
        if known is not None:
            return known
    two = bool(getattr(config, "is_encoder_decoder", False))
    for word in words:
        if word in _VISION:
            return "vision"
        if word in _AUDIO:
            return "audio"
        if two and word in ("encoder", "decoder"):
            return word
        if word in _TEXT and not (two and {"encoder", "decoder"} & set(words)):
            return "decoder" if causal and not _only_reads(root, path) else "encoder"
    main = str(getattr(root, "main_input_name", "input_ids"))
    if main.startswith("pixel"):
        return "decoder" if "decoder" in words and "encoder" not in words else "vision"
    if main in ("input_values", "input_features"):
        return "audio"
    nearest = nearest_config(root, path)
    if nearest is not None and not hasattr(nearest, "vocab_size"):
        if hasattr(nearest, "patch_size") or hasattr(nearest, "image_size"):
            return "vision"
        if hasattr(nearest, "num_mel_bins"):
            return "audio"
    return "decoder" if causal and not _only_reads(root, path) else "encoder"


def _only_reads(root: nn.Module, path: str) -> bool:
    """Whether a causal text part never writes: the text tower of CLIP, which keeps no keys and values."""
    config = nearest_config(root, path)
    if getattr(config, "base_config_key", "") != "text_config" or hasattr(config, "use_cache"):
        return False
    return not any(takes_cache(part) for part in root.modules() if getattr(part, "config", None) is config)


def takes_cache(module: nn.Module) -> bool:
    """Whether a module can be handed the keys and values of earlier positions."""
    return not {"cache", "past_key_values"}.isdisjoint(inspect.signature(type(module).forward).parameters)

"""Small inputs for a first look at a model, made from its config and its forward's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headwise.errors import UnsupportedError

__all__ = ["dummy_inputs", "padded"]

_BATCH: Final = 2
_LENGTH: Final = 7
_TARGET: Final = 5


def dummy_inputs(root: nn.Module) -> dict[str, Any]:
    """Keyword arguments of a small forward pass: two rows, and two lengths for an encoder-decoder model.

    Raises:
        UnsupportedError: the model takes an input that headwise does not know how to make.
    """
    config = getattr(root, "config", None)
    names = list(inspect.signature(root.forward).parameters)
    if not isinstance(config, PretrainedConfig):
        raise UnsupportedError(
            f"{type(root).__name__} has no transformers config, so no example input can be made for it; "
            "give example= the keyword arguments of a small forward pass"
        )
    place = next((tensor for tensor in root.parameters()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    main = str(getattr(root, "main_input_name", "input_ids"))
    if main in names and main != "input_ids":
        inputs[main] = _signal(main, config, generator)
    if "input_ids" in names and (main == "input_ids" or _needs_text(root)):
        inputs["input_ids"] = _ids(config, generator, _LENGTH)
    if "pixel_values" in names and "pixel_values" not in inputs and _needs_pixels(root):
        inputs["pixel_values"] = _signal("pixel_values", config, generator)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = _ids(config, generator, _TARGET)
    if "bbox" in names and "input_ids" in inputs:
        inputs["bbox"] = torch.arange(4).expand(_BATCH, _LENGTH, 4).contiguous()
    if not inputs:
        raise UnsupportedError(
            f"{type(root).__name__} takes {main!r}, which headwise does not know how to make; "
            "give example= the keyword arguments of a small forward pass"
        )
    return {name: _placed(value, place) for name, value in inputs.items()}


def padded(root: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same input with the last two positions of its first row as padding; None where that cannot be said."""
    ids = inputs.get("input_ids")
    names = inspect.signature(root.forward).parameters
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 4 or "attention_mask" not in names:
        return None
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    elif not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return None
    mask = mask.clone()
    mask[0, -2:] = 0
    return {**inputs, "attention_mask": mask}


def _needs_text(root: nn.Module) -> bool:
    """Whether a model whose main input is no text cannot run without ids (CLIP, BLIP)."""
    parameter = inspect.signature(root.forward).parameters["input_ids"]
    text = getattr(getattr(root, "config", None), "text_config", None)
    return parameter.default is inspect.Parameter.empty or (text is not None and not hasattr(root, "lm_head"))


def _needs_pixels(root: nn.Module) -> bool:
    config = getattr(root, "config", None)
    if getattr(config, "image_token_id", None) is not None or getattr(config, "image_token_index", None) is not None:
        return False
    return getattr(config, "vision_config", None) is not None


def _placed(value: Any, place: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(
        place.device, place.dtype if value.is_floating_point() and place.is_floating_point() else value.dtype
    )


def _within(config: PretrainedConfig, *names: str) -> Any:
    """The first of ``names`` that the config or a config inside it gives."""
    parts = [config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _ids(config: PretrainedConfig, generator: torch.Generator, length: int) -> Tensor:
    """Random token ids that avoid every id which the config gives a meaning."""
    text = config.get_text_config()
    vocabulary = int(_first(text, config) or 2)
    special = {
        value
        for part in (config, text)
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index"))
        for value in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(value, int)
    }
    plain = torch.tensor([i for i in range(min(vocabulary, 1000)) if i not in special] or [0])
    ids = plain[torch.randint(len(plain), (_BATCH, length), generator=generator)]
    return ids


def _first(*configs: PretrainedConfig) -> int | None:
    for config in configs:
        for name in ("vocab_size", "n_tokens", "src_vocab_size", "vocabulary_size"):
            value = getattr(config, name, None)
            if isinstance(value, int):
                return value
    return None


def _signal(name: str, config: PretrainedConfig, generator: torch.Generator) -> Tensor:
    if name == "pixel_values":
        size = _within(config, "image_size", "img_size", "input_size") or 32
        height, width = (size, size) if isinstance(size, int) else (size[-2], size[-1])
        channels = _within(config, "num_channels", "in_channels", "in_chans") or 3
        frames = _within(config, "num_frames", "frames_per_clip")
        shape: tuple[int, ...] = (_BATCH, channels, height, width)
        if frames and "video" in type(config).__name__.lower():
            shape = (_BATCH, frames, channels, height, width)
        return torch.randn(shape, generator=generator)
    if name == "input_features":
        bins = (
            _within(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")
            or 80
        )
        source = _within(config, "max_source_positions")
        if source is not None and getattr(config, "model_type", "") != "speech_to_text":
            return torch.randn((_BATCH, bins, 2 * int(source)), generator=generator)
        return torch.randn((_BATCH, 40, bins), generator=generator)
    if name == "input_values":
        bins = _within(config, "num_mel_bins")
        if (
            bins is not None
            and _within(config, "max_length") is not None
            and _within(config, "frequency_stride") is not None
        ):
            return torch.randn((_BATCH, int(_within(config, "max_length")), bins), generator=generator)
        return torch.randn((_BATCH, 4000), generator=generator)
    raise UnsupportedError(
        f"the model takes {name!r}, which headwise does not know how to make; give example= the keyword arguments of a small forward pass"
    )

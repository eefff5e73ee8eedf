"""Small inputs for a first look at a model, made from its config and its forward's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headwise.errors import UnsupportedError
from headwise.models.families.fields import field_of

__all__ = ["candidates", "dummy_inputs", "padded"]

_BATCH: Final = 2
_LENGTH: Final = 7
_TARGET: Final = 5


def dummy_inputs(root: nn.Module) -> dict[str, Any]:
    """The likeliest of :func:`candidates`."""
    return candidates(root)[0]


def candidates(root: nn.Module) -> list[dict[str, Any]]:
    """Keyword arguments of small forward passes, the likeliest first.

    Two rows, and two lengths for an encoder-decoder model.

    Raises:
        UnsupportedError: the model takes an input that headwise does not know how to make.
    """
    config = getattr(root, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise UnsupportedError(
            f"{type(root).__name__} has no transformers config, so no example input can be made for it; "
            "give the keyword arguments of a small forward pass (example= in Python, --inputs FILE on the command line)"
        )
    names = list(inspect.signature(root.forward).parameters)
    main = getattr(root, "main_input_name", "input_ids")
    with torch.device("cpu"):  # whatever torch's default device is: the draws are the same
        packed = _patches(root, config)
        made = [packed] if packed is not None else []
        text = _text(root, config, names, str(main))
        made += [{**signal, **text} for signal in _signal_inputs(root, config, names, str(main))]
    made = [inputs for inputs in made if inputs]
    if not made:
        raise UnsupportedError(
            f"{type(root).__name__} takes {main!r}, which headwise does not know how to make; "
            "give the keyword arguments of a small forward pass (example= in Python, --inputs FILE on the command line)"
        )
    place = next((tensor for tensor in root.parameters()), torch.empty(0))
    return [{name: _placed(value, place) for name, value in inputs.items()} for inputs in made]


def _signal_inputs(root: nn.Module, config: PretrainedConfig, names: list[str], main: str) -> list[dict[str, Any]]:
    """Images, sounds or series in every likely shape; one empty input for a model of text."""
    wanted = [name for name in (main, "pixel_values") if name in names and name != "input_ids"]
    if "pixel_values" in wanted and main != "pixel_values" and not _needs_pixels(root):
        wanted.remove("pixel_values")
    if not wanted:
        return [{}]
    name = wanted[0]
    generator = torch.Generator().manual_seed(0)
    made: list[dict[str, Any]] = []
    for shape in _signals(name, config):
        made.append({name: torch.randn(shape, generator=generator)})
    return made


def _text(root: nn.Module, config: PretrainedConfig, names: list[str], main: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    if "input_ids" in names and (main == "input_ids" or _needs_text(root)):
        inputs["input_ids"] = _ids(config, generator, _LENGTH)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = _ids(config, generator, _TARGET)
    if "bbox" in names and "input_ids" in inputs:
        inputs["bbox"] = torch.arange(4).expand(_BATCH, _LENGTH, 4).contiguous()
    return inputs


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
    return next((value for part in parts if (value := field_of(part, *names)) is not None), None)


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
    return plain[torch.randint(len(plain), (_BATCH, length), generator=generator)]


def _first(*configs: PretrainedConfig) -> int | None:
    names = ("vocab_size", "n_tokens", "src_vocab_size", "vocabulary_size")
    return next((value for one in configs if (value := field_of(one, *names, kind=int)) is not None), None)


def _signals(name: str, config: PretrainedConfig) -> list[tuple[int, ...]]:
    """Shapes that an input of this name may have, the likeliest first."""
    bins = (
        _within(
            config,
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "input_dim",
            "feature_projection_input_dim",
        )
        or 80
    )
    channels = _within(config, "num_channels", "in_channels", "in_chans", "input_channels") or 3
    if name.startswith("pixel_values"):
        size = _within(config, "image_size", "img_size", "crop_size", "input_size", "pretrain_img_size") or 32
        height, width = (size, size) if isinstance(size, int) else (size[-2], size[-1])
        frames = _within(config, "num_frames", "frames_per_clip", "num_image_with_embedding") or 4
        image, video = (_BATCH, channels, height, width), (_BATCH, frames, channels, height, width)
        return [video, image] if "video" in name else [image, video]
    if name in ("input_features", "input_values", "audio_values", "input_audio_embeds"):
        source = _within(config, "max_source_positions")
        whisper = [(_BATCH, bins, 2 * int(source))] if isinstance(source, int) else []
        framed = [(_BATCH, 40, bins), (_BATCH, bins, 40), (_BATCH, int(_within(config, "max_length") or 40), bins)]
        wave = [(_BATCH, 4000), (_BATCH, 1, 4000)]
        if name == "input_values":
            return [framed[2], *wave] if _within(config, "frequency_stride") is not None else [*wave, *framed]
        return [*whisper, *framed, *wave]
    if name == "past_values":
        length, series = _within(config, "context_length") or 32, _within(config, "num_input_channels")
        return [(_BATCH, length, series)] if series else [(_BATCH, length)]
    return []


def _patches(root: nn.Module, config: PretrainedConfig) -> dict[str, Any] | None:
    """Two images of different sizes as one row of patches, for vision towers that pack them (``grid_thw``)."""
    names = list(inspect.signature(root.forward).parameters)
    size, channels = _within(config, "patch_size"), _within(config, "in_channels", "in_chans", "num_channels") or 3
    if "grid_thw" not in names or not isinstance(size, int):
        return None
    width = channels * size * size * int(_within(config, "temporal_patch_size") or 1)
    generator = torch.Generator().manual_seed(0)
    return {
        names[0]: torch.randn((16 + 32, width), generator=generator),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
    }

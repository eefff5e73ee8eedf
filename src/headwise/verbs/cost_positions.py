"""What a config fixes about lengths, and what the shapes of weights do not tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from headwise.costs import AttentionNumbers
from headwise.models.families import stack_of
from headwise.models.standin import code_names, methods_of
from headwise.verbs.cost_attention import nearest_config

__all__ = [
    "is_within",
    "masked_above",
    "packs_images",
    "probe_above",
    "set_apart",
    "vision_positions",
]

#: Tokens that a tower of images puts before or behind its patches.
ADDED: Final = (
    "cls_token",
    "class_embedding",
    "distillation_token",
    "register_tokens",
    "detection_tokens",
)
#: Signs of a tower whose number of positions changes from layer to layer or from input to input.
CHANGING: Final = ("depths", "window_size", "num_frames", "temporal_patch_size", "spatial_merge_size", "mask_ratio")


def vision_positions(root: nn.Module, sites: Sequence[AttentionNumbers]) -> int | None:
    """Positions of one image in the vision tower, patches and added tokens, where config and weights fix them.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTModel
        >>> from headwise.verbs.cost_model import numbers_of
        >>> with torch.device("meta"):
        ...     model = ViTModel(ViTConfig(image_size=32, patch_size=8, num_hidden_layers=1))
        >>> vision_positions(model, numbers_of(model).attention)
        17
    """
    blocks = [site.block for site in sites if site.stack == "vision" and site.kind == "self"]
    counts = {_patches(nearest_config(root, block)) for block in blocks}
    patches = counts.pop() if len(counts) == 1 else None
    if patches is None:
        return None
    width = next(site.d_model for site in sites if site.stack == "vision")
    found = list(_of_vision(root))
    added = [weight for name, weight in found if name.rpartition(".")[2] in ADDED and weight.numel() % width == 0]
    positions = patches + sum(weight.numel() // width for weight in added)
    tables = [
        weight.numel() // width
        for name, weight in found
        if any("position_embedding" in part for part in name.split(".")[-2:]) and weight.shape[-1] == width
    ]
    return None if any(not patches <= rows <= positions for rows in tables) else positions


def _of_vision(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return (
        (name, weight)
        for name, weight in root.named_parameters()
        if stack_of(root, name.rpartition(".")[0], causal=False) == "vision"
    )


def _patches(config: Any) -> int | None:
    image, patch = _pair(config, "image_size"), _pair(config, "patch_size")
    if image is None or patch is None or any(hasattr(config, name) for name in CHANGING):
        return None
    return (image[0] // patch[0]) * (image[1] // patch[1])


def _pair(config: Any, name: str) -> tuple[int, int] | None:
    value = getattr(config, name, None)
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    if not all(isinstance(one, int) and one > 0 for one in pair):
        return None
    return pair[0], pair[1]


def masked_above(root: nn.Module, path: str) -> bool:
    """Whether the text tower around a module makes the causal mask that the module does not speak of (CLIP)."""
    if getattr(nearest_config(root, path), "base_config_key", "") != "text_config":
        return False
    return _spoken_of_above(root, path, "create_causal_mask")


def packs_images(root: nn.Module, path: str) -> bool:
    """Whether the tower around a module lays the images of a batch end to end and masks one from another (Pixtral)."""
    return _spoken_of_above(root, path, "generate_block_attention_mask")


def _sees_both_sides(root: nn.Module, path: str) -> bool:
    """Whether the nearest part around a module that makes a mask makes one that hides no later key."""
    for part in reversed(_above(root, path)):
        named = {name for method in methods_of(type(part)) for name in code_names(method.__code__)}
        if masks := {name for name in named if name.startswith("create_") and name.endswith("_mask")}:
            return masks == {"create_bidirectional_mask"}
    return False


def set_apart(root: nn.Module, sites: list[AttentionNumbers]) -> tuple[list[AttentionNumbers], list[str]]:
    """Move models inside a model that write after its own decoder to a stack of their own; returns their paths as well.

    SeamlessM4T writes text, and its ``t2u_model`` then turns that into units of sound, in a generation of its own.
    """
    from transformers import GenerationMixin

    inside = [path for path, part in root.named_modules() if path and isinstance(part, GenerationMixin)]
    if all(is_within(site.block, inside) for site in sites if site.cached and site.causal):
        return sites, []
    return [_second(root, site) if is_within(site.block, inside) else site for site in sites], inside


def _second(root: nn.Module, site: AttentionNumbers) -> AttentionNumbers:
    causal = site.causal and not _sees_both_sides(root, site.block)
    return replace(site, stack="second", cached=False, causal=causal)


def is_within(path: str, outer: Iterable[str]) -> bool:
    """Whether ``path`` is one of ``outer`` or lies inside one."""
    return any(path == one or path.startswith(one + ".") for one in outer)


def _spoken_of_above(root: nn.Module, path: str, name: str) -> bool:
    return any(name in code_names(method.__code__) for part in _above(root, path) for method in methods_of(type(part)))


def probe_above(root: nn.Module, path: str) -> Tensor | None:
    """The learned query with which a pooling head around a module asks, once per sequence (SigLIP), or None."""
    found = (part._parameters.get("probe") for part in _above(root, path))
    return next((probe for probe in found if probe is not None), None)


def _above(root: nn.Module, path: str) -> list[nn.Module]:
    parts = path.split(".")
    return [root.get_submodule(".".join(parts[:length])) for length in range(len(parts))]

"""What a config fixes about lengths, and what the shapes of weights do not tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import Tensor, nn

from headwise.costs import AttentionNumbers
from headwise.models.families import stack_of
from headwise.models.standin import code_names, methods_of
from headwise.models.static import attention_on_seam
from headwise.verbs.cost_attention import nearest_config

__all__ = ["choosing_keys", "in_code_of_its_own", "masked_above", "vision_positions"]

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
    parts = path.split(".")
    around = [root.get_submodule(".".join(parts[:length])) for length in range(len(parts))]
    return any(
        "create_causal_mask" in code_names(method.__code__) for part in around for method in methods_of(type(part))
    )


def in_code_of_its_own(root: nn.Module, sites: Sequence[AttentionNumbers]) -> list[str]:
    """Say which attention is not what transformers' interface calls, where no forward pass has shown what it does."""
    seam = attention_on_seam(root)
    kinds: dict[str, bool] = {}
    for site in sites:
        module = root.get_submodule(site.block)
        if isinstance(module, nn.MultiheadAttention) or any(_within(site.block, path) for path in seam):
            continue
        kinds[type(module).__name__] = site.relative is not None
    return [
        f"{name} computes its attention in code of its own: its heads are read from the shapes of the weights alone"
        + ("" if known else ", and products beyond queries x keys and weights x values are not counted")
        for name, known in kinds.items()
    ]


def choosing_keys(root: nn.Module) -> list[str]:
    """Name what chooses the keys that a query reads (DeepSeek-V3.2's indexer)."""
    kinds = dict.fromkeys(type(part).__name__ for part in root.modules() if type(part).__name__.endswith("Indexer"))
    return [
        f"{name} chooses the keys that are read: its scores are not counted, and heads are counted over all visible "
        "keys"
        for name in kinds
    ]


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(other + ".") or other.startswith(path + ".")

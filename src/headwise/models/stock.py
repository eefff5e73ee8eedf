"""Whether a cut model can be said in transformers' own terms: one config, and weights that its class takes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from headwise.models.cut_modules import HeadCut, cut_of

__all__ = ["COUNTS", "expressible", "replaced_while_running", "settle", "stock_config"]

_HEADS: Final = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_decoder_heads",
)
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
#: Names under which configs count heads.
COUNTS: Final = (*_HEADS, *_KV_HEADS)
_REFUSALS: Final = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    ZeroDivisionError,
    AssertionError,
    NotImplementedError,
    IndexError,
    StrictDataclassError,
)


def expressible(module: nn.Module) -> str | None:
    """None where transformers can load the model by its config as it is; otherwise why not."""
    cuts = list(_cuts(module))
    for path, cut in cuts:
        if cut.adapts or cut.config:
            return f"{path}: its heads and key-value heads are paired by a map of their own"
        if cut.narrow:
            return f"{path}: what it is given for every head ({', '.join(cut.narrow)}) is narrowed to the heads left"
        if cut.fit:
            return f"{path}: its code lays the heads side by side as wide as its input, which they no longer are"
        if not cut.heads:
            return f"{path}: it has no heads left"
    why = _compared(module, getattr(module, "config", None))
    kinds = {type(module.get_submodule(path)) for path, _ in cuts}
    whole = any(type(part) in kinds and cut_of(part) is None for part in module.modules())
    if why is None or not cuts:
        return why
    if whole or len({len(cut.heads) for _, cut in cuts}) > 1:
        return "its layers have different numbers of heads"
    recounted = _recounted(module)
    return why if recounted is None else _compared(module, recounted) or why


def _cuts(module: nn.Module) -> Iterator[tuple[str, HeadCut]]:
    for path, part in module.named_modules():
        cut = cut_of(part)
        if cut is not None:
            yield path, cut


def stock_config(module: nn.Module) -> Any | None:
    """A config under which transformers builds the cut model, or None."""
    changed = _recounted(module)
    if changed is None or _compared(module, changed) is not None or not _same_buffers(module, changed):
        return None
    return changed


def _recounted(module: nn.Module) -> Any | None:
    """The config with the counts of the cut blocks, or None where they differ or it does not take them."""
    cuts = list(_cuts(module))
    config = getattr(module, "config", None)
    if not cuts or config is None:
        return None
    shapes = {(cut.original, len(cut.heads), cut.kv_heads, cut.d_k) for _, cut in cuts}
    if len(shapes) != 1 or any(cut.adapts or cut.config or cut.narrow or cut.fit for _, cut in cuts):
        return None
    original, heads, kv_heads, d_k = shapes.pop()
    if not heads:
        return None
    found = None
    for width in (None, d_k):
        try:
            changed = copy.deepcopy(config)
            _set_counts(changed, original, heads, kv_heads, d_k)
            if width is not None:  # Qwen2 and Granite read it where a config has it, and have none by themselves
                if hasattr(config, "head_dim"):
                    break
                changed.head_dim = width
            changed = type(changed).from_dict(changed.to_dict())
            changed._attn_implementation = config._attn_implementation
        except _REFUSALS:
            continue
        if _compared(module, changed) is None and (width is None or _same_buffers(module, changed)):
            return changed
        found = found or changed
    return found


def _same_buffers(module: nn.Module, config: Any) -> bool:
    """Whether what is built from ``config`` has buffers of the same shapes, frequencies of rotations among them."""
    fresh = _fresh(module, config)
    if isinstance(fresh, str):
        return False
    ours, theirs = ({name: value.shape for name, value in one.named_buffers()} for one in (module, fresh))
    return ours == theirs


def _set_counts(config: Any, original: int, heads: int, kv_heads: int, d_k: int) -> None:
    grouped = [name for name in _KV_HEADS if isinstance(getattr(config, name, None), int)]
    for name in _HEADS:
        if name not in grouped and getattr(config, name, None) == original:
            setattr(config, name, heads)
    for name in grouped:
        setattr(config, name, kv_heads)
    if hasattr(config, "head_dim"):
        config.head_dim = d_k


def settle(module: nn.Module) -> None:
    """Give a cut model a config that says its counts, where one can: in place, for the config is the model's own."""
    config = stock_config(module)
    if config is None:
        return
    mine = vars(getattr(module, "config"))  # noqa: B009
    for name in (*_HEADS, *_KV_HEADS, "head_dim"):
        if name in vars(config):
            mine[name] = vars(config)[name]


def replaced_while_running(module: nn.Module, paths: Collection[str]) -> str | None:
    """The first of ``paths`` where the model holds another kind of module than its class builds, or None.

    BigBird puts another attention module in the place of its own when it meets a short input, and could do so again.
    """
    if not paths:
        return None
    fresh = _fresh(module, getattr(module, "config", None))
    if isinstance(fresh, str):
        return None
    names = dict(fresh.named_modules(remove_duplicate=False))
    return next((path for path in paths if type(names.get(path)) is not type(module.get_submodule(path))), None)


def _fresh(module: nn.Module, config: Any) -> nn.Module | str:
    """What the model's class builds from ``config``, without values; or why it builds nothing."""
    kind: Any = type(module)
    try:
        with torch.device("meta"):
            fresh: nn.Module = kind(copy.deepcopy(config))
    except _REFUSALS as refusal:
        return f"{type(config).__name__} does not take these counts ({type(refusal).__name__}: {refusal})"
    return fresh


def _compared(module: nn.Module, config: Any) -> str | None:
    """Build the class on the meta device and compare shapes and counts; None where they agree."""
    if config is None:
        return "it has no config"
    fresh = _fresh(module, config)
    if isinstance(fresh, str):
        return fresh
    ours = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in fresh.state_dict().items()}
    if ours != theirs:
        name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
        if name not in theirs and name.endswith(".bias"):
            return (
                f"{type(config).__name__} builds no {name}, which holds the intercept of the repair; a cut with "
                "repair none has no intercept"
            )
        return f"{name} is {ours.get(name)} here, and {theirs.get(name)} in what {type(config).__name__} builds"
    for path, part in module.named_modules():
        if cut_of(part) is None:
            continue
        other = vars(fresh.get_submodule(path))
        for name, value in vars(part).items():
            if type(value) in (int, float) and other.get(name) != value:
                return f"{path}.{name} is {value} here, and {other.get(name)} in what {type(config).__name__} builds"
    return None

"""Whether a cut model can be said in transformers' own terms: one config, and weights that its class takes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final

from torch import nn

from headwise.models.cut_modules import HeadCut, cut_of, install
from headwise.models.switches import REFUSALS, Switch, built, shapes_of, switch_for

__all__ = ["COUNTS", "expressible", "recounted", "replaced_while_running", "settle", "stock_config", "switch_of"]

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
    cut_down = any(len(cut.heads) != cut.original for _, cut in cuts)  # running means may leave every head
    if (whole and cut_down) or len({len(cut.heads) for _, cut in cuts}) > 1:
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
    found = None
    for changed, widened in _candidates(module):
        if _compared(module, changed) is None and (not widened or _same_buffers(module, changed)):
            return changed
        found = found or changed
    return found


def _candidates(module: nn.Module) -> Iterator[tuple[Any, bool]]:
    cuts = list(_cuts(module))
    config = getattr(module, "config", None)
    if not cuts or config is None:
        return
    shapes = {(cut.original, len(cut.heads), cut.kv_heads, cut.d_k) for _, cut in cuts}
    if len(shapes) != 1 or any(cut.adapts or cut.narrow or cut.fit for _, cut in cuts):
        return
    original, heads, kv_heads, d_k = shapes.pop()
    if heads:
        for changed, widened in recounted(config, original, heads, kv_heads, d_k):
            if all(_agree(cut, changed) for _, cut in cuts):
                yield changed, widened


def _agree(cut: HeadCut, config: Any) -> bool:
    """Whether a config says what a cut module is told in its place."""
    return all(getattr(config, name, None) == value for name, value in cut.config.items())


def recounted(config: Any, original: int, heads: int, kv_heads: int, d_k: int) -> Iterator[tuple[Any, bool]]:
    """Configs with other counts, as far as the class of ``config`` takes them, and whether a width was added to it.

    Args:
        config: of the model.
        original: how many heads it has, or had before it was first cut.
        heads, kv_heads, d_k: what it is to say.
    """
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
        except REFUSALS:
            continue
        yield changed, width is not None


def switch_of(module: nn.Module) -> Switch | None:
    """For a cut model whose biases have no place in a stock checkpoint: the change of its config that gives them one.

    None where there is none, and where none is needed.
    """
    candidates = list(_candidates(module))
    if any(_compared(module, changed) is None for changed, _ in candidates):
        return None
    shapes = shapes_of(module)
    found = (switch_for(module, shapes, changed) for changed, _ in candidates)
    return next((one for one in found if one is not None and _same_buffers(module, one.config)), None)


def _same_buffers(module: nn.Module, config: Any) -> bool:
    """Whether what is built from ``config`` has buffers of the same shapes, frequencies of rotations among them."""
    fresh = built(module, config)
    if isinstance(fresh, str):
        return False
    ours, theirs = ({name: value.shape for name, value in one.named_buffers()} for one in (module, fresh))
    return ours == theirs


def _set_counts(config: Any, original: int, heads: int, kv_heads: int, d_k: int) -> None:
    width = getattr(config, "head_dim", None)
    grouped = [name for name in _KV_HEADS if isinstance(getattr(config, name, None), int)]
    said = {name: getattr(config, name, None) for name in _HEADS if name not in grouped}
    counts = {value for value in said.values() if value is not None}
    if original not in counts and len(counts) == 1:  # it was cut before, and says what was left
        original = counts.pop()
    for name, value in said.items():
        if value == original:
            setattr(config, name, heads)
    for name in grouped:
        setattr(config, name, kv_heads)
    if hasattr(config, "head_dim") and width in (None, d_k):  # DeepSeek's says the rotary part of a head
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
    for path, cut in _cuts(module):
        if cut.config:  # the model's own config says it now
            install(module.get_submodule(path), replace(cut, config={}))


def replaced_while_running(module: nn.Module, paths: Collection[str]) -> str | None:
    """The first of ``paths`` where the model holds another kind of module than its class builds, or None.

    BigBird puts another attention module in the place of its own when it meets a short input, and could do so again.
    """
    if not paths:
        return None
    fresh = built(module, getattr(module, "config", None))
    if isinstance(fresh, str):
        return None
    names = dict(fresh.named_modules(remove_duplicate=False))
    return next((path for path in paths if type(names.get(path)) is not type(module.get_submodule(path))), None)


def _compared(module: nn.Module, config: Any) -> str | None:
    """Build the class on the meta device and compare shapes and counts; None where they agree."""
    if config is None:
        return "it has no config"
    fresh = built(module, config)
    if isinstance(fresh, str):
        return fresh
    ours, theirs = shapes_of(module), shapes_of(fresh)
    if ours != theirs:
        name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
        if name not in theirs and name.endswith(".bias"):
            return (
                f"{type(config).__name__} builds no {name}, which holds the intercept of the repair; the repairs "
                "least_squares_no_bias and none have no intercept"
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

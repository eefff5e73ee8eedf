"""Key-value caches in the input of a proof: copied before every run, and narrowed to the heads that are left.

A cache that came with the example holds the keys and values of the whole model. What is given to a layer without
heads must lack theirs, too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from headwise.errors import UnsupportedError
from headwise.models.headless import HeadlessLayer

__all__ = ["Narrowing", "copied", "holds_cache", "narrowed", "narrowings_of"]


@dataclass(frozen=True)
class Narrowing:
    """What is left of one layer of a cache.

    Attributes:
        layer: its index in the cache.
        cross: whether it is of cross-attention.
        before: how many key-value heads there were.
        kv: which are left.
    """

    layer: int
    cross: bool
    before: int
    kv: tuple[int, ...]


def copied(value: Any) -> Any:
    """``value`` with its tensors and caches copied, in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Cache):
        return copy.deepcopy(value)
    if type(value) in (list, tuple):
        return type(value)(copied(one) for one in value)
    if type(value) is dict:
        return {name: copied(one) for name, one in value.items()}
    return value


def holds_cache(value: Any) -> bool:
    """Whether a cache with keys in it is anywhere in ``value``."""
    if isinstance(value, Cache):
        return any(isinstance(getattr(layer, "keys", None), Tensor) for one in _plain(value) for layer in one.layers)
    if isinstance(value, Mapping):
        return any(map(holds_cache, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_cache, value))


def narrowings_of(root: nn.Module, kept: Mapping[str, tuple[int, tuple[int, ...]]], cross: set[str]) -> list[Narrowing]:
    """For each cut block, by path, what is left of its layer of a cache.

    Args:
        root: the model.
        kept: the number of key-value heads before the cut, and which are left.
        cross: the blocks that attend to an encoder's output.

    Raises:
        UnsupportedError: a module does not say which layer of a cache is its own.
    """
    found = []
    for path, (before, kv) in kept.items():
        layer = getattr(root.get_submodule(path), "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedError(
                f"{path}: it does not say which layer of a cache is its own, so the cache in the example cannot be cut "
                "with it; give an example without a cache"
            )
        found.append(Narrowing(layer, path in cross, before, kv))
    return found


def narrowed(value: Any, narrowings: Sequence[Narrowing]) -> Any:
    """A copy of ``value`` in which caches hold only the key-value heads that are left."""
    if isinstance(value, Cache):
        cache = copy.deepcopy(value)
        for one in narrowings:
            _narrow(_own(cache, cross=one.cross), one)
        return cache
    if type(value) in (list, tuple):
        return type(value)(narrowed(one, narrowings) for one in value)
    if type(value) is dict:
        return {name: narrowed(one, narrowings) for name, one in value.items()}
    return value


def _plain(cache: Cache) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _own(cache: Any, *, cross: bool) -> Any:
    if not isinstance(cache, EncoderDecoderCache):
        return cache
    return cache.cross_attention_cache if cross else cache.self_attention_cache


def _narrow(cache: Any, one: Narrowing) -> None:
    layers = cache.layers
    if one.layer >= len(layers):
        return
    layer = layers[one.layer]
    for name in ("keys", "values"):
        held = getattr(layer, name, None)
        if isinstance(held, Tensor) and held.ndim == 4 and held.shape[1] == one.before:
            index = torch.tensor(one.kv, dtype=torch.long, device=held.device)
            setattr(layer, name, held.index_select(1, index))
    if not one.kv and type(layer) is DynamicLayer:
        layer.__class__ = HeadlessLayer

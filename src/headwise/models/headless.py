"""Attention modules of which no head is left: their own code runs on tensors without elements.

Three things stop it. ``view(batch, -1, 0, width)`` cannot tell what -1 stands for; inside such a module it is told from
the shape that is viewed. ``split(0)`` of nothing gives one part where the code expects queries, keys and values. And
a key-value cache whose layer holds no elements says that it holds no tokens; its
layer is made one that counts them. The cache of such a layer takes 0 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from headwise.models.hooks import Running, take_off

__all__ = ["HeadlessLayer", "caches_of", "run_without_heads"]


class HeadlessLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a key-value cache whose keys (B, 0, K, D_k) have no elements; it counts its tokens all the same."""

    def get_seq_length(self) -> int:
        """How many tokens it has seen."""
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys is not None and self.keys.ndim == 4 else 0


def run_without_heads(module: nn.Module, fused: int, width: int) -> None:
    """Let the forward code of ``module`` run without heads; with ``fused`` 0 as it is.

    Args:
        module: the attention module.
        fused: into how many parts its code splits what its projections put out, where that has no columns.
        width: of a key, where nothing else tells how wide the heads are of which there are none.
    """
    take_off(module, _Emptied)
    if fused:
        _Emptied(partial(_Views, fused, width)).put_around(module)


class _Emptied(Running):
    """Of modules without heads."""

    def after(self, given: list[Any]) -> None:
        """Let layers of caches that hold no elements count their tokens all the same."""
        for cache in caches_of(given):
            for layer in cache.layers:
                keys = getattr(layer, "keys", None)
                if type(layer) is DynamicLayer and isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[1] == 0:
                    layer.__class__ = HeadlessLayer


def caches_of(given: list[Any]) -> Iterator[Cache]:
    """The key-value caches among the arguments of a module."""
    for value in given:
        if isinstance(value, EncoderDecoderCache):
            yield from (value.self_attention_cache, value.cross_attention_cache)
        elif isinstance(value, Cache):
            yield value


class _Views(TorchFunctionMode):
    """Tells what -1 stands for in a view of a tensor without elements, and splits such a tensor into parts."""

    def __init__(self, fused: int, width: int) -> None:
        super().__init__()
        self.fused, self.width = fused, width

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.view, Tensor.reshape, torch.reshape) and args and args[0].numel() == 0:
            shape = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
            if -1 in shape and 0 in shape:
                return func(args[0], _resolved(tuple(args[0].shape), tuple(shape), self.width))
        if func in (Tensor.split, torch.split) and len(args) > 1 and args[1] == 0 and args[0].numel() == 0:
            return (args[0],) * self.fused
        return func(*args, **(kwargs or {}))


def _resolved(source: tuple[int, ...], target: tuple[int, ...], width: int) -> tuple[int, ...]:
    """``target`` with -1 replaced, after the axes that both have in common at either end; behind no heads by ``width``.

    >>> _resolved((2, 7, 0), (2, -1, 0, 8), 8)
    (2, 7, 0, 8)
    >>> _resolved((2, 7, 0), (-1, 0), 8)
    (14, 0)
    >>> _resolved((14, 0), (14, 3, 0, -1), 8)
    (14, 3, 0, 8)
    """
    at = target.index(-1)
    if at == len(target) - 1 and at and target[at - 1] == 0:
        return (*target[:at], width)
    start, end = 0, 0
    while start < min(at, len(source)) and source[start] == target[start]:
        start += 1
    while end < min(len(target) - at - 1, len(source) - start) and source[-1 - end] == target[-1 - end]:
        end += 1
    rest = source[start : len(source) - end]
    alone = len(target) - start - end == 1
    size = prod(rest) if alone else (rest[0] if rest else 1)
    return (*target[:at], size, *target[at + 1 :])

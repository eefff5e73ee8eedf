"""Attention modules of which no head is left: their own code runs on tensors without elements.

Three things stop it. ``view(batch, -1, 0, width)`` cannot tell what -1 stands for; inside such a module it is told from
the shape that is viewed. ``split(0)`` of nothing gives one part where the code expects queries, keys and values. And
a key-value cache whose layer holds no elements says that it holds no tokens; its
layer is made one that counts them. The cache of such a layer takes 0 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

__all__ = ["HeadlessLayer", "run_without_heads"]


class HeadlessLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a key-value cache whose keys (B, 0, K, D_k) have no elements; it counts its tokens all the same."""

    def get_seq_length(self) -> int:
        """How many tokens it has seen."""
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys is not None and self.keys.ndim == 4 else 0


def run_without_heads(module: nn.Module, fused: int) -> None:
    """Let the forward code of ``module`` run without heads; a second time changes nothing.

    Args:
        module: the attention module.
        fused: into how many parts its code splits what its projections put out, where that has no columns.
    """
    if not isinstance(vars(module).get("forward"), _Forward):
        module.forward = _Forward(module.forward, fused)


class _Forward:
    """The forward of a module, run so that it needs no heads.

    Not a pair of hooks: torch calls the second one after an ``Exception`` at most, so that an interrupt would leave the
    mode behind.
    """

    def __init__(self, own: Callable[..., Any], fused: int) -> None:
        self.__wrapped__, self.fused = own, fused  # inspect.signature goes on to what is wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with _Views(self.fused):
                return self.__wrapped__(*args, **kwargs)
        finally:
            _count_tokens([*args, *kwargs.values()])


def _count_tokens(given: list[Any]) -> None:
    """Let layers of caches that hold no elements count their tokens all the same."""
    for cache in _caches(given):
        for layer in cache.layers:
            keys = getattr(layer, "keys", None)
            if type(layer) is DynamicLayer and isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[1] == 0:
                layer.__class__ = HeadlessLayer


def _caches(given: list[Any]) -> Iterator[Cache]:
    for value in given:
        if isinstance(value, EncoderDecoderCache):
            yield from (value.self_attention_cache, value.cross_attention_cache)
        elif isinstance(value, Cache):
            yield value


class _Views(TorchFunctionMode):
    """Tells what -1 stands for in a view of a tensor without elements, and splits such a tensor into parts."""

    def __init__(self, fused: int) -> None:
        super().__init__()
        self.fused = fused

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.view, Tensor.reshape, torch.reshape) and args and args[0].numel() == 0:
            shape = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
            if -1 in shape and 0 in shape:
                return func(args[0], _resolved(tuple(args[0].shape), tuple(shape)))
        if func in (Tensor.split, torch.split) and len(args) > 1 and args[1] == 0 and args[0].numel() == 0:
            return (args[0],) * self.fused
        return func(*args, **(kwargs or {}))


def _resolved(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """``target`` with -1 replaced, after the axes that both have in common at either end.

    >>> _resolved((2, 7, 0), (2, -1, 0, 8))
    (2, 7, 0, 8)
    >>> _resolved((2, 7, 0), (-1, 0))
    (14, 0)
    """
    at = target.index(-1)
    start, end = 0, 0
    while start < min(at, len(source)) and source[start] == target[start]:
        start += 1
    while end < min(len(target) - at - 1, len(source) - start) and source[-1 - end] == target[-1 - end]:
        end += 1
    rest = source[start : len(source) - end]
    alone = len(target) - start - end == 1
    size = prod(rest) if alone else (rest[0] if rest else 1)
    return (*target[:at], size, *target[at + 1 :])

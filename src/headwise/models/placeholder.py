"""Attention modules of which no head is left and whose code does not run on tensors without elements.

Such a module runs on a placeholder: where its projections put out nothing, its code is given one head of zeros, and of
what its attention computes for that head the output projection reads nothing. So its output is the bias of the output
projection, whatever stands between. A growing key-value cache keeps nothing of the placeholder: it takes 0 bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from headwise.models.headless import HeadlessLayer, caches_of
from headwise.models.hooks import drop_hooks

__all__ = ["run_on_placeholder"]


def run_on_placeholder(module: nn.Module, widths: Mapping[str, int]) -> None:
    """Let the forward code of ``module`` run on one head of zeros; without ``widths`` on what it has.

    Args:
        module: the attention module.
        widths: for each of its layers that projects its input how many zeros stand for what the layer puts out.
    """
    for part in module.modules():
        drop_hooks(part, (_Placeholder, _Zeros, _Nothing))
    if not widths:
        return
    for name, width in widths.items():
        module.get_submodule(name).register_forward_hook(_Zeros(width))
    own = _Placeholder()
    module.register_forward_pre_hook(own.enter, with_kwargs=True)
    module.register_forward_hook(own.leave, with_kwargs=True, always_call=True)
    for part in module.modules():
        if part is not module and isinstance(getattr(part, "weight", None), Tensor):
            part.register_forward_pre_hook(_Nothing())


class _Zeros:
    """What a projection without rows puts out."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.new_zeros(*output.shape[:-1], self.width)


class _Nothing:
    """What a layer without columns reads; other layers read what they are given."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (args[0][..., :0], *args[1:]) if _reads_nothing(module) else None


def _reads_nothing(layer: nn.Module) -> bool:
    weight: Any = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.numel():
        return False
    return weight.shape[0 if hasattr(layer, "nf") else 1] == 0 and max(weight.shape) > 0


class _Placeholder:
    """Gives the caches of a module a head while its code runs, and takes it away again."""

    def __init__(self) -> None:
        self.hollow: dict[int, list[tuple[Cache, int]]] = {}  # of each thread that runs the module

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hollow = self.hollow[threading.get_ident()] = []
        for cache, at in self._layers(module, args, kwargs):
            layer: Any = cache.layers[at] if at < len(cache.layers) else None
            if layer is None or not isinstance(getattr(layer, "keys", None), Tensor):
                hollow.append((cache, at))
            elif type(layer) is HeadlessLayer and layer.keys.ndim == 4 and layer.keys.shape[1] == 0:
                hollow.append((cache, at))
                layer.keys, layer.values = (_one_head(held) for held in (layer.keys, layer.values))

    def leave(self, module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> Any:
        for cache, at in self.hollow.pop(threading.get_ident(), ()):
            layer: Any = cache.layers[at] if at < len(cache.layers) else None
            keys = getattr(layer, "keys", None)
            if type(layer) in (DynamicLayer, HeadlessLayer) and isinstance(keys, Tensor) and keys.ndim == 4:
                layer.keys, layer.values = (_no_head(held) for held in (layer.keys, layer.values))
                layer.__class__ = HeadlessLayer
        if any(_reads_nothing(part) for part in module.modules()):
            return output
        if isinstance(output, Tensor):
            return output[..., :0]
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (output[0][..., :0], *output[1:])
        return output

    def _layers(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, int]]:
        at = getattr(module, "layer_idx", None)
        return [(cache, at) for cache in caches_of([*args, *kwargs.values()])] if isinstance(at, int) else []


def _one_head(held: Tensor) -> Tensor:
    """(B, 0, K, D) as (B, 1, K, D) zeros that take no memory."""
    return held.new_zeros(()).expand(held.shape[0], 1, *held.shape[2:])


def _no_head(held: Tensor) -> Tensor:
    """(B, 1, K, D) as (B, 0, K, D)."""
    return torch.empty((held.shape[0], 0, *held.shape[2:]), dtype=held.dtype, device=held.device)

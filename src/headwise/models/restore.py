"""Puts the stand-in name into a model's configs, and everything back as it was.

A config may be shared by several models and held by several sessions at once, so who holds it is
counted: the last one to let go puts the model's own name back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headwise.models.cut_modules import CutConfig
from headwise.models.standin import MaskMode, StandIn, original_of, register

__all__ = ["configs_of", "eager", "held", "ordinary", "unchanged"]

_FIELD: Final = "_attn_implementation_internal"
_LOCK = threading.RLock()


class _Held:
    """One config: what it said before, and the sessions that hold it, latest last."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.had = _FIELD in vars(config)
        self.before = vars(config).get(_FIELD)
        self.holders: list[tuple[object, MaskMode]] = []


_HELD: dict[int, _Held] = {}
_HOLD_NO_CONFIG = frozenset((OrderedDict, dict, set, bool, int, float, str, type(None)))  # nearly all that a module has


def configs_of(module: nn.Module) -> list[PretrainedConfig]:
    """Every config object that the model's modules or their configs refer to, without repetition."""
    found: dict[int, PretrainedConfig] = {}
    waiting = [
        value for part in module.modules() for value in vars(part).values() if type(value) not in _HOLD_NO_CONFIG
    ]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], PretrainedConfig):
            waiting.extend(value)
        elif isinstance(value, CutConfig):
            waiting.append(value.cut_base)
        elif isinstance(value, PretrainedConfig) and id(value) not in found:
            found[id(value)] = value
            waiting.extend(vars(value).values())
    return list(found.values())


@contextmanager
def held(module: nn.Module, masks: MaskMode, function_for: Any) -> Iterator[None]:
    """Inside, every config of ``module`` names the stand-in of its own implementation.

    Args:
        module: the model.
        masks: ``"compact"`` or ``"dense"``.
        function_for: makes the attention function that stands in for a given implementation.
    """
    token = object()
    configs = configs_of(module)
    try:
        with _LOCK:
            for config in configs:
                entry = _HELD.setdefault(id(config), _Held(config))
                entry.holders.append((token, masks))
                _show(entry, function_for)
        yield
    finally:
        with _LOCK:
            for config in configs:
                entry = _HELD.get(id(config), _Held(config))
                entry.holders = [holder for holder in entry.holders if holder[0] is not token]
                if entry.holders:
                    _show(entry, function_for)
                elif id(config) in _HELD:
                    del _HELD[id(config)]
                    _put_back(entry)


def _put_back(entry: _Held) -> None:
    if entry.had:
        vars(entry.config)[_FIELD] = entry.before
    else:
        vars(entry.config).pop(_FIELD, None)


def _show(entry: _Held, function_for: Any) -> None:
    original = original_of(entry.before)
    masks = entry.holders[-1][1]
    name = StandIn(original, masks)
    register(original, masks, function_for(original))
    vars(entry.config)[_FIELD] = name


@contextmanager
def eager(module: nn.Module) -> Iterator[bool]:
    """Inside, ``module`` runs transformers' eager attention; yields whether that is a change."""
    configs = [config for config in configs_of(module) if vars(config).get(_FIELD) not in (None, "eager")]
    before = [(config, vars(config)[_FIELD]) for config in configs]
    try:
        for config in configs:
            vars(config)[_FIELD] = "eager"
        yield bool(configs)
    finally:
        for config, name in before:
            vars(config)[_FIELD] = name


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside; modes, buffers and the random state as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if buffer.device.type != "meta"]
    devices = sorted({tensor.device.index or 0 for tensor in module.parameters() if tensor.device.type == "cuda"})
    try:
        module.eval()
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        for buffer, value in buffers:
            if not _same(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


@contextmanager
def ordinary(module: nn.Module) -> Iterator[None]:
    """Inside, what is made of ``module`` can have gradients, also where the caller is in torch's inference mode.

    A model whose weights were made in that mode stays in it.
    """
    if not torch.is_inference_mode_enabled() or any(value.is_inference() for value in module.parameters()):
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)

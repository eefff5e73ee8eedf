"""Runs one attention module of a probe again, with gradients, and keeps what tells whose its weights are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from headwise.models.by_gradient import Replayed
from headwise.models.interface import delegate
from headwise.models.problems import Call

__all__ = ["Replay", "taken"]


def taken(value: Any) -> Any:
    """What a module is given, so that it can be given once more: caches copied, containers made anew, tensors as is."""
    if isinstance(value, Cache):
        return copy.deepcopy(value)
    if type(value) in (list, tuple):
        return type(value)(taken(one) for one in value)
    if type(value) is dict:
        return {name: taken(one) for name, one in value.items()}
    return value


class Replay:
    """The second run of one module, and a third one in which attention puts out zeros.

    Args:
        module: the attention module.
        groups: which of the key-value heads that attention gets are the module's own; None for all.
    """

    def __init__(self, module: nn.Module, groups: Sequence[int] | None) -> None:
        self.module, self.groups = module, groups
        self.seen = Replayed()
        self._zero = False

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replayed:
        """What was seen.

        Raises:
            RuntimeError: the module does not run with gradients.
        """
        device = _cards(args, kwargs)
        with torch.random.fork_rng(devices=device), torch.enable_grad():
            self.module.forward(*taken(tuple(args)), **taken(dict(kwargs)))
        if self.seen.reads:
            self._zero = True
            with torch.random.fork_rng(devices=device):
                self.module.forward(*taken(tuple(args)), **taken(dict(kwargs)))
        return self.seen

    def take(self, call: Call) -> tuple[Tensor, Any]:
        """Attention's own output, cut off from what made it; of another module as it is."""
        with torch.no_grad():
            output, weights = delegate(call)
        if call.module is not self.module:
            return output, weights
        if self._zero:
            return torch.zeros_like(output), weights
        key, value = call.key, call.value
        if self.groups is not None:
            key, value = key[:, list(self.groups)], value[:, list(self.groups)]
        self.seen.query.append(call.query)
        self.seen.key.append(key)
        self.seen.value.append(value)
        flat = output.detach().flatten(2).requires_grad_()
        self.seen.z.append(flat)
        return flat.clone().view(output.shape), weights

    def puts_out(self, path: str, given: Tensor, output: Tensor, *, transposed: bool) -> Tensor | None:
        """What the layer ``path`` of the module is to put out instead: the same, cut off from what made it."""
        if self._zero or not output.is_floating_point():
            return None
        leaf = output.detach().clone().requires_grad_()
        self.seen.leaves[path], self.seen.transposed[path] = leaf, transposed
        if given.requires_grad:
            self.seen.inner.add(path)
        return leaf.clone()

    def reads(self, path: str, given: Tensor) -> None:
        """A linear layer reads something."""
        if not self.seen.z or given.shape[-1] != self.seen.z[0].shape[-1]:
            return
        if not self._zero and given.requires_grad:
            self.seen.reads[path] = given
        elif self._zero and not bool(given.any()):
            self.seen.silent.add(path)


def _cards(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """The graphics cards whose random state a run may change."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    return sorted({one.device.index or 0 for one in tensors if one.device.type == "cuda"})

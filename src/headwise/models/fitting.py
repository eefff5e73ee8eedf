"""Cut attention modules whose code lays its heads side by side as wide as its input, which is wider than they are.

``z.reshape(batch, length, width)``, with the width read off the input, is impossible for the heads that are left. In
such a module a view that is impossible is given the last width that fits; every view that is possible, and every view
with a -1, stays what it is. Whether the module then computes the same is proved on real input.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.models.hooks import Running, take_off

__all__ = ["fit_views", "fitted"]


def fit_views(module: nn.Module, *, on: bool) -> None:
    """From now on impossible views in the forward code of ``module`` are given the last width that fits, or not."""
    take_off(module, _Fitting)
    if on:
        _Fitting(_Views).put_around(module)


class _Fitting(Running):
    """Of cut modules whose views are fitted."""


class _Views(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.view, Tensor.reshape, torch.reshape) and len(args) > 1 and isinstance(args[0], Tensor):
            asked = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
            found = fitted(args[0].numel(), tuple(asked))
            if found is not None:
                return func(args[0], found)
        return func(*args, **(kwargs or {}))


def fitted(count: int, asked: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The shape ``asked`` with the last width under which it has ``count`` elements; None where it stays as it is.

    >>> fitted(2 * 7 * 24, (2, 7, 32)), fitted(2 * 7 * 32, (2, 7, 32)), fitted(2 * 7 * 24, (2, -1, 32))
    ((2, 7, 24), None, None)
    """
    if not asked or not all(type(size) is int and size > 0 for size in asked) or prod(asked) <= count:
        return None
    rest = prod(asked[:-1])
    return (*asked[:-1], count // rest) if count and count % rest == 0 else None

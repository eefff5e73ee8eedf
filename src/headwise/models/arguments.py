"""Arguments of an attention module that hold something for every head: a bias of positions, slopes, a mask.

Some models compute these once for all layers (MPNet's table of relative positions, the slopes of ALiBi in BLOOM, MPT
and Falcon) and hand them to every attention module. A module that lost heads is given what belongs to those left.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.hooks import drop_hooks

__all__ = ["narrow_arguments", "narrowed", "of_heads", "places_of"]


def of_heads(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Iterator[str]:
    """Names of the arguments of one call of ``module`` that seem to have an axis of ``count`` heads.

    It may be a coincidence of sizes (a batch of as many rows as there are heads): a proof decides.
    """
    for name, value in (*zip(places_of(module), args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor) and value.ndim in (3, 4) and _axis(value, count) is not None:
            yield name


def narrowed(given: Any, heads: Sequence[int], count: int) -> Any:
    """What is left of ``given`` for ``heads``, where it has an axis of ``count`` heads; else ``given`` itself.

    Args:
        given: (B or 1, H, ..., ...), or (B * H or H, ..., ...) with the heads of one example side by side, or (H,).
        heads: numbers of the heads that are left.
        count: how many there were (H).
    """
    axis = _axis(given, count) if isinstance(given, Tensor) else None
    if axis is None:
        return given
    index = torch.tensor(list(heads), dtype=torch.long, device=given.device)
    if given.ndim == 3:
        return given.unflatten(0, (-1, count)).index_select(1, index).flatten(0, 1)
    return given.index_select(axis, index)


def _axis(value: Tensor, count: int) -> int | None:
    """The axis that may count heads."""
    if value.ndim not in (1, 3, 4) or count < 2:
        return None
    axis = int(value.ndim == 4)
    size = value.shape[axis]
    return axis if size == count or (value.ndim == 3 and size > 0 and size % count == 0) else None


def places_of(module: nn.Module) -> list[str]:
    """Names of the arguments that the forward code of ``module`` takes, in their order."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in inspect.signature(module.forward).parameters.items() if one.kind not in variable]


class _Narrow:
    """Stands before the forward code of a cut module."""

    def __init__(self, names: tuple[str, ...], places: list[str], heads: tuple[int, ...], count: int) -> None:
        self.names, self.places, self.heads, self.count = names, places, heads, count

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        places = (*self.places, *("" for _ in args))
        left = tuple(self._given(name, value) for name, value in zip(places, args, strict=False))
        return left, {name: self._given(name, value) for name, value in kwargs.items()}

    def _given(self, name: str, value: Any) -> Any:
        return narrowed(value, self.heads, self.count) if name in self.names else value


def narrow_arguments(module: nn.Module, names: tuple[str, ...], heads: tuple[int, ...], count: int) -> None:
    """From now on ``module`` is given, of the arguments ``names``, what belongs to ``heads`` of ``count``.

    Takes the place of what it was told before; without names it gets all its arguments as they are.
    """
    drop_hooks(module, (_Narrow,))
    if names:
        module.register_forward_pre_hook(_Narrow(names, places_of(module), heads, count), with_kwargs=True)

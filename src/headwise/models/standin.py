"""Names under which headwise stands in for a model's own attention implementation.

A model reads the name of its implementation from its config and sometimes branches on it
(``if config._attn_implementation == "eager"``). The stand-in name is a different key in
transformers' tables and still compares equal to the name that it replaces, so that the model
takes the same branches as without headwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwise.errors import UnsupportedError
from headwise.models.masks import compact_mask

__all__ = ["MaskMode", "StandIn", "code_names", "methods_of", "own_function", "register"]

MaskMode = Literal["compact", "dense"]

_LOCK = threading.Lock()


class StandIn(str):
    """``"headwise-compact:sdpa"``, which also equals ``"sdpa"``."""

    __slots__ = ("masks", "original")

    original: str
    masks: MaskMode

    def __new__(cls, original: str, masks: MaskMode) -> StandIn:
        """The stand-in for ``original``, with compact or dense masks."""
        name = super().__new__(cls, f"headwise-{masks}:{original}")
        name.original = original
        name.masks = masks
        return name

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (type(other) is str and other == self.original)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy of a config is of the model as it is, not of a session that looks at it."""
        return str, (self.original,)


def original_of(name: str | None) -> str:
    """The implementation that a config's name stands for; a config without one runs eager."""
    if isinstance(name, StandIn):
        return name.original
    return "eager" if name is None else name


def register(original: str, masks: MaskMode, function: Callable[..., Any]) -> StandIn:
    """Enter ``function`` and the mask function into transformers' tables, once per name."""
    name = StandIn(original, masks)
    with _LOCK:
        AttentionInterface.register(name, function)
        own_mask = ALL_MASK_ATTENTION_FUNCTIONS.get(original)
        if masks == "compact":
            AttentionMaskInterface.register(name, compact_mask)
        elif own_mask is not None:
            AttentionMaskInterface.register(name, own_mask)
    return name


def methods_of(kind: type) -> Iterator[FunctionType]:
    """The functions that a module class defines, up to torch's and transformers' base classes, and what they wrap."""
    for owner in kind.__mro__:
        if owner is nn.Module or owner.__name__ == "PreTrainedModel" or owner is object:
            continue
        for value in vars(owner).values():
            if isinstance(value, FunctionType):
                yield from _unwrapped(value, 3)


def _unwrapped(function: FunctionType, depth: int) -> Iterator[FunctionType]:
    """A function, and the functions that it wraps or closes over."""
    yield function
    held = [getattr(function, "__wrapped__", None)]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    for inner in held:
        if isinstance(inner, FunctionType) and depth:
            yield from _unwrapped(inner, depth - 1)


@lru_cache(maxsize=4096)
def code_names(code: CodeType) -> frozenset[str]:
    """Every global or attribute name that the code, or code nested in it, refers to."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= code_names(constant)
    return frozenset(names)


def _places(module: nn.Module, caller: FrameType | None) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Code that may name the module's eager function: the caller's first, then its class's."""
    if caller is not None:
        yield caller.f_code, caller.f_globals
    for method in methods_of(type(module)):
        yield method.__code__, method.__globals__


def own_function(module: nn.Module, original: str, caller: FrameType | None = None) -> Callable[..., Any]:
    """The attention function that ``module`` would call by itself under ``original``.

    Args:
        module: the attention module.
        original: the name of its implementation.
        caller: the code that called the stand-in, where that is known.

    Raises:
        UnsupportedError: the module's own eager function could not be told.
    """
    for code, space in _places(module, caller):
        names = code_names(code)
        if "ALL_ATTENTION_FUNCTIONS" not in names:
            continue
        found = space.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS).get(original)
        if found is not None:
            return found  # type: ignore[no-any-return]
        eager = [space[name] for name in sorted(names) if "eager" in name and callable(space.get(name))]
        if len(eager) == 1:
            return eager[0]  # type: ignore[no-any-return]
    found = ALL_ATTENTION_FUNCTIONS.get(original)
    if found is None:
        raise UnsupportedError(
            f"{type(module).__name__}: its own '{original}' attention function was not found in "
            f"{type(module).__module__}; switch the model to another attention implementation"
        )
    return found  # type: ignore[no-any-return]

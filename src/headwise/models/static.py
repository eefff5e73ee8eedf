"""Which modules compute attention, told from their code before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

from torch import nn

from headwise.errors import UnsupportedError
from headwise.models.standin import code_names, methods_of

__all__ = ["attention_elsewhere", "attention_on_seam", "refuse_every", "refuse_without_attention"]

_SOFTMAX: Final = frozenset(
    {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward", "_flash_attention_forward"}
)


_ON_SEAM: dict[type, bool] = {}
_ELSEWHERE: dict[type, bool] = {}


def _on_seam(kind: type[nn.Module]) -> bool:
    if kind not in _ON_SEAM:
        _ON_SEAM[kind] = _refers_to_seam(kind)
    return _ON_SEAM[kind]


def _refers_to_seam(kind: type[nn.Module]) -> bool:
    for method in methods_of(kind):
        names = code_names(method.__code__)
        if "ALL_ATTENTION_FUNCTIONS" in names:
            return True
        for name in names & method.__globals__.keys():
            code = getattr(method.__globals__[name], "__code__", None)
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code_names(code):
                return True
    return False


def _elsewhere(kind: type[nn.Module]) -> bool:
    if kind not in _ELSEWHERE:
        _ELSEWHERE[kind] = _attends_by_itself(kind)
    return _ELSEWHERE[kind]


def _attends_by_itself(kind: type[nn.Module]) -> bool:
    """Whether a class is called attention and takes a softmax (or torch's attention) by itself."""
    if issubclass(kind, nn.MultiheadAttention):
        return True
    name = kind.__name__.lower()
    if _on_seam(kind) or not ("attention" in name or "attn" in name):
        return False
    return any(code_names(method.__code__) & _SOFTMAX for method in methods_of(kind))


def attention_on_seam(root: nn.Module) -> dict[str, nn.Module]:
    """Modules, by path, whose class refers to ``ALL_ATTENTION_FUNCTIONS``; each module once."""
    return {path: module for path, module in root.named_modules() if _on_seam(type(module))}


def attention_elsewhere(root: nn.Module) -> dict[str, nn.Module]:
    """Modules, by path, that compute attention without the seam."""
    return {path: module for path, module in root.named_modules() if _elsewhere(type(module))}


_LOOKED: Final = (
    "looked for: modules whose code calls ALL_ATTENTION_FUNCTIONS (transformers' AttentionInterface); calls of "
    "torch's scaled_dot_product_attention and nn.MultiheadAttention; a softmax over products of queries and keys, "
    "whose products with values a linear layer reads head by head"
)


def refuse_without_attention(root: nn.Module) -> None:
    """Refuse a model in whose code nothing could be attention.

    Raises:
        UnsupportedError: what was looked for.
    """
    if attention_on_seam(root) or any(_may_attend(type(module)) for module in root.modules()):
        return
    raise UnsupportedError(
        f"{type(root).__name__} has no attention heads that headwise understands; {_LOOKED}; found none of these"
    )


def refuse_every(root: nn.Module, reasons: Mapping[str, str]) -> NoReturn:
    """Refuse a model that ran without any attention that is understood.

    Args:
        root: the model.
        reasons: for modules that seem to compute attention, why it is not understood.

    Raises:
        UnsupportedError: what was looked for, and what was found instead.
    """
    kind = type(root).__name__
    if reasons:
        by_reason: dict[str, list[str]] = {}
        for path, why in reasons.items():
            by_reason.setdefault(f"{type(root.get_submodule(path)).__name__}: {why}", []).append(path)
        found = "; ".join(
            f"{why} ({len(paths)} modules, the first is {paths[0]!r})" for why, paths in by_reason.items()
        )
        raise UnsupportedError(f"{kind} has no attention heads that headwise understands: {found}; {_LOOKED}")
    others = attention_elsewhere(root)
    if others:
        classes = ", ".join(sorted({type(module).__name__ for module in others.values()}))
        raise UnsupportedError(
            f"{kind} computes its attention in a way that headwise cannot follow ({classes}, {len(others)} modules); "
            f"{_LOOKED}"
        )
    raise UnsupportedError(f"{kind} has no attention heads that headwise understands; {_LOOKED}; found none of these")


def _may_attend(kind: type[nn.Module]) -> bool:
    """Whether a class, or a function of its module that it calls, takes a softmax or torch's attention."""
    if issubclass(kind, (nn.MultiheadAttention, nn.Softmax)):
        return True
    for method in methods_of(kind):
        names = code_names(method.__code__)
        if names & _SOFTMAX:
            return True
        for name in names & method.__globals__.keys():
            code = getattr(method.__globals__[name], "__code__", None)
            if code is not None and code_names(code) & _SOFTMAX:
                return True
    return False

"""Attention modules whose heads were cut: what they must be told, and the function that stands before their attention.

The weights of a cut module are smaller, and its own forward code goes on to run. What that code reads beside the
weights is kept true here: counts among the module's attributes; counts that it reads from its config, which it shares
with modules that were not cut; arguments of its forward code that have a head axis (slopes that all layers share);
and, where the code knows only even groups or hands on what has a head axis (a bias that travels from layer to layer),
a function before attention that gives each head its key-value head and its part of what has a head axis.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from headwise.models.arguments import narrow_arguments, narrowed
from headwise.models.fitting import fit_views
from headwise.models.headless import run_without_heads
from headwise.models.placeholder import run_on_placeholder
from headwise.models.standin import own_function

__all__ = ["CutConfig", "HeadCut", "cut_of", "install", "past_adapter", "restate"]

_NAME = "headwise_cut"
_LOCK = threading.Lock()


@dataclass(frozen=True)
class HeadCut:
    """What a cut attention module is told.

    Attributes:
        heads: the query heads that are left, by their numbers in the model before it was first cut.
        original: how many query heads there were.
        kv_map: for each head that is left the key-value head that it reads, counted among those that are left; None
            where
            they are evenly grouped, so that the module's own code pairs them.
        kv_heads: how many key-value heads are left.
        attributes: values of the module's attributes.
        config: values that the module's code reads from its config.
        select: whether tensors with a head axis that reach attention from outside (position biases, masks) are
            narrowed to
            the heads that are left.
        d_k, d_v: widths of a key and of a value.
        fused: how many projections the weight of the keys holds.
        means: heads that are left in order to put out a running mean: their query is zero. Each with the heads that it
            stands for, itself the first, by the numbers before the first cut.
        narrow: names of arguments of the module's forward code that are narrowed to the heads that are left before it
            runs.
        placeholder: where no head is left and the code runs on one of zeros: for each layer of the module that
            projects its input the number of zeros that stand for what it puts out.
        fit: whether impossible views in the code are given the last width that fits.
    """

    heads: tuple[int, ...]
    original: int
    kv_map: tuple[int, ...] | None
    kv_heads: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, int] = field(default_factory=dict)
    select: bool = False
    d_k: int = 0
    d_v: int = 0
    fused: int = 1
    means: tuple[tuple[int, ...], ...] = ()
    narrow: tuple[str, ...] = ()
    placeholder: Mapping[str, int] = field(default_factory=dict)
    fit: bool = False

    @property
    def run(self) -> tuple[int, ...]:
        """The heads that the module's code runs with, by their numbers before the first cut."""
        return (0,) if self.placeholder else self.heads

    @property
    def adapts(self) -> bool:
        """Whether a function stands before the module's attention."""
        return self.kv_map is not None or self.select


def cut_of(module: nn.Module) -> HeadCut | None:
    """What was cut of an attention module, or None."""
    found = vars(module).get(_NAME)
    return found if isinstance(found, HeadCut) else None


def install(module: nn.Module, cut: HeadCut) -> None:
    """Tell a module what was cut of it; takes the place of what it was told before."""
    for name, value in cut.attributes.items():
        setattr(module, name, value)
    given = vars(module).get("config")
    base = given.cut_base if isinstance(given, CutConfig) else given
    if cut.config or cut.adapts:
        object.__setattr__(module, "config", CutConfig(base, dict(cut.config), cut.adapts))
    elif isinstance(given, CutConfig):
        object.__setattr__(module, "config", base)
    object.__setattr__(module, _NAME, cut)
    narrow_arguments(module, cut.narrow, cut.run, cut.original)
    run_without_heads(module, 0 if cut.heads else cut.fused, cut.d_k)
    run_on_placeholder(module, cut.placeholder)
    fit_views(module, on=cut.fit)


def restate(owner: nn.Module) -> None:
    """Let a layer state the size that its weight has."""
    weight = getattr(owner, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return
    first, second = weight.shape
    for names, sizes in (
        (("out_features", "in_features"), (first, second)),
        (("nf", "nx"), (second, first)),
        (("num_embeddings", "embedding_dim"), (first, second)),
    ):
        for name, size in zip(names, sizes, strict=True):
            if isinstance(vars(owner).get(name), int):
                setattr(owner, name, size)


class CutConfig:
    """A config as one cut module reads it: its own counts, and all else as in the config that it stands before.

    Args:
        base: the config that other modules read.
        changes: values that are this module's own.
        adapts: whether the module's attention goes through the adapter.
    """

    cut_base: Any
    cut_changes: dict[str, int]
    cut_adapts: bool

    def __init__(self, base: Any, changes: dict[str, int], adapts: bool) -> None:
        vars(self).update(cut_base=base, cut_changes=changes, cut_adapts=adapts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "cut_base" not in vars(self):
            raise AttributeError(name)
        if name in self.cut_changes:
            return self.cut_changes[name]
        return getattr(self.cut_base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cut_base, name, value)

    def __reduce__(self) -> tuple[type[CutConfig], tuple[Any, dict[str, int], bool]]:
        return CutConfig, (self.cut_base, self.cut_changes, self.cut_adapts)

    def __repr__(self) -> str:
        return f"CutConfig({type(self.cut_base).__name__}, {self.cut_changes})"

    @property
    def _attn_implementation(self) -> Any:
        said = self.cut_base._attn_implementation
        return _adapter("eager" if said is None else said) if self.cut_adapts else said


class _AdapterName(str):
    """``"headwise-cut:sdpa"``, which also equals ``"sdpa"``: code that branches on the name takes the same branch."""

    __slots__ = ("before",)

    before: str

    def __new__(cls, before: str) -> _AdapterName:
        name = super().__new__(cls, f"headwise-cut:{str.__str__(before)}")
        name.before = before
        return name

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (type(other) is str and self.before == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[_AdapterName], tuple[str]]:
        return _AdapterName, (self.before,)


_ADAPTERS: dict[str, _AdapterName] = {}


def _adapter(before: str) -> _AdapterName:
    """The name under which the adapter before ``before`` is entered in transformers' table."""
    key = str.__str__(before)
    if key not in _ADAPTERS:
        with _LOCK:
            name = _AdapterName(before)
            AttentionInterface.register(name, _adapting(before))
            _ADAPTERS[key] = name
    return _ADAPTERS[key]


def _adapting(before: str) -> Callable[..., Any]:
    known: dict[type[nn.Module], Callable[..., Any]] = {}

    def adapt(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *rest: Any,
        **extra: Any,
    ) -> Any:
        function = known.get(type(module))
        if function is None:
            function = known[type(module)] = own_function(module, before)
        cut = cut_of(module)
        if cut is None:
            return function(module, query, key, value, attention_mask, *rest, **extra)
        if cut.kv_map is not None:
            index = torch.tensor(cut.kv_map, device=key.device)
            key, value = key.index_select(1, index), value.index_select(1, index)
        if cut.select:
            attention_mask = _left(attention_mask, cut)
            extra = {name: _left(given, cut) for name, given in extra.items()}
        return function(module, query, key, value, attention_mask, *rest, **extra)

    return adapt


def _left(given: Any, cut: HeadCut) -> Any:
    """A tensor (B or 1, H, ..., ...) or (H,) of all heads before the cut, narrowed to those that are left."""
    whole = isinstance(given, Tensor) and given.ndim in (1, 4)
    return narrowed(given, cut.run, cut.original) if whole else given


_CODE = next(const for const in _adapting.__code__.co_consts if getattr(const, "co_name", None) == "adapt")


def past_adapter(frame: FrameType) -> FrameType:
    """The frame of the module's own code, where the adapter called in its place."""
    return frame.f_back if frame.f_code is _CODE and frame.f_back is not None else frame

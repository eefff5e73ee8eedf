"""Runs a model again from one attention layer on: what lies below it is taken from an earlier pass.

Modules whose attention sites all come before a given site are replaced, while the model runs, by what they put out
before. The largest such modules are taken, so that a whole encoder, and then whole layers, cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.layout import Block, HeadLayout, SiteKey

__all__ = ["Replay", "repeated"]


class Replay:
    """Remembers what modules put out in one pass and plays it back in others.

    A module that a pass enters more than once (ALBERT's shared layer) is always computed.

    Args:
        root: the model.
        layout: its heads.
        inside: play back, too, what a site's own layer computes before its output projection: for changes that begin
            there.

    Attributes:
        enabled: set to False to compute everything every time.
    """

    def __init__(self, root: nn.Module, layout: HeadLayout, *, inside: bool = False) -> None:
        self.root = root
        self.enabled = True
        self._order = {site.key: at for at, site in enumerate(layout.sites)}
        calls: dict[str, list[int]] = {}
        for at, site in enumerate(layout.sites):
            calls.setdefault(site.key.module, []).append(at)
        self._inside = _sites_inside(root, calls)
        self._below = {key: self._before(at) for key, at in self._order.items()}
        if inside:
            for site in layout.sites:
                if len(calls[site.key.module]) == 1:
                    self._below[site.key] += self._within_layer(layout.blocks[site.block])
        self._kept: dict[str, Any] = {}

    def _before(self, at: int) -> tuple[str, ...]:
        """Paths of the largest modules all of whose sites come before the site number ``at``."""
        found: list[str] = []
        for path, sites in self._inside.items():  # from the outside inwards
            if sites and max(sites) < at and not any(_within(path, other) for other in found):
                found.append(path)
        return tuple(found)

    def _within_layer(self, block: Block) -> tuple[str, ...]:
        """The attention module where W_O stands outside it; otherwise its projections of queries, keys and values."""
        if block.o_path is None:
            return ()
        if not _within(block.o_path, block.module):
            return (block.module,) if block.module in self._inside else ()
        parts = (one.parameter for one in (block.q, block.k, block.v) if one is not None)
        return tuple(path for path in dict.fromkeys(parts) if _within(path, block.module) and path != block.module)

    def below(self, key: SiteKey) -> tuple[str, ...]:
        """Paths of the modules that are played back when the site ``key`` is looked at."""
        return self._below[key] if self.enabled else ()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, what the modules put out is remembered (a copy, so that nothing done to it later matters)."""
        self._kept.clear()
        needed = sorted({path for paths in self._below.values() for path in paths}) if self.enabled else []
        handles = [self.root.get_submodule(path).register_forward_hook(self._keep(path)) for path in needed]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._kept[path] = _copied(output)

        return hook

    @contextmanager
    def from_site(self, key: SiteKey, *, batch: int = 0, copies: int = 1) -> Iterator[None]:
        """Inside, the model computes only from the layer of the site ``key`` on.

        With ``copies`` the model is run on so many copies of the batch at once, one after another along the first
        axis, and what is played back is copied as often; ``batch`` is how many examples were recorded.
        """
        held: list[tuple[nn.Module, Any]] = []
        try:
            for path in self.below(key):
                module = self.root.get_submodule(path)
                held.append((module, vars(module).get("forward")))
                module.forward = self._player(path, batch, copies)
            yield
        finally:
            for module, own in held:
                if own is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = own

    def _player(self, path: str, batch: int, copies: int) -> Any:
        def forward(*_args: Any, **_kwargs: Any) -> Any:
            return _copied(self._kept[path]) if copies == 1 else repeated(self._kept[path], batch, copies)

        return forward

    def forget(self) -> None:
        """Let go of what was remembered."""
        self._kept.clear()


def _sites_inside(root: nn.Module, calls: dict[str, list[int]]) -> dict[str, Sequence[int]]:
    """For every module but the root that holds attention called once a pass: the numbers of its sites."""
    inside: dict[str, Sequence[int]] = {}
    paths: dict[int, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if not path:
            continue
        held = {name: at for name, at in calls.items() if _within(name, path)}
        shared = id(module) in paths
        paths.setdefault(id(module), path)
        if not shared and all(len(at) == 1 for at in held.values()):
            inside[path] = [number for at in held.values() for number in at]
    return inside


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".")


def _copied(value: Any) -> Any:
    """A copy of every tensor in an output, whatever it is made of."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def repeated(value: Any, batch: int, copies: int) -> Any:
    """``value`` with every tensor of ``batch`` examples (or so many per example) copied along its first axis.

    Example:
        >>> repeated((torch.tensor([1, 2]), torch.tensor(3)), 2, 2)
        (tensor([1, 2, 1, 2]), tensor(3))
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and batch and leaf.shape[0] >= batch and not leaf.shape[0] % batch:
            return torch.cat([leaf] * copies)
        return leaf

    return pytree.tree_map(one, value)

"""Collects the gradient of a loss at the output of every attention layer: G = E[g g^T]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headwise.layout import HeadLayout, Site
from headwise.measures.covariance.accumulate import Scatter
from headwise.measures.covariance.observing import CovarianceObserver

__all__ = ["capturing"]


@contextmanager
def capturing(module: nn.Module, layout: HeadLayout, observer: CovarianceObserver) -> Iterator[None]:
    """Inside, a backward pass adds the gradients at the outputs of W_O to ``observer.gradients``.

    Rows are those that ``observer`` took of the same pass, which it must look on at. Layers whose output projection is
    not known have no gradients.
    """
    sites: dict[str, list[Site]] = {}
    for site in layout.sites:
        path = layout.blocks[site.block].o_path
        if path is not None:
            sites.setdefault(path, []).append(site)
    handles = [
        module.get_submodule(path).register_forward_hook(_Reader(group, observer)) for path, group in sites.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reader:
    """Reads the gradient of one output projection, call by call."""

    def __init__(self, sites: list[Site], observer: CovarianceObserver) -> None:
        self._sites, self._observer, self._call = sites, observer, 0

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        site = self._sites[self._call % len(self._sites)]
        self._call += 1
        if isinstance(output, Tensor) and output.requires_grad:
            taken_BQ = self._observer.taken[site]
            output.register_hook(lambda gradient: self._add(site, gradient, taken_BQ))  # type: ignore[no-untyped-call]

    def _add(self, site: Site, gradient: Tensor, taken_BQ: Tensor) -> None:
        rows_BQE = gradient.detach().reshape(*taken_BQ.shape, -1)
        gradients = self._observer.gradients
        scatter = gradients.setdefault(site, Scatter(rows_BQE.shape[-1], rows_BQE.device))
        scatter.add(rows_BQE[taken_BQ])

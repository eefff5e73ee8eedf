"""Collects covariances of head outputs from the attention calls of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.data import Batch
from headwise.errors import MeasureError
from headwise.kernels import Problem, Wanted, mean_of_visible
from headwise.layout import HeadLayout, Site
from headwise.measures.covariance.accumulate import Scatter
from headwise.measures.covariance.statistics import SiteStatistics, Statistics
from headwise.models import AttentionCall
from headwise.trace import PADDING, row_kinds

__all__ = ["CovarianceObserver", "layer_of", "taken_rows"]


@dataclass(frozen=True)
class _Rows:
    """Rows of one call that wait for what the output projection reads: (B, Q) which are taken, and their weights."""

    site: Site
    taken: Tensor
    weights: Tensor | None


class CovarianceObserver:
    """Adds up the concatenated head outputs of every site, and the energy of the residual stream before its layer.

    Where the layer gates its heads on their way to the output projection, what that projection reads is added up
    instead, inside :meth:`watching`: it is what planning and repair are about.

    Use it with :func:`headwise.trace.run`, inside :meth:`watching` for the energies; see :func:`headwise.statistics`.

    Args:
        skip_first: rows to leave out at the beginning of every passage (the massive activations of decoders).
        relative: rows count by the inverse of their energy in the residual stream at the layer's input, so that what
            is summed is relative to what is there; and where attention is causal, the first row of a passage counts as
            much as all its others, because every head looks back at it.
        running_means: take the mean of the visible values of every key-value head along, for what replaces heads by it.

    Attributes:
        scatters: of the head outputs of each site.
        gradients: of the gradient at each layer's output; see :func:`capturing`.
        taken: (B, Q) bool, the rows taken in the latest call of each site.
    """

    def __init__(self, skip_first: int = 0, *, relative: bool = False, running_means: bool = False) -> None:
        self.skip_first, self.relative, self.running_means = skip_first, relative, running_means
        self.scatters: dict[Site, Scatter] = {}
        self.gradients: dict[Site, Scatter] = {}
        self.taken: dict[Site, Tensor] = {}
        self._shape: dict[Site, tuple[int, int, int]] = {}
        self._energy: dict[Site, tuple[float, float, int]] = {}
        self._inputs: dict[str, Tensor] = {}
        self._layers: dict[str, str] = {}
        self._gated: dict[str, list[_Rows]] = {}

    @contextmanager
    def watching(self, module: nn.Module, layout: HeadLayout) -> Iterator[CovarianceObserver]:
        """Inside, the input of every layer that holds an attention module is looked at."""
        handles = []
        for path in layout.blocks:
            layer = layer_of(module, path)
            if layer is not None:
                self._layers[path] = layer
        for path, block in layout.blocks.items():
            if block.o is not None and "o" in dict(block.partial):
                self._gated[path] = []
                handles.append(module.get_submodule(block.o.parameter).register_forward_pre_hook(self._read(path)))
        try:
            for layer in dict.fromkeys(self._layers.values()):
                hook = self._keep(layer)
                handles.append(module.get_submodule(layer).register_forward_pre_hook(hook, with_kwargs=True))
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self._inputs.clear()
            self._gated.clear()

    def _read(self, path: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            waiting = self._gated[path]
            if not waiting:
                return
            taken_BQ = torch.cat([one.taken for one in waiting], dim=1)
            weights_BQ = None
            if waiting[0].weights is not None:
                weights_BQ = torch.cat([one.weights for one in waiting if one.weights is not None], dim=1)
            site = waiting[0].site
            waiting.clear()
            self._add(site, args[0].detach().reshape(*taken_BQ.shape, -1), taken_BQ, weights_BQ)

        return hook

    def _keep(self, layer: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if isinstance(given, Tensor) and given.ndim == 3:
                self._inputs[layer] = given.detach()
            else:
                self._inputs.pop(layer, None)

        return hook

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted:  # noqa: ARG002
        """Nothing beside z."""
        return Wanted()

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Take the rows of one call."""
        taken_BQ = self.taken[call.site] = taken_rows(call, batch, self.skip_first)
        heads, d_v = call.z.shape[1], call.z.shape[3]
        means_BQW = _running_means(call) if self.running_means and call.block.module not in self._gated else None
        means = 0 if means_BQW is None else means_BQW.shape[-1] // d_v
        self.scatters.setdefault(call.site, Scatter((heads + means) * d_v, call.z.device))
        self._shape[call.site] = (heads, d_v, means)
        squares_BQ = self._squares(call, taken_BQ)
        weights_BQ = None
        if self.relative and squares_BQ is not None:
            weights_BQ = _counts(call.site, taken_BQ) / squares_BQ
            weights_BQ[squares_BQ == 0] = 0.0
        self._add_energy(call.site, taken_BQ, squares_BQ, weights_BQ)
        if call.block.module in self._gated:
            self._gated[call.block.module].append(_Rows(call.site, taken_BQ, weights_BQ))
        else:
            flat_BQW = call.z.detach().transpose(1, 2).flatten(2)
            if means_BQW is not None:
                flat_BQW = torch.cat([flat_BQW, means_BQW.to(flat_BQW)], dim=-1)
            self._add(call.site, flat_BQW, taken_BQ, weights_BQ)

    def _add(self, site: Site, rows_BQW: Tensor, taken_BQ: Tensor, weights_BQ: Tensor | None) -> None:
        scatter = self.scatters[site]
        if bool(taken_BQ.all()):
            scatter.add(rows_BQW.flatten(0, 1), None if weights_BQ is None else weights_BQ.flatten())
        else:
            scatter.add(rows_BQW[taken_BQ], None if weights_BQ is None else weights_BQ[taken_BQ])

    def _squares(self, call: AttentionCall, taken_BQ: Tensor) -> Tensor | None:
        """(B, Q) squared norm of the residual stream at the layer's input; None where it was not seen."""
        layer = self._layers.get(call.block.module)
        hidden = None if layer is None else self._inputs.get(layer)
        if hidden is None or hidden.shape[:2] != taken_BQ.shape:
            return None
        norms_BQ: Tensor = torch.linalg.vector_norm(hidden.float(), dim=-1)
        return norms_BQ.double().square()

    def _add_energy(self, site: Site, taken_BQ: Tensor, squares_BQ: Tensor | None, weights_BQ: Tensor | None) -> None:
        if squares_BQ is None:
            return
        weights = torch.ones_like(squares_BQ) if weights_BQ is None else weights_BQ
        total, weight, rows = self._energy.get(site, (0.0, 0.0, 0))
        total += float((squares_BQ * weights)[taken_BQ].sum())
        self._energy[site] = (total, weight + float(weights[taken_BQ].sum()), rows + int(taken_BQ.sum()))

    def statistics(self, layout: HeadLayout, **facts: Any) -> Statistics:
        """The statistics of every site of ``layout``; ``facts`` as :class:`Statistics` takes them.

        Raises:
            MeasureError: a site was never called.
        """
        silent = [site for site in layout.sites if site not in self.scatters]
        if silent:
            raise MeasureError(
                f"{len(silent)} of {len(layout.sites)} attention sites were not called, the first is {silent[0].key}; "
                "give inputs that reach them"
            )
        sites = [self._of(site) for site in layout.sites]
        return Statistics(sites, skip_first=self.skip_first, relative=self.relative, **facts)

    def _of(self, site: Site) -> SiteStatistics:
        heads, d_v, means = self._shape[site]
        scatter = self.scatters[site]
        total, weight, rows = self._energy.get(site, (0.0, 0.0, 0))
        energy = total / weight if weight and rows == scatter.rows else None
        return SiteStatistics(site, heads, d_v, scatter, self.gradients.get(site), energy, means)


def _running_means(call: AttentionCall) -> Tensor:
    """(B, Q, G * D_v) the mean of the visible values of every key-value head, in the order of the block's."""
    block = call.block
    first = [block.kv_map.index(kv) for kv in range(block.kv_heads)]
    return mean_of_visible(call.problem).detach()[:, first].transpose(1, 2).flatten(2)


def taken_rows(call: AttentionCall, batch: Batch | None, skip_first: int) -> Tensor:
    """(B, Q) bool: the real rows of a call, but for the first so many of each passage."""
    real_BQ = row_kinds(call.site, call.problem, batch) != PADDING
    return real_BQ & (real_BQ.cumsum(-1) > skip_first) if skip_first else real_BQ


def _counts(site: Site, taken_BQ: Tensor) -> Tensor:
    """(B, Q) what a row counts beside its energy: in a decoder the first of a passage as much as all its others."""
    counts_BQ = torch.ones(taken_BQ.shape, dtype=torch.float64, device=taken_BQ.device)
    if site.causal or (site.key.kind == "cross" and site.key.stack == "decoder"):
        first_BQ = taken_BQ & (taken_BQ.cumsum(-1) == 1)
        others_B1 = (taken_BQ.sum(-1, keepdim=True) - 1).clamp(min=1).double()
        counts_BQ = torch.where(first_BQ, others_B1, counts_BQ)
    return counts_BQ


def layer_of(module: nn.Module, path: str) -> str | None:
    """The path of the layer that an attention module belongs to: the innermost member of a list of modules around it.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> layer_of(BertModel(config), "encoder.layer.0.attention.self")
        'encoder.layer.0'
    """
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(module.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1])
    return None

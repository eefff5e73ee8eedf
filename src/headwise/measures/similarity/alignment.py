"""CKA between the outputs of heads: exact from C within a layer, by random projection across layers.

Linear CKA (Kornblith et al. 2019, section 3) of two heads is ``|C_ab|_F^2 / (|C_aa|_F |C_bb|_F)`` with C the centred
cross-covariance of their outputs. The cross-covariance of all heads of a model is wide (17,280 for SmolLM2), so across
layers the CKA is that of outputs projected onto a few random directions, the same ones for heads of the same width.
Numerator and denominator are projected alike, so the value stays in [0, 1], is 1 for a copy and exact for outputs that
move along one direction. Where all directions are kept, it is exact.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwise.data import Batch
from headwise.kernels import Problem, Wanted
from headwise.layout import HeadLayout, Site, SiteKey
from headwise.measures.covariance import Scatter, Statistics
from headwise.models import AttentionCall
from headwise.trace import PADDING, row_kinds

__all__ = ["OutputAlignment", "projection_for"]

#: Directions of all heads together, at most.
WIDEST = 8192


def projection_for(d_v: int, directions: int, seed: int) -> Tensor:
    """R (D_v, directions) with E[R R^T] = 1: random orthonormal columns, scaled; the identity where all are kept."""
    if directions >= d_v:
        return torch.eye(d_v, dtype=torch.float64)
    text = f"cka:{seed}:{d_v}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(sha256(text).digest()[:7], "big"))
    orthonormal, upper = torch.linalg.qr(torch.randn(d_v, d_v, generator=generator, dtype=torch.float64, device="cpu"))
    # The signs make the distribution uniform over rotations.
    scaled: Tensor = (orthonormal * upper.diagonal().sign())[:, :directions] * (d_v / directions) ** 0.5
    return scaled


class OutputAlignment:
    """Looks on at a trace and adds up cross-covariances between the projected outputs of all heads.

    Args:
        layout: the heads.
        directions: random directions of each head; None: as many as keep the whole below 8,192.
        seed: of the directions.
    """

    def __init__(self, layout: HeadLayout, directions: int | None = None, seed: int = 0) -> None:
        self._layout = layout
        blocks = [layout.blocks[site.block] for site in layout.sites]
        widest = max(block.d_v for block in blocks)
        heads = sum(block.query_heads for block in blocks)
        self.directions = min(widest, max(1, WIDEST // heads) if directions is None else directions)
        self._heads = {site.key: block.query_heads for site, block in zip(layout.sites, blocks, strict=True)}
        self._projection = {
            site.key: projection_for(block.d_v, self.directions, seed)
            for site, block in zip(layout.sites, blocks, strict=True)
        }
        self.exact = all(block.d_v <= self.directions for block in blocks)
        self._features: dict[tuple[str, tuple[int, ...]], list[tuple[SiteKey, Tensor]]] = {}
        self._scatters: dict[tuple[SiteKey, ...], Scatter] = {}
        self._batch: Batch | None = None

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted:  # noqa: ARG002
        """Nothing beside z."""
        return Wanted()

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Keep the projected outputs until the pass is over."""
        if batch is not self._batch:
            self.finish()
            self._batch = batch
        real_BQ = row_kinds(call.site, call.problem, batch) != PADDING
        projection_DR = self._projection[call.site.key].to(call.z)
        features = (call.z.detach().transpose(1, 2) @ projection_DR).flatten(2)[real_BQ]
        shape = (*real_BQ.shape, len(features))
        self._features.setdefault((call.site.key.stack, shape), []).append((call.site.key, features))

    def finish(self) -> None:
        """Add up what was kept."""
        for found in self._features.values():
            sites = tuple(site for site, _ in found)
            joined = torch.cat([features for _, features in found], dim=1)
            scatter = self._scatters.setdefault(sites, Scatter(joined.shape[1], joined.device))
            scatter.add(joined)
        self._features.clear()

    def alignment(self, statistics: Statistics) -> npt.NDArray[np.float64]:
        """(heads, heads) linear CKA in [0, 1]; NaN where two heads have no rows in common or one never varies."""
        self.finish()
        first, total = self._places()
        out = np.full((total, total), np.nan)
        for sites, scatter in self._scatters.items():
            covariance = scatter.covariance
            parts = self._parts(sites)
            norms = {site: _norms(covariance[part, part], self._heads[site]) for site, part in parts}
            for at, (a, part_a) in enumerate(parts):
                for b, part_b in parts[at + 1 :]:
                    squares = _squares(covariance[part_a, part_b], self._heads[a], self._heads[b])
                    _put(out, first[a], first[b], _ratio(squares, norms[a], norms[b]))
        for site, start in first.items():
            covariance, heads = statistics[site].covariance, self._heads[site]
            own = _norms(covariance, heads)
            _put(out, start, start, _ratio(_squares(covariance, heads, heads), own, own))
        return out

    def _places(self) -> tuple[dict[SiteKey, int], int]:
        first, total = {}, 0
        for site in self._layout.sites:
            first[site.key] = total
            total += self._layout.blocks[site.block].query_heads
        return first, total

    def _parts(self, sites: tuple[SiteKey, ...]) -> list[tuple[SiteKey, slice]]:
        """Where the features of each site stand among those of all."""
        parts, start = [], 0
        for site in sites:
            width = self._heads[site] * self._projection[site].shape[1]
            parts.append((site, slice(start, start + width)))
            start += width
        return parts


def _squares(covariance: Tensor, left: int, right: int) -> npt.NDArray[np.float64]:
    """|C_ab|_F^2 of every pair of heads of two sites."""
    rows, columns = covariance.shape
    blocks = covariance.reshape(left, rows // left, right, columns // right)
    return np.asarray(blocks.square().sum((1, 3)).cpu().numpy(), np.float64)


def _norms(covariance: Tensor, heads: int) -> npt.NDArray[np.float64]:
    """|C_hh|_F of every head."""
    out: npt.NDArray[np.float64] = np.sqrt(np.diagonal(_squares(covariance, heads, heads)))
    return out


def _ratio(
    squares: npt.NDArray[np.float64], left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    scale = np.outer(left, right)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.clip(np.where(scale > 0, squares / scale, np.nan), 0.0, 1.0)


def _put(out: npt.NDArray[np.float64], row: int, column: int, values: npt.NDArray[np.float64]) -> None:
    out[row : row + values.shape[0], column : column + values.shape[1]] = values
    out[column : column + values.shape[1], row : row + values.shape[0]] = values.T

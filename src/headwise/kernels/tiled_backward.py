"""The tiled road's backward pass: scores again from q, k and the log-sum-exp, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.blocks import Tile, tiles
from headwise.kernels.masks import Span
from headwise.kernels.problem import Problem
from headwise.kernels.tiled_core import LOG2_E, Raw, Scores, gaps

__all__ = ["RowGradients", "backward"]


@dataclass(frozen=True)
class RowGradients:
    """Gradients of the loss with respect to a pass's outputs; None for 0."""

    z: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    distance: Tensor | None


def backward(
    problem: Problem, raw: Raw, gradients: RowGradients, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients with respect to q, k, v, bias and additive mask; ``needs`` says which are wanted.

    With t the score after every rule, p = exp(t - lse) and H the entropy, the gradient of t_ij is
    ``p_ij * (dz_i.v_j - dz_i.z_i + dlse_i - dH_i (t_ij - lse_i + H_i) + ddist_i (|i-j| - dist_i))``.
    """
    state = _Backward(problem, raw, gradients, needs)
    for tile in tiles(problem):
        state.run(tile)
    return state.found()


def _clean(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0.0)


class _Backward:
    def __init__(self, problem: Problem, raw: Raw, gradients: RowGradients, needs: tuple[bool, ...]) -> None:
        rule = problem.rule
        inputs = [problem.q, problem.k, problem.v, raw.z]
        strict = not all(
            bool(torch.isfinite(x.sum())) for x in (*inputs, *(g for g in vars(gradients).values() if g is not None))
        )
        if strict:
            problem = Problem(_clean(problem.q), _clean(problem.k), _clean(problem.v), problem.visible, rule)
        self.problem, self.gradients, self.strict, self.raw = problem, gradients, strict, raw
        self.scores = Scores(problem, strict=strict)
        self.v = problem.v.contiguous()
        empty = torch.isneginf(raw.lse)
        self.lse = raw.lse.masked_fill(empty, 0.0)
        self.lse2 = self.lse * LOG2_E
        self.constant = self._constant()
        self.dq = torch.zeros_like(problem.q, memory_format=torch.contiguous_format)
        self.dk = torch.zeros_like(problem.k, memory_format=torch.contiguous_format)
        self.dv = torch.zeros_like(problem.v, memory_format=torch.contiguous_format)
        self.dterms = [
            torch.zeros(term.shape, dtype=self.dq.dtype, device=term.device) if term is not None and need else None
            for term, need in zip((rule.bias, rule.additive_mask), needs[3:], strict=True)
        ]
        self.needs = needs
        self.unit = LOG2_E if rule.softcap is None else 1.0  # what the queries are multiplied by beside the scale

    def _constant(self) -> Tensor:
        """The part of a score's gradient that is the same along a row: (B, H, Q)."""
        raw, gradients = self.raw, self.gradients
        total = torch.zeros_like(self.lse)
        if gradients.z is not None:
            total -= (gradients.z * raw.z).sum(-1)
        if gradients.lse is not None:
            total += gradients.lse
        if gradients.entropy is not None:
            assert raw.entropy is not None
            total -= gradients.entropy * (raw.entropy - self.lse)
        if gradients.distance is not None:
            assert raw.distance is not None
            total -= gradients.distance * raw.distance
        return total

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        terms = (self.problem.rule.bias, self.problem.rule.additive_mask)
        dbias, dadditive = (
            None if found is None or term is None else found.to(term.dtype)
            for found, term in zip(self.dterms, terms, strict=True)
        )
        dq, dk, dv = (x if need else None for x, need in zip((self.dq, self.dk, self.dv), self.needs, strict=False))
        return dq, dk, dv, dbias, dadditive

    def run(self, tile: Tile) -> None:
        """One tile over all its keys."""
        b, g, share, nq = tile.shape
        rows = (b * g, share * nq)
        q = self.scores.queries(tile)
        lse2 = tile.of_queries(self.lse2).reshape(*rows, 1)
        constant = tile.of_queries(self.constant).reshape(*rows, 1)
        dz = None if self.gradients.z is None else tile.of_queries(self.gradients.z).reshape(*rows, -1)
        dq = torch.zeros_like(q)
        for keys, hides in self.scores.blocks(tile):
            t = self.scores.block(tile, q, keys, hides)
            dt = self._score_gradients(tile, t, keys, constant, dz)
            p = t.sub_(lse2).exp2_()
            if self.strict and hides is not None:
                p.view(*tile.shape, -1).masked_fill_(hides, 0.0)
            if dz is not None and self.needs[2]:
                tile.of_keys(self.dv, keys).baddbmm_(p.mT, dz)
            dt.mul_(p)
            if self.strict and hides is not None:
                dt.view(*tile.shape, -1).masked_fill_(hides, 0.0)
            self._add_terms(tile, dt, keys)
            if self.problem.rule.softcap is not None:
                dt.mul_(self.scores.slope_of_cap(dt.shape))
            dq.baddbmm_(dt, tile.of_keys(self.scores.k, keys))
            if self.needs[1]:
                tile.of_keys(self.dk, keys).baddbmm_(dt.mT, q, alpha=1.0 / self.unit)
        tile.of_queries(self.dq).copy_(dq.mul_(self.scores.factor / self.unit).view(*tile.shape, -1))

    def _score_gradients(self, tile: Tile, t: Tensor, keys: Span, constant: Tensor, dz: Tensor | None) -> Tensor:
        """The gradient of the scores after every rule, before the factor p."""
        gradients, shape = self.gradients, (*t.shape[:2], 1)
        dt = self.scores.buffer("gradients", *t.shape)
        if dz is None:
            dt.zero_()
        else:
            torch.bmm(dz, tile.of_keys(self.v, keys).mT, out=dt)
        dt.add_(constant)
        if gradients.entropy is not None:
            floor = -(torch.finfo(t.dtype).max ** 0.5)  # a hidden score times a gradient must not overflow: its p is 0
            dt.addcmul_(t.clamp(min=floor), tile.of_queries(gradients.entropy).reshape(shape), value=-1.0 / LOG2_E)
        if gradients.distance is not None:
            far = tile.of_queries(gradients.distance)[..., None]
            dt.view(*tile.shape, -1).addcmul_(gaps(self.problem, tile, keys), far)
        return dt

    def _add_terms(self, tile: Tile, dt: Tensor, keys: Span) -> None:
        """Add a block's gradient to those of the added terms, summed over what they are broadcast along."""
        view = dt.view(*tile.shape, -1)
        for found in self.dterms:
            if found is not None:
                part = tile.of_added(found, keys)
                part += view.sum_to_size(part.shape)

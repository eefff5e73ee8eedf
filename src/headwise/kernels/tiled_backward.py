"""The tiled road's backward pass: scores again from q, k and the log-sum-exp, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.blocks import Hidden, Tile, tiles
from headwise.kernels.masks import Span
from headwise.kernels.problem import Problem
from headwise.kernels.tiled_core import Raw
from headwise.kernels.tiled_scores import LOG2_E, Scores

__all__ = ["RowGradients", "backward"]


@dataclass(frozen=True)
class RowGradients:
    """Gradients of the loss with respect to a pass's outputs; None for 0."""

    z: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    distance: Tensor | None
    peak: Tensor | None


def backward(
    problem: Problem, raw: Raw, gradients: RowGradients, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients with respect to q, k, v, bias and additive mask; ``needs`` says which are wanted.

    With t the score after every rule, p = exp(t - lse) and H the entropy, the gradient of t_ij is
    ``p_ij * (dz_i.v_j - dz_i.z_i + dlse_i - dpeak_i - dH_i (t_ij - lse_i + H_i) + ddist_i (|i-j| - dist_i))``,
    and dpeak_i more where j is the row's argmax. p is computed as exp(t - max) / sum, exactly as in the
    forward pass: exp(t - lse) loses digits when scores are large. The division goes into the row's factors.
    """
    state = _Backward(problem, raw, gradients, needs)
    for tile in tiles(problem):
        state.run(tile)
    return state.found()


def _clean(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0.0)


def _idle(gradients: RowGradients, like: Tensor) -> Tensor:
    """Rows without any gradient, (B, H, Q): they add nothing, even where they are NaN.

    A gradient of 0 that has met the NaN of its own row on the way counts as 0.
    """
    idle, spoiled = torch.ones_like(like, dtype=torch.bool), like.isnan()
    for gradient in vars(gradients).values():
        if gradient is not None:
            zero = (gradient == 0) | (gradient.isnan() & (spoiled if gradient.ndim == 3 else spoiled[..., None]))
            idle &= zero if gradient.ndim == 3 else zero.all(-1)
    return idle


class _Backward:
    def __init__(self, problem: Problem, raw: Raw, gradients: RowGradients, needs: tuple[bool, ...]) -> None:
        rule = problem.rule
        inputs = [problem.q, problem.k, problem.v, raw.z]
        strict = not all(
            bool(torch.isfinite(x.sum())) for x in (*inputs, *(g for g in vars(gradients).values() if g is not None))
        )
        if strict:
            problem = Problem(_clean(problem.q), _clean(problem.k), _clean(problem.v), problem.visible, rule)
        self.problem, self.strict, self.raw = problem, strict, raw
        self.scores = Scores(problem, strict=strict)
        self.v = problem.v.contiguous()
        self.peak = gradients.peak
        self.idle = _idle(gradients, raw.lse) if strict else None
        self.share_of_top = torch.exp(raw.peak)  # 1 / sum of exp(t - max); 0 for a row that saw nothing
        gradients = RowGradients(*(None if x is None else self._divided(x) for x in vars(gradients).values()))
        self.gradients = gradients
        self.constant = self._constant()
        if self.idle is not None:
            self.constant = self.constant.masked_fill(self.idle, 0.0)
        self.dq = torch.zeros_like(problem.q, memory_format=torch.contiguous_format)
        self.dk = torch.zeros_like(problem.k, memory_format=torch.contiguous_format)
        self.dv = torch.zeros_like(problem.v, memory_format=torch.contiguous_format)
        self.dterms = [
            torch.zeros(term.shape, dtype=self.dq.dtype, device=term.device) if term is not None and need else None
            for term, need in zip((rule.bias, rule.additive_mask), needs[3:], strict=True)
        ]
        self.needs = needs
        self.unit = LOG2_E if rule.softcap is None else 1.0  # what the queries are multiplied by beside the scale

    def _divided(self, gradient: Tensor) -> Tensor:
        extra = gradient.ndim - self.share_of_top.ndim
        found = gradient * (self.share_of_top[..., None] if extra else self.share_of_top)
        if self.idle is None:
            return found
        return found.masked_fill(self.idle[..., None] if extra else self.idle, 0.0)

    def _constant(self) -> Tensor:
        """The part of a score's gradient that is the same along a row: (B, H, Q)."""
        raw, gradients = self.raw, self.gradients
        total = torch.zeros_like(self.share_of_top)
        if gradients.z is not None:
            total -= (gradients.z * raw.z).sum(-1)
        if gradients.lse is not None:
            total += gradients.lse
        if gradients.peak is not None:
            total -= gradients.peak
        if gradients.entropy is not None:
            assert raw.entropy is not None
            total -= gradients.entropy * (raw.entropy + raw.peak.masked_fill(torch.isneginf(raw.peak), 0.0))
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
        top = tile.of_queries(self.raw.top).reshape(*rows, 1)
        constant = tile.of_queries(self.constant).reshape(*rows, 1)
        dz = None if self.gradients.z is None else tile.of_queries(self.gradients.z).reshape(*rows, -1)
        dq = torch.zeros_like(q)
        for keys, hides in self.scores.blocks(tile):
            below = self.scores.block(tile, q, keys, hides).sub_(top)
            dt = self._score_gradients(tile, below, keys, constant, dz)
            p = below.exp2_()  # times the sum of exp(t - max), by which the row's factors are divided
            self._silence(tile, p, hides)
            if dz is not None and self.needs[2]:
                tile.of_keys(self.dv, keys).baddbmm_(p.mT, dz)
            dt.mul_(p)
            self._add_peak(tile, dt, keys)
            self._silence(tile, dt, hides)
            self._add_terms(tile, dt, keys)
            if self.problem.rule.softcap is not None:
                dt.mul_(self.scores.slope_of_cap(dt.shape))
            dq.baddbmm_(dt, tile.of_keys(self.scores.k, keys))
            if self.needs[1]:
                tile.of_keys(self.dk, keys).baddbmm_(dt.mT, q, alpha=1.0 / self.unit)
        tile.of_queries(self.dq).copy_(dq.mul_(self.scores.factor / self.unit).view(*tile.shape, -1))

    def _silence(self, tile: Tile, block: Tensor, hides: Hidden | None) -> None:
        """Where something is not finite: zero what is hidden, and rows without gradient."""
        if self.idle is not None:
            view = block.view(*tile.shape, -1)
            view.masked_fill_(tile.of_queries(self.idle)[..., None], 0.0)
            if hides is not None:
                view.masked_fill_(hides(), 0.0)

    def _score_gradients(self, tile: Tile, below: Tensor, keys: Span, constant: Tensor, dz: Tensor | None) -> Tensor:
        """The gradient of the scores after every rule, before the factor p."""
        gradients, shape = self.gradients, (*below.shape[:2], 1)
        dt = self.scores.buffer("gradients", *below.shape)
        if dz is None:
            dt.zero_()
        else:
            torch.bmm(dz, tile.of_keys(self.v, keys).mT, out=dt)
        dt.add_(constant)
        if gradients.entropy is not None:
            floor = -(
                torch.finfo(below.dtype).max ** 0.5
            )  # a hidden score times a gradient must not overflow: its p is 0
            dt.addcmul_(below.clamp(min=floor), tile.of_queries(gradients.entropy).reshape(shape), value=-1.0 / LOG2_E)
        if gradients.distance is not None:
            far = tile.of_queries(gradients.distance)[..., None]
            dt.view(*tile.shape, -1).addcmul_(self.scores.gaps(tile, keys), far)
        return dt

    def _add_peak(self, tile: Tile, dt: Tensor, keys: Span) -> None:
        """The largest weight's gradient at the key that has it."""
        if self.peak is None or self.raw.argmax is None:
            return
        place = tile.of_queries(self.raw.argmax).reshape(*dt.shape[:2], 1) - keys[0]
        inside = (place >= 0) & (place < dt.shape[2])
        at = tile.of_queries(self.peak).reshape(*dt.shape[:2], 1)
        dt.scatter_add_(-1, place.clamp(0, dt.shape[2] - 1), at.masked_fill(~inside, 0.0))

    def _add_terms(self, tile: Tile, dt: Tensor, keys: Span) -> None:
        """Add a block's gradient to those of the added terms, summed over what they are broadcast along."""
        view = dt.view(*tile.shape, -1)
        for found in self.dterms:
            if found is not None:
                part = tile.of_added(found, keys)
                part += view.sum_to_size(part.shape)

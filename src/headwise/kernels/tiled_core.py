"""The tiled road's forward pass: an online softmax and every statistic, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.blocks import KEY_BLOCK, Hidden, Tile, tiles
from headwise.kernels.masks import Span
from headwise.kernels.problem import Problem
from headwise.kernels.tiled_scores import LOG2_E, Scores, hidden_score

__all__ = ["Raw", "forward"]


@dataclass(frozen=True)
class Raw:
    """What one pass yields, over the keys alone (no sinks): (B, H, Q) each, z (B, H, Q, D_v).

    Attributes:
        peak: log of the largest weight.
        top: the largest score, in units of log 2, as the backward pass needs it.
        pairs: weights of the named keys, (P, B, H, Q).
    """

    z: Tensor
    lse: Tensor
    peak: Tensor
    top: Tensor
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    distance: Tensor | None = None
    pairs: Tensor | None = None


def forward(problem: Problem, *, statistics: bool, distance: bool, pairs: Tensor | None = None) -> Raw:
    """All tiles, without gradients; the problem is in its dtype of computation, with plain groups.

    ``pairs`` (P, B or 1, Q) names keys whose weights are picked up on the way; -1 for none.
    """
    state = _Forward(problem, statistics, distance, pairs)
    for tile in tiles(problem):
        state.run(tile)
    return state.raw()


class _Forward:
    """One pass: the outputs, and what every tile shares."""

    def __init__(self, problem: Problem, statistics: bool, distance: bool, pairs: Tensor | None) -> None:
        q, v = problem.q, problem.v
        self.named = None if pairs is None else pairs.expand(-1, q.shape[0], -1)
        self.problem, self.statistics, self.distance = problem, statistics, distance
        self.v = v.contiguous()
        self.marks: Tensor | None = None  # where values are NaN, infinite, minus infinite
        if not bool(torch.isfinite(v.sum())):
            self.v = torch.where(torch.isfinite(v), v, 0.0)
            self.marks = torch.cat([v.isnan(), v.isposinf(), v.isneginf()], dim=-1).to(v.dtype)
        self.scores = Scores(problem, strict=not bool(torch.isfinite(problem.k.sum() + q.sum())))
        self.local = torch.arange(KEY_BLOCK, device=v.device, dtype=v.dtype)
        row = q.shape[:3]
        self.z = q.new_zeros(*row, v.shape[3])
        self.top = q.new_full(row, hidden_score(q.dtype))
        self.total = q.new_ones(row)
        self.slope = q.new_zeros(row) if statistics else None
        self.argmax = torch.full(row, -1, dtype=torch.int64, device=q.device) if statistics else None
        self.far = q.new_zeros(row) if distance else None
        low = hidden_score(q.dtype)
        self.at_pairs = None if self.named is None else q.new_full((self.named.shape[0], *row), low)

    def run(self, tile: Tile) -> None:
        """One tile over all its keys."""
        q = self.scores.queries(tile)
        online = _Online(self, tile)
        for keys, hides in self.scores.blocks(tile):
            online.add(self.scores.block(tile, q, keys, hides), keys)
            if self.marks is not None:
                online.mark(self.marks, keys, hides)
        online.store()

    def raw(self) -> Raw:
        """The outputs, from what the tiles have stored."""
        spread = self.total.log()
        lse, peak, z = self.top / LOG2_E + spread, -spread, self.z
        entropy = None if self.slope is None else spread - self.slope / (self.total * LOG2_E)
        far, argmax = None if self.far is None else self.far / self.total, self.argmax
        pairs = None if self.at_pairs is None else torch.exp2(self.at_pairs - self.top) / self.total
        empty = self.top <= hidden_score(self.top.dtype)
        if bool(empty.any()):
            lse, peak = lse.masked_fill(empty, -torch.inf), peak.masked_fill(empty, -torch.inf)
            z = z.masked_fill(empty[..., None], 0.0)
            entropy = None if entropy is None else entropy.masked_fill(empty, 0.0)
            argmax = None if argmax is None else argmax.masked_fill(empty, -1)
            far = None if far is None else far.masked_fill(empty, 0.0)
            pairs = None if pairs is None else pairs.masked_fill(empty, 0.0)
        return Raw(z, lse, peak, self.top, entropy, argmax, far, pairs)


class _Online:
    """The running softmax of a tile's rows: sums over the blocks met so far, None before the first.

    Attributes:
        top: largest score.
        sums: sum of p * v, where p = exp2(score - top).
        total: sum of p.
        slope: sum of p * (score - top), in units of log 2: never positive.
        far: sum of p * |i - j|.
        where: key of the largest score.
        met: how many values that are NaN, infinite, minus infinite the row sees.
        named: keys whose scores are picked up, (batch * groups, share * rows, P), and their scores.
    """

    top: Tensor
    sums: Tensor | None = None
    total: Tensor
    slope: Tensor
    far: Tensor
    where: Tensor
    met: Tensor | None = None

    def __init__(self, state: _Forward, tile: Tile) -> None:
        self.state, self.tile = state, tile
        if state.distance:
            i = torch.arange(*tile.rows, device=state.z.device, dtype=state.z.dtype) + state.problem.offset
            self.i = i.repeat(tile.share)
        if state.named is not None:
            b, g, share, rows = tile.shape
            named = state.named[:, slice(*tile.batch), slice(*tile.rows)].permute(1, 2, 0)
            self.named = named[:, None, None].expand(b, g, share, rows, -1).reshape(b * g, share * rows, -1)
            self.at_pairs = state.z.new_full(self.named.shape, hidden_score(state.z.dtype))

    def add(self, scores: Tensor, keys: Span) -> None:
        """Take in one block of scores, which is overwritten."""
        state, values = self.state, self.tile.of_keys(self.state.v, keys)
        if state.named is not None:
            place = self.named - keys[0]
            inside = (place >= 0) & (place < scores.shape[-1])
            found = scores.gather(-1, place.clamp_(0, scores.shape[-1] - 1))
            self.at_pairs = torch.where(inside, found, self.at_pairs)
        top = self._raise(scores, keys)
        scores.sub_(top[..., None])
        weights = torch.exp2(scores, out=state.scores.buffer("weights", *scores.shape))
        total = weights.sum(-1)
        slope = scores.mul_(weights).sum(-1) if state.statistics else total
        far = self._distance(weights, scores, total, keys) if state.distance else total
        if self.sums is None:
            self.sums = state.scores.buffer("sums", *total.shape, values.shape[2])
            torch.bmm(weights, values, out=self.sums)
        else:
            drop = (self.top - top).clamp_(min=-1e4)  # exp2(-1e4) is 0; a finite drop keeps 0 * drop at 0
            shrink = drop.exp2()
            if state.statistics:
                slope.addcmul_(shrink, torch.addcmul(self.slope, drop, self.total))
            if state.distance:
                far.addcmul_(self.far, shrink)
            total.addcmul_(self.total, shrink)
            self.sums.mul_(shrink[..., None]).baddbmm_(weights, values)
        self.total, self.slope, self.far, self.top = total, slope, far, top

    def _raise(self, scores: Tensor, keys: Span) -> Tensor:
        """The new largest score of each row, and its key where it rose."""
        if not self.state.statistics:
            highest = scores.amax(-1)
            return highest if self.sums is None else torch.maximum(self.top, highest)
        if self.sums is None:
            highest, index = scores.max(-1)
            self.where = index + keys[0]
            return highest
        highest = scores.amax(-1)  # much quicker than max, which is left for blocks in which many rows rise
        rises = highest > self.top
        risen = torch.nonzero(rises.view(-1)).squeeze(1)
        if 4 * risen.numel() > rises.numel():
            self.where = torch.where(rises, scores.max(-1).indices + keys[0], self.where)
        elif risen.numel():
            found = scores.view(-1, scores.shape[-1]).index_select(0, risen).max(-1).indices
            self.where.view(-1)[risen] = found + keys[0]
        return torch.maximum(self.top, highest)

    def mark(self, marks: Tensor, keys: Span, hides: Hidden | None) -> None:
        """Count the values that are not finite and that each row sees; the hidden ones count for nothing."""
        seen = self.total.new_ones(*self.tile.shape, keys[1] - keys[0])
        if hides is not None:
            seen.masked_fill_(hides(), 0.0)
        met = torch.bmm(seen.view(*self.total.shape, -1), self.tile.of_keys(marks, keys))
        self.met = met if self.met is None else self.met + met

    def _distance(self, weights: Tensor, spare: Tensor, total: Tensor, keys: Span) -> Tensor:
        """Sum of p * |i - j| over the block: linear in j left or right of the rows, element by element across them."""
        problem, tile = self.state.problem, self.tile
        first, last = tile.rows[0] + problem.offset, tile.rows[1] - 1 + problem.offset
        left, right = keys[1] - 1 <= first or problem.visible.causal, keys[0] >= last
        if not (left or right):
            view = spare.view(*tile.shape, -1)
            torch.mul(weights.view(*tile.shape, -1), self.state.scores.gaps(tile, keys), out=view)
            return view.sum(-1).view(total.shape)
        length = keys[1] - keys[0]
        local = torch.mv(weights.view(-1, length), self.state.local[:length]).view(total.shape)
        gap = total * (self.i - keys[0]) - local  # positions count from the block's first key: no cancellation far out
        return gap if left else gap.neg_()

    def store(self) -> None:
        """Hand the tile's part over; rows without a block of keys keep what they were made with."""
        if self.sums is None:
            return
        state, of_queries, shape = self.state, self.tile.of_queries, self.tile.shape
        z = self.sums.view(*shape, -1)
        torch.div(z, self.total.view(*shape, 1), out=of_queries(state.z))
        if self.met is not None:
            for met, value in zip(
                self.met.view(*shape, -1).chunk(3, dim=-1), (torch.nan, torch.inf, -torch.inf), strict=True
            ):
                of_queries(state.z).add_(torch.zeros_like(z).masked_fill_(met > 0, value))
        of_queries(state.top).copy_(self.top.view(shape))
        of_queries(state.total).copy_(self.total.view(shape))
        if state.slope is not None and state.argmax is not None:
            of_queries(state.slope).copy_(self.slope.view(shape))
            of_queries(state.argmax).copy_(self.where.view(shape))
        if state.far is not None:
            of_queries(state.far).copy_(self.far.view(shape))
        if state.at_pairs is not None:
            for target, found in zip(state.at_pairs, self.at_pairs.unbind(-1), strict=True):
                of_queries(target).copy_(found.view(shape))

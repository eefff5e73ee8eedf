"""The tiled road's forward pass over tiles, and the autograd function around forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.blocks import KEY_BLOCK, Tile, TileHidden, tiles
from headwise.kernels.masks import Span, hiding_value
from headwise.kernels.problem import Problem

__all__ = ["Raw", "Scores", "forward", "gaps", "hidden_score"]


@dataclass(frozen=True)
class Raw:
    """What one pass yields, over the keys alone (no sinks): (B, H, Q) each, z (B, H, Q, D_v)."""

    z: Tensor
    lse: Tensor
    max_score: Tensor
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    distance: Tensor | None = None


def hidden_score(dtype: torch.dtype) -> float:
    """The score that stands for a hidden key: finite, so that sums stay finite, and below every real score.

    A row that has met only hidden keys has this as its maximum; the first real score wipes what it gathered.
    """
    return torch.finfo(dtype).min / 2


def forward(problem: Problem, *, statistics: bool, distance: bool) -> Raw:
    """All tiles, without gradients; the problem is in its dtype of computation, with plain groups."""
    state = _Forward(problem, statistics, distance)
    for tile in tiles(problem):
        state.run(tile)
    return state.raw()


class Scores:
    """Makes blocks of scores: the keys, the order of the score rules, and scratch that every tile uses again."""

    def __init__(self, problem: Problem, *, strict: bool) -> None:
        self.problem, self.strict = problem, strict
        self.k = problem.k.contiguous()
        self.factor = problem.scale / (problem.rule.softcap or 1.0)
        self.scratch: dict[str, Tensor] = {}

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Scratch of this shape, the same memory at every call of the same name."""
        size = math.prod(shape)
        kept = self.scratch.get(name)
        if kept is None or kept.numel() < size:
            kept = self.scratch[name] = self.k.new_empty(size)
        return kept[:size].view(shape)

    def queries(self, tile: Tile) -> Tensor:
        """The tile's queries, scaled before the product: (batch * groups, share * rows, d_k)."""
        b, g, share, rows = tile.shape
        q = self.buffer("q", b, g, share, rows, self.k.shape[3])
        torch.mul(tile.of_queries(self.problem.q), self.factor, out=q)
        return q.view(b * g, share * rows, -1)

    def block(self, tile: Tile, q: Tensor, keys: Span, hides: Tensor | None) -> Tensor:
        """Scores (batch * groups, share * rows, keys): scaled, capped, biased, hidden ones at the floor."""
        rule = self.problem.rule
        scores = self.buffer("scores", *q.shape[:2], keys[1] - keys[0])
        torch.bmm(q, tile.of_keys(self.k, keys).mT, out=scores)
        if rule.softcap is not None:
            scores.tanh_()
            self.buffer("capped", *scores.shape).copy_(scores)
            scores.mul_(rule.softcap)
        view = scores.view(*tile.shape, -1)
        for term in rule.added:
            view.add_(tile.of_added(term, keys).to(scores.dtype).clamp(min=hiding_value(scores.dtype)))
        if hides is not None:
            view.masked_fill_(hides, hidden_score(scores.dtype))
        if self.strict:
            scores.clamp_(min=hidden_score(scores.dtype))
        return scores

    def slope_of_cap(self, shape: torch.Size) -> Tensor:
        """d (capped score) / d (score / cap) of the last block: cap * (1 - tanh^2)."""
        cap = self.problem.rule.softcap
        assert cap is not None
        tanh = self.buffer("capped", *shape)
        return tanh.square_().neg_().add_(1.0).mul_(cap)


def gaps(problem: Problem, tile: Tile, keys: Span) -> Tensor:
    """|i - j| for the tile's rows and a block of keys, (rows, keys)."""
    i = torch.arange(*tile.rows, device=problem.q.device) + problem.offset
    j = torch.arange(*keys, device=problem.q.device)
    return (i[:, None] - j).abs().to(problem.q.dtype)


class _Forward:
    """One pass: the outputs, the augmented values, and scratch that every tile uses again."""

    def __init__(self, problem: Problem, statistics: bool, distance: bool) -> None:
        q, v = problem.q, problem.v
        self.problem, self.statistics, self.distance = problem, statistics, distance
        batch, heads, queries, _ = q.shape
        self.dirty = not bool(torch.isfinite(v.sum()))
        self.scores = Scores(problem, strict=not bool(torch.isfinite(problem.k.sum() + q.sum())))
        columns = [torch.where(torch.isfinite(v), v, 0.0) if self.dirty else v, v.new_ones(*v.shape[:3], 1)]
        if distance:
            local = torch.arange(v.shape[2], device=v.device) % KEY_BLOCK - KEY_BLOCK // 2
            columns.append(local.to(v.dtype).view(1, 1, -1, 1).expand(*v.shape[:3], 1))
        self.values = torch.cat(columns, dim=-1)
        self.z = q.new_zeros(batch, heads, queries, v.shape[3])
        row = (batch, heads, queries)
        self.lse = q.new_full(row, -torch.inf)
        self.max_score = q.new_full(row, -torch.inf)
        self.entropy = q.new_zeros(row) if statistics else None
        self.argmax = torch.full(row, -1, dtype=torch.int64, device=q.device) if statistics else None
        self.far = q.new_zeros(row) if distance else None

    def raw(self) -> Raw:
        return Raw(self.z, self.lse, self.max_score, self.entropy, self.argmax, self.far)

    def run(self, tile: Tile) -> None:
        """One tile over all its keys."""
        q = self.scores.queries(tile)
        online = _Online(self, (q.shape[0], q.shape[1]), tile)
        for keys, hides in TileHidden(self.problem, tile).blocks():
            online.add(self.scores.block(tile, q, keys, hides), keys)
        online.store()


class _Online:
    """The running softmax of a tile's rows."""

    def __init__(self, state: _Forward, rows: tuple[int, int], tile: Tile) -> None:
        self.state, self.tile = state, tile
        new = state.z.new_full
        self.top = new(rows, hidden_score(state.z.dtype))
        self.sums: Tensor | None = None  # sum of p * [v, 1, local position]
        self.slope = new(rows, 0.0)  # sum of p * (score - top): never positive
        self.far = new(rows, 0.0)
        self.where = torch.full(rows, -1, dtype=torch.int64, device=state.z.device) if state.statistics else None

    def add(self, scores: Tensor, keys: Span) -> None:
        """Take in one block of scores, which is overwritten."""
        state, d_v = self.state, self.state.problem.v.shape[3]
        if self.where is not None:
            highest, index = scores.max(-1)
            torch.where(highest > self.top, index + keys[0], self.where, out=self.where)
        else:
            highest = scores.amax(-1)
        top = torch.maximum(self.top, highest)
        drop = (self.top - top).clamp_(min=-1e4)  # exp(-1e4) is 0; a finite drop keeps 0 * drop at 0
        shrink = drop.exp()
        scores.sub_(top[..., None])
        weights = torch.exp(scores, out=state.scores.buffer("weights", *scores.shape))
        if state.statistics:
            fresh = scores.mul_(weights).sum(-1)
            if self.sums is not None:
                fresh += shrink * (self.slope + drop * self.sums[..., d_v])
            self.slope = fresh
        block = torch.bmm(weights, self.tile.of_keys(state.values, keys))
        if state.distance:
            self._add_distance(weights, scores, block, keys, shrink)
        self.sums = block if self.sums is None else torch.addcmul(block, self.sums, shrink[..., None])
        self.top = top

    def _add_distance(self, weights: Tensor, spare: Tensor, block: Tensor, keys: Span, shrink: Tensor) -> None:
        problem, tile, d_v = self.state.problem, self.tile, self.state.problem.v.shape[3]
        i = torch.arange(*tile.rows, device=weights.device) + problem.offset
        first, last = tile.rows[0] + problem.offset, tile.rows[1] - 1 + problem.offset
        left, right = keys[1] - 1 <= first or problem.visible.causal, keys[0] >= last
        if left or right:
            base = keys[0] // KEY_BLOCK * KEY_BLOCK + KEY_BLOCK // 2
            gap = (i - base).to(weights.dtype).repeat(tile.share)
            fresh = gap * block[..., d_v] - block[..., d_v + 1]
            fresh = fresh if left else -fresh
        else:
            view = spare.view(*tile.shape, -1)
            torch.mul(weights.view(*tile.shape, -1), gaps(problem, tile, keys), out=view)
            fresh = view.sum(-1).view(spare.shape[:2])
        self.far = self.far * shrink + fresh

    def store(self) -> None:
        """Write the tile's part of the outputs; rows that saw nothing keep theirs."""
        if self.sums is None:
            return
        state, tile = self.state, self.tile
        d_v = state.problem.v.shape[3]
        total = self.sums[..., d_v]
        empty = self.top <= hidden_score(state.z.dtype)

        def put(target: Tensor, value: Tensor, nothing: float) -> None:
            tile.of_queries(target).copy_(value.masked_fill(empty, nothing).view(tile.shape))

        z = self.sums[..., :d_v] / total[..., None]
        tile.of_queries(state.z).copy_(z.masked_fill_(empty[..., None], 0.0).view(*tile.shape, d_v))
        put(state.lse, self.top + total.log(), -torch.inf)
        put(state.max_score, self.top, -torch.inf)
        if state.entropy is not None and self.where is not None and state.argmax is not None:
            put(state.entropy, total.log() - self.slope / total, 0.0)
            tile.of_queries(state.argmax).copy_(self.where.masked_fill(empty, -1).view(tile.shape))
        if state.far is not None:
            put(state.far, self.far / total, 0.0)

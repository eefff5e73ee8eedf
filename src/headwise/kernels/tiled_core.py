"""The tiled road's forward pass over tiles, and the autograd function around forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.blocks import KEY_BLOCK, Tile, hides_by_data, key_blocks, tiles
from headwise.kernels.masks import Span
from headwise.kernels.problem import Problem

__all__ = ["Raw", "Scores", "forward", "gaps", "hidden_score"]


#: Scores are kept in units of log 2: exp2 is quick for every argument, exp is not where it underflows.
LOG2_E = math.log2(math.e)


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
    """Makes blocks of scores: the keys, the order of the score rules, and scratch that every tile uses again.

    Scores come in units of log 2 (multiplied by log2 e), so that ``exp2`` undoes them.
    """

    def __init__(self, problem: Problem, *, strict: bool) -> None:
        self.problem, self.strict = problem, strict
        self.k = problem.k.contiguous()
        cap = problem.rule.softcap
        self.factor = problem.scale * LOG2_E if cap is None else problem.scale / cap
        self.scratch: dict[str, Tensor] = {}
        self.floors: dict[tuple[int, ...], Tensor] = {}
        self.by_data = hides_by_data(problem)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Scratch of this shape, the same memory at every call of the same name."""
        size = math.prod(shape)
        kept = self.scratch.get(name)
        if kept is None or kept.numel() < size:
            kept = self.scratch[name] = self.k.new_empty(size)
        return kept[:size].view(shape)

    def blocks(self, tile: Tile) -> Iterator[tuple[Span, Tensor | None]]:
        """The key blocks of a tile, each with what it hides; see :func:`key_blocks`."""
        return key_blocks(self.problem, tile, self.by_data)

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
            scores.mul_(rule.softcap * LOG2_E)
        view = scores.view(*tile.shape, -1)
        for term in rule.added:
            added = tile.of_added(term, keys).to(scores.dtype).clamp(min=hidden_score(scores.dtype) / LOG2_E)
            view.add_(added, alpha=LOG2_E)
        if hides is not None:
            self._hide(view, tile, keys, hides)
        if self.strict:
            scores.clamp_(min=hidden_score(scores.dtype))
        return scores

    def _hide(self, view: Tensor, tile: Tile, keys: Span, hides: Tensor) -> None:
        low = hidden_score(view.dtype)
        if self.strict:  # what is hidden may be NaN, which no sum removes
            view.masked_fill_(hides, low)
            return
        # Adding the floor is much quicker than filling, and swallows every finite score.
        if self.by_data:
            view.add_(torch.zeros_like(hides, dtype=view.dtype).masked_fill_(hides, low))
            return
        place = (tile.rows[0] - keys[0], tile.rows[1] - tile.rows[0], keys[1] - keys[0])
        floor = self.floors.get(place)
        if floor is None:
            floor = self.floors[place] = torch.zeros_like(hides, dtype=view.dtype).masked_fill_(hides, low)
        view.add_(floor)

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
    """One pass: the outputs, and what every tile shares."""

    def __init__(self, problem: Problem, statistics: bool, distance: bool) -> None:
        q, v = problem.q, problem.v
        self.problem, self.statistics, self.distance = problem, statistics, distance
        self.v = v.contiguous()
        self.dirty = not bool(torch.isfinite(v.sum()))
        if self.dirty:
            self.v = torch.where(torch.isfinite(v), v, 0.0)
        self.scores = Scores(problem, strict=not bool(torch.isfinite(problem.k.sum() + q.sum())))
        self.local = torch.arange(KEY_BLOCK, device=v.device, dtype=v.dtype)
        batch, heads, queries, _ = q.shape
        row = (batch, heads, queries)
        self.z = q.new_zeros(*row, v.shape[3])
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
        for keys, hides in self.scores.blocks(tile):
            online.add(self.scores.block(tile, q, keys, hides), keys)
        online.store()


class _Online:
    """The running softmax of a tile's rows."""

    def __init__(self, state: _Forward, rows: tuple[int, int], tile: Tile) -> None:
        self.state, self.tile = state, tile
        new = state.z.new_full
        self.top = new(rows, hidden_score(state.z.dtype))
        self.sums: Tensor | None = None  # sum of p * v
        self.total = new(rows, 0.0)  # sum of p
        self.slope = new(rows, 0.0)  # sum of p * (score - top), in units of log 2: never positive
        self.far = new(rows, 0.0)  # sum of p * |i - j|
        self.where = torch.full(rows, -1, dtype=torch.int64, device=state.z.device) if state.statistics else None
        if state.distance:
            i = torch.arange(*tile.rows, device=state.z.device, dtype=state.z.dtype) + state.problem.offset
            self.i = i.repeat(tile.share)

    def add(self, scores: Tensor, keys: Span) -> None:
        """Take in one block of scores, which is overwritten."""
        state = self.state
        top = self._raise(scores, keys)
        scores.sub_(top[..., None])
        weights = torch.exp2(scores, out=state.scores.buffer("weights", *scores.shape))
        total = weights.sum(-1)
        slope = scores.mul_(weights).sum(-1) if state.statistics else self.slope
        far = self._distance(weights, scores, total, keys) if state.distance else self.far
        if self.sums is None:
            self.sums = torch.bmm(weights, self.tile.of_keys(state.v, keys))
        else:
            drop = (self.top - top).clamp_(min=-1e4)  # exp2(-1e4) is 0; a finite drop keeps 0 * drop at 0
            shrink = drop.exp2()
            if state.statistics:
                slope += shrink * (self.slope + drop * self.total)
            if state.distance:
                far.addcmul_(self.far, shrink)
            total.addcmul_(self.total, shrink)
            self.sums.mul_(shrink[..., None]).baddbmm_(weights, self.tile.of_keys(state.v, keys))
        self.total, self.slope, self.far, self.top = total, slope, far, top

    def _raise(self, scores: Tensor, keys: Span) -> Tensor:
        """The new running maximum; the place of the largest score where it rose."""
        if self.where is None:
            return torch.maximum(self.top, scores.amax(-1))
        if self.sums is not None:
            highest = scores.amax(-1)
            risen = torch.nonzero((highest > self.top).view(-1)).squeeze(1)
            if 2 * risen.numel() < highest.numel():  # a search over few rows: amax is much quicker than max
                if risen.numel():
                    found = scores.view(-1, scores.shape[-1])[risen].max(-1).indices
                    self.where.view(-1)[risen] = found + keys[0]
                return torch.maximum(self.top, highest)
        highest, index = scores.max(-1)
        torch.where(highest > self.top, index + keys[0], self.where, out=self.where)
        return torch.maximum(self.top, highest)

    def _distance(self, weights: Tensor, spare: Tensor, total: Tensor, keys: Span) -> Tensor:
        """Sum of p * |i - j| over the block: linear in j left or right of the rows, element by element across them."""
        problem, tile = self.state.problem, self.tile
        first, last = tile.rows[0] + problem.offset, tile.rows[1] - 1 + problem.offset
        left, right = keys[1] - 1 <= first or problem.visible.causal, keys[0] >= last
        if not (left or right):
            view = spare.view(*tile.shape, -1)
            torch.mul(weights.view(*tile.shape, -1), gaps(problem, tile, keys), out=view)
            return view.sum(-1).view(total.shape)
        length = keys[1] - keys[0]
        local = torch.mv(weights.view(-1, length), self.state.local[:length]).view(total.shape)
        gap = total * (self.i - keys[0]) - local  # positions count from the block's first key: no cancellation far out
        return gap if left else gap.neg_()

    def store(self) -> None:
        """Write the tile's part of the outputs; rows that saw nothing keep theirs."""
        if self.sums is None:
            return
        state, tile = self.state, self.tile
        empty = self.top <= hidden_score(state.z.dtype)

        def put(target: Tensor, value: Tensor, nothing: float) -> None:
            tile.of_queries(target).copy_(value.masked_fill_(empty, nothing).view(tile.shape))

        z = self.sums.div_(self.total[..., None]).masked_fill_(empty[..., None], 0.0)
        tile.of_queries(state.z).copy_(z.view(*tile.shape, -1))
        natural = self.top / LOG2_E
        spread = self.total.log()
        put(state.lse, natural + spread, -torch.inf)
        put(state.max_score, natural, -torch.inf)
        if state.entropy is not None and self.where is not None and state.argmax is not None:
            put(state.entropy, spread - self.slope / (self.total * LOG2_E), 0.0)
            tile.of_queries(state.argmax).copy_(self.where.masked_fill_(empty, -1).view(tile.shape))
        if state.far is not None:
            put(state.far, self.far / self.total, 0.0)

"""Blocks of scores for the tiled road: scale, soft cap, added terms, and what is hidden, in that order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.kernels.blocks import Hidden, Tile, hides_by_data, key_blocks, only_hiding
from headwise.kernels.masks import Span
from headwise.kernels.problem import Problem

__all__ = ["LOG2_E", "Scores", "hidden_score"]

#: Scores are kept in units of log 2: exp2 is quick for every argument, exp is not where it underflows.
LOG2_E = math.log2(math.e)


def hidden_score(dtype: torch.dtype) -> float:
    """The score that stands for a hidden key: finite, so that sums stay finite, and below every real score.

    A row that has met only hidden keys has this as its maximum; the first real score wipes what it gathered.
    """
    return torch.finfo(dtype).min / 8  # two added terms and the mask may hide one key together


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
        self.floors: dict[tuple[int, int, int], Tensor] = {}
        self.distances: dict[tuple[int, int, int], Tensor] = {}
        self.hiding = only_hiding(problem)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Scratch of this shape, the same memory at every call of the same name."""
        size = math.prod(shape)
        kept = self.scratch.get(name)
        if kept is None or kept.numel() < size:
            kept = self.scratch[name] = self.k.new_empty(size)
        return kept[:size].view(shape)

    def blocks(self, tile: Tile) -> Iterator[tuple[Span, Hidden | None]]:
        """The key blocks of a tile, each with what it hides; see :func:`key_blocks`."""
        return key_blocks(self.hiding, tile)

    def queries(self, tile: Tile) -> Tensor:
        """The tile's queries, scaled before the product: (batch * groups, share * rows, d_k)."""
        b, g, share, rows = tile.shape
        q = self.buffer("q", b, g, share, rows, self.k.shape[3])
        torch.mul(tile.of_queries(self.problem.q), self.factor, out=q)
        return q.view(b * g, share * rows, -1)

    def block(self, tile: Tile, q: Tensor, keys: Span, hides: Hidden | None) -> Tensor:
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

    def _hide(self, view: Tensor, tile: Tile, keys: Span, hides: Hidden) -> None:
        low = hidden_score(view.dtype)
        if self.strict:  # what is hidden may be NaN, which no sum removes
            view.masked_fill_(hides(), low)
            return
        # Adding the floor is much quicker than filling, and swallows every finite score.
        if hides_by_data(self.hiding):
            view.add_(_floor_of(hides(), view))
            return
        place = _place(tile, keys)
        floor = self.floors.get(place)
        if floor is None:
            floor = self.floors[place] = _floor_of(hides(), view)
        view.add_(floor)

    def gaps(self, tile: Tile, keys: Span) -> Tensor:
        """|i - j| for the tile's rows and a block of keys, (rows, keys)."""
        place = _place(tile, keys)
        found = self.distances.get(place)
        if found is None:
            i = torch.arange(place[1], device=self.k.device, dtype=self.k.dtype) + (place[0] + self.problem.offset)
            found = (i[:, None] - torch.arange(place[2], device=self.k.device, dtype=self.k.dtype)).abs()
            self.distances[place] = found
        return found

    def slope_of_cap(self, shape: torch.Size) -> Tensor:
        """d (capped score) / d (score / cap) of the last block: cap * (1 - tanh^2)."""
        cap = self.problem.rule.softcap
        assert cap is not None
        tanh = self.buffer("capped", *shape)
        return tanh.square_().neg_().add_(1.0).mul_(cap)


def _place(tile: Tile, keys: Span) -> tuple[int, int, int]:
    """All that what depends on distance alone depends on: where the rows stand to the keys, and how many there are."""
    return tile.rows[0] - keys[0], tile.rows[1] - tile.rows[0], keys[1] - keys[0]


def _floor_of(hides: Tensor, like: Tensor) -> Tensor:
    """0 where a key is seen, the hidden score where it is not."""
    return torch.zeros_like(hides, dtype=like.dtype).masked_fill_(hides, hidden_score(like.dtype))

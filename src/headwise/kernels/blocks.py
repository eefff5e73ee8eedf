"""How the tiled road cuts the work: ranges of batch, groups, queries and keys, and what each block hides.

The sizes were chosen by measurement (benchmarks/kernels_blocks.py): a block of scores and its
exponential should stay in the second-level cache of the cores that work on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headwise.kernels.masks import Span, cut, has_tensor_rules, hiding_value, key_range, sure_range, visible_block
from headwise.kernels.problem import Problem

__all__ = ["KEY_BLOCK", "Hidden", "Tile", "hides_by_data", "key_blocks", "only_hiding", "spans", "tiles"]

#: Makes what a block hides, when it is needed.
Hidden = Callable[[], Tensor]

#: Keys in a block: key blocks begin at multiples of this.
KEY_BLOCK = 512
#: Scores in a block, about: the rows of a tile are chosen so that rows * KEY_BLOCK comes to this.
BLOCK_SCORES = 768 * 1024


def spans(length: int, step: int, start: int = 0) -> Iterator[Span]:
    """``[start, length)`` cut at multiples of ``step``."""
    while start < length:
        stop = min((start // step + 1) * step, length)
        yield start, stop
        start = stop


@dataclass(frozen=True)
class Tile:
    """A range of batch entries, key-value groups and query rows that is worked on at once.

    Attributes:
        batch, groups, rows: ``[start, stop)`` of each.
        share: query heads per group.
    """

    batch: Span
    groups: Span
    rows: Span
    share: int

    @property
    def heads(self) -> Span:
        """The query heads of the groups."""
        return self.groups[0] * self.share, self.groups[1] * self.share

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, groups, query heads per group, rows)."""
        b, g, r = (span[1] - span[0] for span in (self.batch, self.groups, self.rows))
        return b, g, self.share, r

    def of_queries(self, x_BHQ: Tensor) -> Tensor:
        """The tile's part of a (B, H, Q, ...) tensor, as (batch, groups, share, rows, ...)."""
        part = x_BHQ[slice(*self.batch), slice(*self.heads), slice(*self.rows)]
        return torch.unflatten(part, 1, (-1, self.share))

    def of_keys(self, x_BGKD: Tensor, keys: Span) -> Tensor:
        """The tile's part of a contiguous (B, G, K, D) tensor, as (batch * groups, keys, D)."""
        part = x_BGKD[slice(*self.batch), slice(*self.groups), slice(*keys)]
        return part.flatten(0, 1)  # a view: a tile has one batch entry, or all groups

    def of_added(self, term: Tensor, keys: Span) -> Tensor:
        """The tile's block of an added term or a mask, with five axes (batch, groups, share, rows, keys)."""
        part = cut(term, self.batch, self.heads, self.rows, keys)
        return split_heads(part, self.share)


def split_heads(block: Tensor, share: int) -> Tensor:
    """(batch, heads or 1, rows, keys) as (batch, groups or 1, share or 1, rows, keys)."""
    return block[:, :, None] if block.shape[1] == 1 else torch.unflatten(block, 1, (-1, share))


def tiles(problem: Problem) -> Iterator[Tile]:
    """All tiles, query rows outermost within a range of the batch, so that masks are made once for all groups."""
    batch, heads, queries, _ = problem.q.shape
    groups, keys = problem.k.shape[1], problem.k.shape[2]
    share = heads // groups
    width = max(1, min(KEY_BLOCK, keys))
    rows = max(1, min(queries, 256, max(16, BLOCK_SCORES // (width * share))))
    wide = max(1, BLOCK_SCORES // (width * share * rows))  # (batch, group) pairs per tile
    some_groups = min(groups, wide)
    some_batch = max(1, wide // groups) if some_groups == groups else 1
    for batch_span in spans(batch, some_batch):
        for row_span in spans(queries, rows):
            for group_span in spans(groups, some_groups):
                yield Tile(batch_span, group_span, row_span, share)


def only_hiding(problem: Problem) -> Problem:
    """The problem without the added terms that hide no key: what :func:`key_blocks` has to look at."""
    bias, additive = (
        term
        if term is not None and term.numel() and bool(torch.amin(term.detach()) <= hiding_value(term.dtype))
        else None
        for term in (problem.rule.bias, problem.rule.additive_mask)
    )
    return replace(problem, rule=replace(problem.rule, bias=bias, additive_mask=additive))


def hides_by_data(problem: Problem) -> bool:
    """Whether data can hide a key, and not only its distance from the query."""
    return has_tensor_rules(problem.visible) or bool(problem.rule.added)


def key_blocks(problem: Problem, tile: Tile) -> Iterator[tuple[Span, Hidden | None]]:
    """Key blocks in which a query of the tile may see something, in order, each with what it hides.

    The second part is None where nothing is hidden, otherwise a function that makes a bool with five
    axes, broadcastable to (batch, groups, share, rows, keys), True = hidden. The problem is one that
    :func:`only_hiding` has cleared; without data that hides, the mask has lengths of 1 but for rows and keys.
    """
    by_data = hides_by_data(problem)

    def by_distance(keys: Span) -> Hidden:
        def make() -> Tensor:
            seen = visible_block(problem, tile.rows, keys, tile.batch, tile.heads)
            assert seen is not None
            return split_heads(~seen, tile.share)

        return make

    low, high = key_range(problem, *tile.rows)
    sure = sure_range(problem, *tile.rows)
    for keys in spans(high, KEY_BLOCK, low):
        if not by_data:
            yield keys, None if sure[0] <= keys[0] and keys[1] <= sure[1] else by_distance(keys)
            continue
        seen = visible_block(problem, tile.rows, keys, tile.batch, tile.heads)
        if seen is None or bool(seen.all()):
            yield keys, None
        elif bool(seen.any()):
            yield keys, partial(split_heads, ~seen, tile.share)

"""Which query heads and key-value heads of a block are left, and which rows of its weights that means."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headwise.errors import UnsupportedError
from headwise.layout import Block

__all__ = ["Kept", "fused_rows", "head_rows", "kept_of", "query_rows"]


@dataclass(frozen=True)
class Kept:
    """What is left of a block.

    Attributes:
        heads: query heads, by their numbers in the block before the cut.
        kv: key-value heads, by theirs: those that a head that is left reads.
        kv_map: for each head that is left the key-value head that it reads, counted among ``kv``.

    Example:
        >>> block = Block("attn", query_heads=6, kv_heads=2, d_k=2, d_v=2, kv_map=(0, 0, 0, 1, 1, 1))
        >>> kept_of(block, {0, 1}).kv_map, kept_of(block, {0, 1}).even
        ((0, 1, 1, 1), False)
        >>> kept_of(block, {0, 4}).even, kept_of(block, {3, 4, 5}).kv
        (True, (0,))
    """

    heads: tuple[int, ...]
    kv: tuple[int, ...]
    kv_map: tuple[int, ...]

    @property
    def even(self) -> bool:
        """Whether the same number of consecutive query heads reads each key-value head."""
        if not self.heads:
            return True
        each = len(self.heads) // len(self.kv)
        return self.kv_map == tuple(at // each for at in range(len(self.heads))) if each else False


def kept_of(block: Block, removed: Collection[int]) -> Kept:
    """What is left of ``block`` without the query heads ``removed``: a key-value head goes with its last reader."""
    heads = tuple(head for head in range(block.query_heads) if head not in removed)
    kv = tuple(sorted({block.kv_map[head] for head in heads}))
    return Kept(heads, kv, tuple(kv.index(block.kv_map[head]) for head in heads))


def head_rows(heads: Sequence[int], width: int, start: int = 0) -> list[int]:
    """Rows of a weight in which head after head has ``width`` rows, from row ``start`` on.

    >>> head_rows([0, 2], 2)
    [0, 1, 4, 5]
    """
    return [start + head * width + at for head in heads for at in range(width)]


def fused_rows(block: Block, kept: Kept, arrangement: str) -> list[int]:
    """Rows that are left of a weight that holds queries, keys and values together.

    Args:
        block: the block before the cut.
        kept: what is left of it.
        arrangement: ``"q|k|v"``, ``"(q,k,v) per head"`` or ``"(q..,k,v) per group"``.

    Raises:
        UnsupportedError: groups that lie together cannot be of different sizes, or the arrangement is not known.

    Example:
        >>> block = Block("attn", query_heads=4, kv_heads=4, d_k=2, d_v=2, kv_map=(0, 1, 2, 3))
        >>> kept = kept_of(block, {1})
        >>> sorted(set(range(24)) - set(fused_rows(block, kept, "q|k|v")))
        [2, 3, 10, 11, 18, 19]
        >>> sorted(set(range(24)) - set(fused_rows(block, kept, "(q,k,v) per head")))
        [6, 7, 8, 9, 10, 11]
    """
    d_k, d_v = block.d_k, block.d_v
    if arrangement == "q|k|v":
        keys = block.query_heads * d_k
        values = keys + block.kv_heads * d_k
        return [*head_rows(kept.heads, d_k), *head_rows(kept.kv, d_k, keys), *head_rows(kept.kv, d_v, values)]
    if arrangement in ("(q,k,v) per head", "(q..,k,v) per group"):
        if not kept.even or not block.even:
            raise UnsupportedError(
                f"{block.module}: its weight holds the query heads of a group beside their key and value head, so "
                "every group must keep the same number; remove whole groups (--unit group), or the same number from "
                "each (--uniform)"
            )
        each = block.query_heads // block.kv_heads if block.kv_heads else 1
        whole = each * d_k + d_k + d_v
        rows: list[int] = []
        for group in kept.kv:
            own = [head - group * each for head in kept.heads if head // each == group]
            rows += head_rows(own, d_k, group * whole)
            rows += range(group * whole + each * d_k, (group + 1) * whole)
        return rows
    raise UnsupportedError(f"{block.module}: heads that lie as {arrangement!r} in a weight cannot be cut")


def query_rows(block: Block, heads: Sequence[int]) -> list[int]:
    """Rows of the weight that holds W_Q that make the queries of ``heads``.

    Raises:
        UnsupportedError: the arrangement is not known.

    Example:
        >>> from headwise.layout import Projection
        >>> block = Block("attn", 4, 2, 2, 2, (0, 0, 1, 1), q=Projection("qkv", False, "(q..,k,v) per group"))
        >>> query_rows(block, [1, 2])
        [2, 3, 8, 9]
        >>> block = Block("attn", 2, 2, 2, 2, (0, 1), q=Projection("qkv", False, "by head", starts=(8, 2), width=2))
        >>> query_rows(block, [0])
        [8, 9]
    """
    d_k, d_v = block.d_k, block.d_v
    arrangement = "" if block.q is None else block.q.arrangement
    if block.q is not None and block.q.starts:
        width = block.q.width or d_k
        return [block.q.starts[head] + at for head in heads for at in range(width)]
    if arrangement in ("heads", "q|k|v"):
        return head_rows(heads, d_k)
    if arrangement in ("(q,k,v) per head", "(q..,k,v) per group"):
        each = block.query_heads // block.kv_heads
        whole = each * d_k + d_k + d_v
        return [row for head in heads for row in head_rows([head % each], d_k, head // each * whole)]
    raise UnsupportedError(f"{block.module}: queries that lie as {arrangement!r} in a weight cannot be told apart")

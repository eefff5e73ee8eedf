"""What may go together: one query head, or a key-value head with all query heads that read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["BlockShape", "Kind", "Unit", "gone_of", "units_of"]

Kind = Literal["head", "group"]


@dataclass(frozen=True, order=True)
class Unit:
    """Query heads of one block that go together.

    Attributes:
        block: path of the attention module.
        heads: numbers of its query heads.
    """

    block: str
    heads: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.block}:{','.join(map(str, self.heads))}"


@dataclass(frozen=True)
class BlockShape:
    """A block in numbers.

    Attributes:
        block: path of the attention module.
        kv_map: for each query head the key-value head that it reads.
        per_head: parameters that go with a query head: its rows of W_Q and its columns of W_O.
        per_kv: parameters that go with a key-value head.
        intercept: parameters of an intercept that the repair adds when the block loses a head and has none yet.
        cache_per_kv: bytes that a key-value head keeps per token while decoding, over all sites that read the block.
        seconds: of its attention in one forward pass; None where nobody measured.
    """

    block: str
    kv_map: tuple[int, ...]
    per_head: int = 0
    per_kv: int = 0
    intercept: int = 0
    cache_per_kv: float = 0.0
    seconds: float | None = None

    @property
    def query_heads(self) -> int:
        """Number of query heads."""
        return len(self.kv_map)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return len(set(self.kv_map))

    @property
    def parameters(self) -> int:
        """Of all its heads."""
        return self.per_head * self.query_heads + self.per_kv * self.kv_heads


def units_of(shape: BlockShape, kind: Kind) -> tuple[Unit, ...]:
    """Every unit of a block, in order.

    Example:
        >>> [unit.heads for unit in units_of(BlockShape("attn", (0, 0, 1, 1)), "group")]
        [(0, 1), (2, 3)]
    """
    if kind == "head":
        return tuple(Unit(shape.block, (head,)) for head in range(shape.query_heads))
    groups: dict[int, list[int]] = {}
    for head, kv in enumerate(shape.kv_map):
        groups.setdefault(kv, []).append(head)
    return tuple(Unit(shape.block, tuple(heads)) for _, heads in sorted(groups.items()))


def gone_of(removed: Iterable[Unit]) -> Mapping[str, frozenset[int]]:
    """For each block that lost heads, which.

    Example:
        >>> sorted(gone_of([Unit("a", (1,)), Unit("a", (0,))])["a"])
        [0, 1]
    """
    found: dict[str, set[int]] = {}
    for unit in removed:
        found.setdefault(unit.block, set()).update(unit.heads)
    return {block: frozenset(heads) for block, heads in found.items()}

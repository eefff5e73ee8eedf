"""What a set of heads costs and what is left without it: heads, parameters, cache bytes, seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwise.plans.units import BlockShape, Unit, gone_of

__all__ = ["Ledger", "Totals"]


@dataclass(frozen=True)
class Totals:
    """A model in numbers.

    Attributes:
        heads: query heads that attend; those that only put out a running mean are not counted.
        parameters: of the whole model.
        cache_bytes: of keys and values, per token and sequence.
        seconds: of a forward pass; None where nobody measured.
    """

    heads: int
    parameters: int
    cache_bytes: float
    seconds: float | None = None

    def to_document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


class Ledger:
    """Adds up what goes.

    Args:
        shapes: the blocks.
        parameters: of the whole model.
        seconds: of one forward pass of the whole model, where the blocks have theirs.
        running: what goes is replaced by a running mean, which one head of every key-value head stays to put out.

    Example:
        >>> ledger = Ledger([BlockShape("a", (0, 0, 1, 1), per_head=10, per_kv=5, cache_per_kv=8.0)], parameters=100)
        >>> ledger.after([Unit("a", (0,))]).parameters, ledger.after([Unit("a", (0, 1))]).parameters
        (90, 75)
        >>> repaired = Ledger([BlockShape("a", (0, 1), per_head=10, intercept=4)], parameters=100)
        >>> repaired.after([Unit("a", (0,))]).parameters
        94
        >>> ledger
        Ledger(4 heads in 1 blocks, 100 parameters)
        >>> standing = Ledger([BlockShape("a", (0, 0, 1, 1), per_head=10, per_kv=5)], parameters=100, running=True)
        >>> standing.after([Unit("a", (0, 1, 2))]).parameters, standing.carriers([Unit("a", (0, 1, 2))])
        (90, 2)
    """

    def __init__(
        self, shapes: Iterable[BlockShape], parameters: int, seconds: float | None = None, *, running: bool = False
    ) -> None:
        self.running = running
        self.shapes: Mapping[str, BlockShape] = {shape.block: shape for shape in shapes}
        measured = seconds is not None and all(shape.seconds is not None for shape in self.shapes.values())
        self.before = Totals(
            sum(shape.query_heads for shape in self.shapes.values()),
            parameters,
            sum(shape.cache_per_kv * shape.kv_heads for shape in self.shapes.values()),
            seconds if measured else None,
        )

    def __repr__(self) -> str:
        before = self.before
        return f"Ledger({before.heads} heads in {len(self.shapes)} blocks, {before.parameters:,} parameters)"

    def after(self, removed: Iterable[Unit]) -> Totals:
        """What is left; a key-value head goes with the last query head that reads it, and an intercept may come.

        A block's seconds shrink as its parameters do.
        """
        heads, parameters, cache, seconds = 0, 0, 0.0, 0.0
        for block, gone in gone_of(removed).items():
            shape = self.shapes[block]
            kv = len(set(shape.kv_map) - {one for head, one in enumerate(shape.kv_map) if head not in gone})
            stay = self._carriers(shape, gone)
            kv = 0 if stay else kv
            less = shape.per_head * (len(gone) - stay) + shape.per_kv * kv
            heads += len(gone)
            parameters += less - shape.intercept
            cache += shape.cache_per_kv * kv
            seconds += (shape.seconds or 0.0) * less / max(1, shape.parameters)
        before = self.before
        return Totals(
            before.heads - heads,
            before.parameters - parameters,
            before.cache_bytes - cache,
            None if before.seconds is None else before.seconds - seconds,
        )

    def carriers(self, removed: Iterable[Unit]) -> int:
        """How many of the heads that are replaced stay in order to put out running means."""
        return sum(self._carriers(self.shapes[block], gone) for block, gone in gone_of(removed).items())

    def _carriers(self, shape: BlockShape, gone: frozenset[int]) -> int:
        return len({shape.kv_map[head] for head in gone}) if self.running else 0

"""Which units may go next: a minimum per layer, protected heads, whole groups, the same count in every layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from headwise.errors import InputError
from headwise.plans.units import BlockShape, Kind, Unit, gone_of, units_of

__all__ = ["Pool"]


class Pool:
    """The units of a model that may be removed.

    Args:
        shapes: the blocks, in the order of the model.
        unit: what goes together.
        per_layer: query heads that every block keeps at least.
        protected: (block, head) that must stay; with groups the whole group stays.
        uniform: every block loses the same number (of grouped heads: every key-value head loses the same number of its
            query heads), so that a stock checkpoint can say the result.
        blocks: only these blocks lose heads; None: all.

    Example:
        >>> pool = Pool([BlockShape("a", (0, 1)), BlockShape("b", (0, 1))], protected={("a", 1)})
        >>> [str(unit) for unit in pool.allowed([Unit("b", (0,))])]
        ['a:0']
    """

    def __init__(
        self,
        shapes: Iterable[BlockShape],
        *,
        unit: Kind = "head",
        per_layer: int = 1,
        protected: Collection[tuple[str, int]] = (),
        uniform: bool = False,
        blocks: Collection[str] | None = None,
    ) -> None:
        self.shapes: Mapping[str, BlockShape] = {shape.block: shape for shape in shapes}
        if isinstance(per_layer, bool) or not isinstance(per_layer, int) or per_layer < 0:
            raise InputError(f"per_layer must be a whole number of heads, at least 0, and is {per_layer!r}")
        if unit not in ("head", "group"):
            raise InputError(f"unit must be 'head' or 'group', and is {unit!r}")
        for block, head in protected:
            if block not in self.shapes or not 0 <= head < self.shapes[block].query_heads:
                raise InputError(f"head {head} of {block} is protected, and the model has no such head")
        self.unit, self.per_layer, self.uniform = unit, per_layer, uniform
        chosen = [shape for shape in self.shapes.values() if blocks is None or shape.block in blocks]
        self.units: tuple[Unit, ...] = tuple(
            one
            for shape in chosen
            for one in units_of(shape, unit)
            if not any((one.block, head) in protected for head in one.heads)
        )
        self._cells = {one: self._cell(one) for shape in chosen for one in units_of(shape, unit)}

    @property
    def heads(self) -> int:
        """Query heads of the whole model."""
        return sum(shape.query_heads for shape in self.shapes.values())

    @property
    def grain(self) -> int | None:
        """Heads that go in one round of uniform counts; None without them."""
        if not self.uniform:
            return None
        return sum({cell: len(unit.heads) for unit, cell in self._cells.items()}.values())

    def _cell(self, unit: Unit) -> tuple[str, int]:
        """What loses the same number as its likes when counts are uniform."""
        shape = self.shapes[unit.block]
        grouped = self.unit == "head" and shape.kv_heads < shape.query_heads
        return unit.block, shape.kv_map[unit.heads[0]] if grouped else 0

    def _counts(self, removed: Iterable[Unit]) -> dict[tuple[str, int], int]:
        counts = dict.fromkeys(self._cells.values(), 0)
        for unit in removed:
            counts[self._cells[unit]] += 1
        return counts

    def whole(self, removed: Sequence[Unit]) -> bool:
        """Whether choosing may end here: with uniform counts only when every layer has lost as many."""
        return not self.uniform or len(set(self._counts(removed).values())) <= 1

    def allowed(self, removed: Sequence[Unit]) -> list[Unit]:
        """Units that may go after ``removed``, in the order of the model; none when nothing more may."""
        gone, taken = gone_of(removed), set(removed)
        left = [
            unit
            for unit in self.units
            if unit not in taken
            and self.shapes[unit.block].query_heads - len(gone.get(unit.block, ())) - len(unit.heads) >= self.per_layer
        ]
        if not self.uniform:
            return left
        counts = self._counts(removed)
        least = min(counts.values(), default=0)
        behind = {cell for cell, count in counts.items() if count == least}
        able = {self._cells[unit] for unit in left}
        return [unit for unit in left if self._cells[unit] in behind] if behind <= able else []

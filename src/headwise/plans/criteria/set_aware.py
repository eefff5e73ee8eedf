"""The default: closed form from the covariances, given which heads of the layer have gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headwise.plans.layer_cost import LayerCost
from headwise.plans.units import Unit, gone_of

__all__ = ["SetAware"]


class SetAware:
    """What a unit adds to the cost of its layer's removed set; see :class:`~headwise.plans.LayerCost`.

    Args:
        layers: the cost of every set of heads, by block.
        passes: what the statistics cost.
    """

    name = "set-aware"

    def __init__(self, layers: Mapping[str, LayerCost], passes: float = 1.0) -> None:
        self._layers, self.passes = layers, passes

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> Sequence[float]:
        """What each candidate adds."""
        gone = gone_of(removed)
        found = []
        for unit in candidates:
            layer, before = self._layers[unit.block], gone.get(unit.block, frozenset())
            found.append(layer(before.union(unit.heads)) - layer(before))
        return found

    def cost(self, removed: Sequence[Unit]) -> float:
        """The cost of all that has gone, summed over layers."""
        return sum(self._layers[block](heads) for block, heads in gone_of(removed).items())

"""As many heads as a loss allows: searched on one half of the text, confirmed on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headwise.plans.choose import Step
from headwise.plans.pool import Pool
from headwise.plans.units import Unit

__all__ = ["Found", "most_within"]

Rise = Callable[[Sequence[Unit]], float]


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        steps: what goes.
        searched: (units, rise) of every evaluation on the half that was searched.
        confirmed: (units, rise) of every evaluation on the other half.
    """

    steps: tuple[Step, ...]
    searched: tuple[tuple[int, float], ...]
    confirmed: tuple[tuple[int, float], ...]


class _Order:
    """Removals, drawn as far as they are needed."""

    def __init__(self, steps: Iterator[Step], pool: Pool) -> None:
        self._steps, self._pool = steps, pool
        self.taken: list[Step] = []
        #: numbers of units at which choosing may end
        self.ends: list[int] = [0]
        self.over = False

    def reach(self, ends: int) -> None:
        """Draw until there are so many ends, or nothing more may go."""
        while len(self.ends) <= ends and not self.over:
            step = next(self._steps, None)
            if step is None:
                self.over = True
                return
            self.taken.append(step)
            if self._pool.whole(self.units(len(self.taken))):
                self.ends.append(len(self.taken))

    def units(self, count: int) -> list[Unit]:
        return [step.unit for step in self.taken[:count]]


def most_within(limit: float, steps: Iterator[Step], pool: Pool, search: Rise, confirm: Rise) -> Found:
    """The longest beginning of an order of removals whose rise stays within ``limit`` on both halves.

    Doubles the number of units until the rise is too large on the first half, then bisects; bisects again on the other
    half where it does not hold there. A rise that falls as units are added is not looked for.

    Args:
        limit: the largest rise allowed.
        steps: the order, drawn as far as needed.
        pool: says where choosing may end.
        search, confirm: the rise without these units on one half of the text, and on the other.

    Example:
        >>> from headwise.plans.units import BlockShape
        >>> pool = Pool([BlockShape("a", tuple(range(8)))])
        >>> order = (Step(unit, 0.0) for unit in pool.units)
        >>> found = most_within(0.5, order, pool, lambda gone: len(gone) / 10, lambda gone: len(gone) / 9)
        >>> len(found.steps), [count for count, _ in found.searched], [count for count, _ in found.confirmed]
        (4, [1, 2, 4, 8, 6, 5], [5, 2, 3, 4])
    """
    order = _Order(steps, pool)
    searched: dict[int, float] = {}
    confirmed: dict[int, float] = {}

    def within(end: int, rise: Rise, known: dict[int, float]) -> bool:
        count = order.ends[end]
        if count not in known:
            known[count] = rise(order.units(count))
        return known[count] <= limit

    low, high = 0, 1
    while True:
        order.reach(high)
        high = min(high, len(order.ends) - 1)
        if high == low or not within(high, search, searched):
            break
        low, high = high, 2 * high
    low = _bisected(low, high, lambda end: within(end, search, searched))
    if low and not within(low, confirm, confirmed):
        low = _bisected(0, low, lambda end: within(end, confirm, confirmed))
    return Found(tuple(order.taken[: order.ends[low]]), tuple(searched.items()), tuple(confirmed.items()))


def _bisected(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last number that holds, where ``low`` does and ``high`` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

"""Timing two sides in turn, and the median of their paired ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pairs:
    """Paired timings of two sides, in seconds."""

    name: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """ours / theirs, pair by pair."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    def row(self) -> tuple[str, str, str, str]:
        """Name, both medians in milliseconds, the median ratio with its smallest and largest."""
        ratios = self.ratios
        return (
            self.name,
            f"{statistics.median(self.ours) * 1e3:.2f}",
            f"{statistics.median(self.theirs) * 1e3:.2f}",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        )


def paired(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], *, rounds: int = 9, inner: int = 1
) -> Pairs:
    """Warm both up, then time them in turn, swapping who goes first; each timing covers ``inner`` calls."""
    ours()
    theirs()
    a, b = [], []
    for turn in range(rounds):
        sides = ((ours, a), (theirs, b)) if turn % 2 == 0 else ((theirs, b), (ours, a))
        for side, into in sides:
            start = time.perf_counter()
            for _ in range(inner):
                side()
            into.append((time.perf_counter() - start) / inner)
    return Pairs(name, tuple(a), tuple(b))

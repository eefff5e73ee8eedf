"""What the tests of plans hand in for a model: blocks, and an evaluator that is a table of set costs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headwise.plans import BlockShape, LayerCost, Unit, gone_of

Array = npt.NDArray[np.float64]


def shapes(*counts: int, per_head: int = 10, per_kv: int = 4, cache: float = 0.0) -> list[BlockShape]:
    """Blocks ``a``, ``b``, ... with so many heads, each with a key-value head of its own."""
    return [
        BlockShape(chr(ord("a") + at), tuple(range(count)), per_head, per_kv, cache) for at, count in enumerate(counts)
    ]


def grouped(block: str, groups: int, each: int, **numbers: float) -> BlockShape:
    """A block whose key-value heads are read by ``each`` query heads."""
    return BlockShape(block, tuple(at // each for at in range(groups * each)), **numbers)  # type: ignore[arg-type]


class Exact:
    """An evaluator and a taker of gradients: the cost of the removed set of each block, by a function, summed."""

    def __init__(self, cost: Callable[[str, frozenset[int]], float]) -> None:
        self.cost, self.passes = cost, 0.0
        self.asked: list[int] = []

    def rise(self, removed: Sequence[Unit]) -> float:
        self.passes += 1
        return sum(self.cost(block, heads) for block, heads in gone_of(removed).items())

    def rises(self, removed: Sequence[Unit], candidates: Sequence[Unit]) -> list[float]:
        self.asked.append(len(candidates))
        return [self.rise([*removed, unit]) for unit in candidates]

    def lowest(self, removed: Sequence[Unit], candidates: Sequence[Unit], guess: Unit) -> list[float]:
        assert guess in candidates
        return self.rises(removed, candidates)

    def sensitivities(self, removed: Sequence[Unit], units: Sequence[Unit], kind: str) -> list[float]:
        self.passes += 3
        scores = [self.cost(unit.block, frozenset(unit.heads)) for unit in units]
        return [score**2 for score in scores] if kind == "fisher" else scores


def moments(seed: int, heads: int, d_v: int, *, copies: tuple[int, int] | None = None, rows: int = 4001) -> Array:
    """z (rows, heads * d_v) of unlike heads; ``copies`` names two that put out the same."""
    draw = np.random.default_rng(seed)
    z = draw.normal(size=(rows, heads * d_v)) @ draw.normal(size=(heads * d_v, heads * d_v)) * 0.3
    z += draw.normal(size=z.shape)
    if copies is not None:
        one, two = copies
        z[:, two * d_v : (two + 1) * d_v] = z[:, one * d_v : (one + 1) * d_v]
    return z


def layer(z: Array, heads: int, *, width: int = 11, seed: int = 1, **options: object) -> LayerCost:
    """The cost of sets of heads that put out ``z``."""
    W = np.random.default_rng(seed).normal(size=(z.shape[1], width))
    return LayerCost(np.cov(z.T, bias=True), W, heads, mean=z.mean(0), **options)  # type: ignore[arg-type]

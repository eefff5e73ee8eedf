"""Seeds, random tensors and small fits that the experiments share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["generator", "normal", "seeds", "slope"]


def seeds(first: int, count: int) -> list[int]:
    """``count`` seeds that differ from those of any other ``first``.

    Example:
        >>> seeds(0, 3), seeds(2, 2)
        ([0, 1, 2], [2000, 2001])
    """
    return [first * 1000 + number for number in range(count)]


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that nothing depends on what ran before."""
    return torch.Generator().manual_seed(seed)


def normal(random: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    """Normal numbers of mean 0 in float64."""
    return torch.randn(shape, generator=random, dtype=torch.float64) * std


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y against log x: the exponent of a power law.

    Example:
        >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    log_x, log_y = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_x, mean_y = sum(log_x) / len(log_x), sum(log_y) / len(log_y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(log_x, log_y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in log_x)

"""The grid of lengths, widths and masks: the native kernel with all row statistics against torch's attention with none.

    python -m benchmarks --all grid

Long calls have fewer heads. ``HEADWISE_GRID_LENGTHS=64,100`` and ``HEADWISE_GRID_THREADS=2`` take a part of it, so that
it can be measured in pieces. A ratio below 1 means that the kernel was faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from benchmarks.cpu import Shape, statistics_case
from benchmarks.pairs import Pairs
from headwise.kernels import native

LENGTHS = (64, 100, 128, 512, 2048, 4096, 16384)
WIDTHS = (8, 16, 32, 64, 80, 96, 128, 256)
KINDS = ("full", "causal", "padded", "window")


def grid(lengths: tuple[int, ...]) -> Iterator[tuple[Shape, str]]:
    """Every length, width and kind; fewer heads where a call is long."""
    for length in lengths:
        for width in WIDTHS:
            heads = max(1, min(12, int(3e9 / (4 * length * length * width))))
            for kind in KINDS:
                batch = 2 if kind == "padded" and length < 16384 else 1
                yield (batch, heads, heads, length, width), kind


def numbers(name: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """Whole numbers from the environment."""
    given = os.environ.get(name)
    return otherwise if given is None else tuple(int(one) for one in given.split(","))


def cases(full: bool) -> list[Pairs]:
    """The whole grid; nothing without ``full``."""
    if not full or native.why_not() is not None:
        return []
    before, found = torch.get_num_threads(), []
    try:
        for count in numbers("HEADWISE_GRID_THREADS", tuple(dict.fromkeys((1, min(2, before))))):
            torch.set_num_threads(count)
            for shape, kind in grid(numbers("HEADWISE_GRID_LENGTHS", LENGTHS)):
                found.append(statistics_case(shape, kind, 7 if shape[3] <= 2048 else 3))
    finally:
        torch.set_num_threads(before)
    return found

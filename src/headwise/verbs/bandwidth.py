"""How fast this machine reads memory, measured."""

from __future__ import annotations

import time

import torch

from headwise.errors import InputError

__all__ = ["measure_bandwidth"]

#: Far beyond the caches of any CPU that the machine is likely to have.
_BYTES = 512 * 2**20
_ROWS = 4096


def measure_bandwidth(device: str | torch.device = "cpu", *, size: int = _BYTES, seconds: float = 1.0) -> float:
    """The best rate, in bytes per second, at which a matrix is read for a product with one vector.

    That product is what a decode step consists of. It is repeated for about ``seconds``, and the fastest
    run counts, so that other work on the machine disturbs little.

    Args:
        device: where to measure.
        size: bytes of the matrix; well beyond the caches.
        seconds: how long to go on.

    Raises:
        InputError: ``size`` or ``seconds`` is not positive.
    """
    if size < 4 * _ROWS or seconds <= 0:
        raise InputError(f"size must be at least {4 * _ROWS} bytes and seconds positive, got {size} and {seconds}")
    place = torch.device(device)
    matrix = torch.ones(_ROWS, size // (4 * _ROWS), device=place)
    vector = torch.ones(matrix.shape[1], device=place)
    best = 0.0
    end = time.perf_counter() + seconds
    with torch.no_grad():
        while True:
            _wait(place)
            start = time.perf_counter()
            torch.mv(matrix, vector)
            _wait(place)
            taken = time.perf_counter() - start
            best = max(best, matrix.numel() * matrix.element_size() / taken)
            if time.perf_counter() > end:
                return best


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)

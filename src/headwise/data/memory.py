"""Data from memory that may, or may not, be gone through twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headwise.errors import InputError

__all__ = ["restartable"]


def restartable(source: Iterable[Any], name: str) -> Callable[[], Iterator[Any]]:
    """A function that goes through ``source`` from its start; of a generator it can do so once.

    >>> start = restartable([1, 2], "texts")
    >>> list(start()), list(start())
    ([1, 2], [1, 2])
    """
    first = iter(source)
    if first is not source:
        return lambda: iter(source)
    used = False

    def start() -> Iterator[Any]:
        nonlocal used
        if used:
            raise InputError(f"{name} came from a generator, which can be read only once; give a list to read it again")
        used = True
        return first

    return start

"""What this process has put in its place on the disk, so that an interrupted run can say what is there all the same."""

from __future__ import annotations

__all__ = ["forget", "note", "so_far"]

_PLACED: list[str] = []


def note(path: object) -> None:
    """``path`` is complete and where it was asked for."""
    if str(path) not in _PLACED:
        _PLACED.append(str(path))


def so_far() -> tuple[str, ...]:
    """Everything noted since :func:`forget`, in order."""
    return tuple(_PLACED)


def forget() -> None:
    """A new run begins."""
    _PLACED.clear()

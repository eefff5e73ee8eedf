"""Two tables of heads that should say the same: where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from headwise.heads import HeadTable, RowClass
from headwise.layout import HeadId

__all__ = ["CLOSE", "differences"]

_CLASSES: Final[tuple[RowClass, ...]] = ("token", "special")

#: Relative to the measure's largest value over heads.
CLOSE: Final = 2e-5


def differences(
    left: HeadTable,
    right: HeadTable,
    *,
    close: float = CLOSE,
    counts: bool = True,
    other: Callable[[HeadId], HeadId | None] = lambda head: head,
) -> list[str]:
    """Every number of ``left`` that ``right`` does not have.

    Args:
        left, right: the tables.
        close: how far means and spreads may lie apart, relative to the measure's largest value over heads.
        counts: whether numbers of rows must agree.
        other: which head of ``right`` belongs to a head of ``left``; None to leave it out.
    """
    pairs = [(head, there) for head in left.heads if (there := other(head)) is not None]
    at = [left.heads.index(head) for head, _ in pairs]
    beside = [right.heads.index(there) for _, there in pairs]
    wrong = []
    for name in left.measures:
        for rows in _CLASSES:
            ours, theirs = left.moments(name, rows), right.moments(name, rows)
            scale = float(np.nanmax(np.abs(ours.mean), initial=0.0)) if ours.count.any() else 0.0
            for (head, _), a, b in zip(pairs, at, beside, strict=True):
                if counts and ours.count[a] != theirs.count[b]:
                    wrong.append(f"{name} of {head}: {ours.count[a]} rows and {theirs.count[b]}")
                    continue
                for what, x, y in (("mean", ours.mean[a], theirs.mean[b]), ("std", ours.std[a], theirs.std[b])):
                    if not _near(x, y, close, max(scale, float(np.nan_to_num(ours.std[a])))):
                        wrong.append(f"{name} of {head}: {what} {x:.7g} and {y:.7g}")
    return wrong


def _near(x: float, y: float, close: float, scale: float) -> bool:
    if np.isnan(x) or np.isnan(y):
        return bool(np.isnan(x) and np.isnan(y))
    if not (np.isfinite(x) and np.isfinite(y)):
        return x == y
    return abs(x - y) <= close * scale + 1e-12

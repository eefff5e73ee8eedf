"""What a measure is: its name, unit, range, direction and source."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, Literal

from headwise.errors import InputError

RowClass = Literal["token", "special"]
"""Rows of real tokens, and rows of special tokens such as [CLS]; padding rows are in neither."""

ROW_CLASSES: Final[tuple[RowClass, ...]] = ("token", "special")

KEY_COLUMNS: Final[tuple[str, ...]] = (
    "stack",
    "kind",
    "layer",
    "module",
    "call",
    "head",
    "kv_head",
    "d_k",
    "d_v",
)

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True)
class MeasureInfo:
    """One number per query row and head (or, where ``pooled``, one per head from all rows together), described.

    Attributes:
        name: lower-case letters, digits and underscores, e.g. ``"entropy"``.
        unit: ``"nats"``, ``"tokens"``, ...; ``"1"`` for a pure number.
        low, high: the range of a single row's value; None where there is no bound.
        better: ``"high"`` or ``"low"`` where one direction is better, None where neither is.
        description: one sentence for people.
        source: where the definition comes from (paper, section, equation), or ``""``.
        pooled: the number depends on all rows together and is not a mean of what each row gives by itself (a rank, an
            explained variance, an ablation by the data's mean), so that the numbers of two parts of the data cannot be
            merged into that of the whole.

    Raises:
        InputError: the name cannot be a column, or the range is empty.

    >>> MeasureInfo("entropy", "nats", 0, None, None, "Shannon entropy of the row").low
    0.0
    """

    name: str
    unit: str
    low: float | None = None
    high: float | None = None
    better: Literal["high", "low"] | None = None
    description: str = ""
    source: str = ""
    pooled: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.match(self.name):
            raise InputError(
                f"measure name {self.name!r}: use lower-case letters, digits and underscores, beginning with a letter"
            )
        if self.name in KEY_COLUMNS or self.name.endswith(("_std", "_rows")):
            raise InputError(
                f"measure name {self.name!r} collides with a column of the table; choose a name that is none of "
                f"{', '.join(KEY_COLUMNS)} and does not end in _std or _rows"
            )
        if self.better not in ("high", "low", None):
            raise InputError(f"measure {self.name}: better must be 'high', 'low' or None, not {self.better!r}")
        for side in ("low", "high"):
            object.__setattr__(self, side, _bound(self.name, side, getattr(self, side)))
        if self.low is not None and self.high is not None and self.low > self.high:
            raise InputError(f"measure {self.name}: low {self.low} is above high {self.high}")


def _bound(name: str, side: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InputError(f"measure {name}: {side} must be a number or None, not {value!r}")
    return None if math.isinf(value) else float(value)


def check_rows(rows: str) -> RowClass:
    """``rows`` as a row class, or an :class:`~headwise.errors.InputError`."""
    if rows not in ROW_CLASSES:
        raise InputError(f"rows must be 'token' or 'special', not {rows!r}")
    return rows

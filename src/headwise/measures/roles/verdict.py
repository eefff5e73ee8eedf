"""When a head is assigned a role."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import InputError

__all__ = ["Criterion"]


@dataclass(frozen=True)
class Criterion:
    """A head has a role where, on the rows that the role is about,

    * its largest weight is on the role's key at a share of rows that exceeds both the best fixed rule of position and
      the shuffled pairs by ``margin``, and the lower end of the share's interval exceeds both;
    * the mean weight on that key exceeds that on the shuffled pairs by ``score_margin``, and the lower end of its
      interval exceeds it;
    * there are at least ``rows`` rows in ``passages`` passages.

    The second condition keeps out heads that spread their weight evenly, whose largest weight is where a tie falls.

    Attributes:
        margin: least excess of the share, from 0 to 1.
        score_margin: least excess of the mean weight.
        level: of the interval.
        rows, passages: least numbers of each.

    Raises:
        InputError: a number out of its range.
    """

    margin: float = 0.1
    score_margin: float = 0.05
    level: float = 0.95
    rows: int = 20
    passages: int = 5

    def __post_init__(self) -> None:
        for name in ("margin", "score_margin"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InputError(f"{name} must be from 0 to 1, and is {value!r}")
        if not isinstance(self.level, float) or not 0 < self.level < 1:
            raise InputError(f"level must be between 0 and 1, and is {self.level!r}")
        for name in ("rows", "passages"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"{name} must be a whole number of at least 1, and is {count!r}")

    def __str__(self) -> str:
        return (
            f"share at least {self.margin:g} and weight at least {self.score_margin:g} above the nulls, "
            f"{self.level:.0%} interval above them, at least {self.rows} rows in {self.passages} passages"
        )

"""One head of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from headwise.errors import InputError
from headwise.heads._measure import RowClass, check_rows
from headwise.layout import HeadId, SiteKey

if TYPE_CHECKING:
    from headwise.heads._moments import Moments


class Stat(NamedTuple):
    """Mean and population standard deviation over rows, and the number of rows; NaN, NaN, 0 when missing."""

    mean: float
    std: float
    rows: int


@dataclass(frozen=True, repr=False)
class HeadRow:
    """One head and its numbers.

    Attributes:
        id: its site and index.
        layer: the label of its layer within (stack, kind), for people.
        kv_head: the key-value head that it reads.
        d_k, d_v: the widths of its keys and values.

    ``row["entropy"]`` is the mean over rows of real tokens, NaN when missing; :meth:`stat` gives
    standard deviation and number of rows as well.
    """

    id: HeadId
    layer: int
    kv_head: int
    d_k: int
    d_v: int
    _position: int
    _values: Mapping[tuple[str, RowClass], Moments]

    @property
    def site(self) -> SiteKey:
        """The attention computation that the head belongs to."""
        return self.id.site

    @property
    def head(self) -> int:
        """The head's index within its site, from 0."""
        return self.id.head

    @property
    def stack(self) -> str:
        """``"encoder"``, ``"decoder"``, ``"vision"`` or ``"audio"``."""
        return self.id.site.stack

    @property
    def kind(self) -> str:
        """``"self"`` or ``"cross"``."""
        return self.id.site.kind

    @property
    def module(self) -> str:
        """Dotted path of the attention module."""
        return self.id.site.module

    def stat(self, measure: str, rows: RowClass = "token") -> Stat:
        """Mean, standard deviation and number of rows of one measure."""
        key = (measure, check_rows(rows))
        if key not in self._values:
            known = ", ".join(sorted({name for name, _ in self._values}))
            raise InputError(f"there is no measure {measure!r} in this table; it has {known}")
        moments = self._values[key]
        at = self._position
        return Stat(float(moments.mean[at]), float(moments.std[at]), int(moments.count[at]))

    def __getitem__(self, measure: str) -> float:
        return self.stat(measure).mean

    def __repr__(self) -> str:
        names = dict.fromkeys(name for name, _ in self._values)
        return f"HeadRow({self.id}, {', '.join(f'{name}={self[name]:.4g}' for name in names)})"

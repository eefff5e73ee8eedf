"""The table: one row per head, one column per measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from headwise.errors import InputError
from headwise.heads import _check, _document, _show
from headwise.heads._compare import Comparison, compare
from headwise.heads._measure import ROW_CLASSES, MeasureInfo, RowClass, check_rows
from headwise.heads._merge import merge
from headwise.heads._moments import Counts, Floats, Moments
from headwise.heads._row import HeadRow
from headwise.heads._select import positions
from headwise.layout import HeadId, HeadLayout, Site, SiteKey

if TYPE_CHECKING:
    import pandas as pd

Values = Mapping[tuple[str, RowClass], Moments]
Absent = Mapping[str, Mapping[SiteKey, str]]


class HeadTable:
    """Numbers per head: for each measure and class of rows the count, mean and spread over rows.

    Args:
        layout: where the heads sit.
        measures: what each measure is, in the order of the columns.
        values: for (measure, ``"token"``), and where there are such rows (measure, ``"special"``),
            the moments over all heads in the order of ``layout.heads()`` (or of ``heads``).
        absent: for a measure that does not apply at some sites, the reason at each; its counts there are 0.
        heads: the heads that the values are for; all of the layout by default.
        model, weight_hash: which model, for people and for :meth:`merge` and :meth:`compare`.
        parts: names of the pieces of data that were measured, so that no piece is merged twice.

    Iterating gives a :class:`HeadRow` per head; ``table["entropy"]`` gives the means over token rows as an
    array (heads,), NaN where missing; ``table[HeadId(...)]`` gives the row of that head. A table does not
    change: sorting and selecting give new ones.

    Raises:
        InputError: the parts do not fit together; the message says which.

    >>> from headwise.layout import Block, HeadLayout, Site, SiteKey
    >>> site = Site(SiteKey("encoder", "self", "layer.0"), "layer.0", 0, causal=False)
    >>> layout = HeadLayout((site,), {"layer.0": Block("layer.0", 2, 2, 8, 8, (0, 1))})
    >>> info = MeasureInfo("entropy", "nats", 0, None, None, "Shannon entropy of the row")
    >>> table = HeadTable.build(layout, {"entropy": info}, {("entropy", "token"): Moments.of([[0.5, 1.0], [1.5, 2.0]])})
    >>> table["entropy"].tolist()
    [1.0, 1.5]
    >>> [str(row.id) for row in table.sort("entropy", descending=True)]
    ['layer.0:1', 'layer.0:0']
    """

    __slots__ = ("_absent", "_at", "_heads", "_layout", "_measures", "_values", "model", "parts", "weight_hash")

    def __init__(
        self,
        layout: HeadLayout,
        measures: Mapping[str, MeasureInfo],
        values: Values,
        *,
        absent: Absent | None = None,
        heads: Iterable[HeadId] | None = None,
        model: str | None = None,
        weight_hash: str | None = None,
        parts: Iterable[str] = (),
    ) -> None:
        self._layout = _check.layout(layout)
        self._heads = _check.heads(layout, heads)
        self._measures = _check.measures(measures)
        self._absent = _check.absent(layout, self._measures, absent or {})
        self._values = _check.values(self._measures, self._absent, self._heads, values)
        self._at = {head: at for at, head in enumerate(self._heads)}
        self.model = model
        self.weight_hash = weight_hash
        self.parts = tuple(sorted(set(parts)))

    @classmethod
    def build(
        cls,
        layout: HeadLayout,
        measures: Mapping[str, MeasureInfo],
        values: Values,
        *,
        absent: Absent | None = None,
        model: str | None = None,
        weight_hash: str | None = None,
        parts: Iterable[str] = (),
    ) -> HeadTable:
        """A table over every head of ``layout``; see the class for the arguments."""
        return cls(layout, measures, values, absent=absent, model=model, weight_hash=weight_hash, parts=parts)

    # What is in it.

    @property
    def layout(self) -> HeadLayout:
        """Where the heads sit."""
        return self._layout

    @property
    def heads(self) -> tuple[HeadId, ...]:
        """The heads, in the order of the rows."""
        return self._heads

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that have a head in the table, in the order of a forward pass."""
        present = {head.site for head in self._heads}
        return tuple(site for site in self._layout.sites if site.key in present)

    @property
    def measures(self) -> Mapping[str, MeasureInfo]:
        """What each measure is, in the order of the columns."""
        return MappingProxyType(self._measures)

    @property
    def absent(self) -> Absent:
        """For each measure that does not apply everywhere: at which site, and why."""
        return MappingProxyType(self._absent)

    @property
    def groups(self) -> tuple[tuple[str, str], ...]:
        """The (stack, kind) pairs of the table, in the order of a forward pass."""
        return tuple(dict.fromkeys((site.key.stack, site.key.kind) for site in self.sites))

    def moments(self, measure: str, rows: RowClass = "token") -> Moments:
        """Counts, means and squared deviations of one measure over the heads of the table."""
        if measure not in self._measures:
            raise InputError(f"there is no measure {measure!r} in this table; it has {', '.join(self._measures)}")
        return self._values[measure, check_rows(rows)]

    def mean(self, measure: str, rows: RowClass = "token") -> Floats:
        """Means over rows, (heads,), NaN where missing."""
        return self.moments(measure, rows).mean

    def std(self, measure: str, rows: RowClass = "token") -> Floats:
        """Population standard deviations over rows, (heads,), NaN where missing."""
        return self.moments(measure, rows).std

    def count(self, measure: str, rows: RowClass = "token") -> Counts:
        """Numbers of rows, (heads,)."""
        return self.moments(measure, rows).count

    def reason(self, measure: str, site: SiteKey) -> str | None:
        """Why ``measure`` does not apply at ``site``; None where it does."""
        return self._absent.get(measure, {}).get(site)

    @overload
    def __getitem__(self, key: str) -> Floats: ...
    @overload
    def __getitem__(self, key: HeadId) -> HeadRow: ...
    def __getitem__(self, key: str | HeadId) -> Floats | HeadRow:
        if isinstance(key, str):
            return self.mean(key)
        if not isinstance(key, HeadId):
            raise InputError(f"index a table by the name of a measure or by a HeadId, not by {type(key).__name__}")
        if key not in self._at:
            raise InputError(f"there is no head {key} ({key.site.stack}, {key.site.kind}) in this table")
        return self._row(self._at[key])

    def __iter__(self) -> Iterator[HeadRow]:
        return (self._row(at) for at in range(len(self)))

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, key: object) -> bool:
        return key in self._measures if isinstance(key, str) else key in self._at

    def matrix(
        self, measure: str, stack: str | None = None, kind: str | None = None, *, rows: RowClass = "token"
    ) -> Floats:
        """Means as (layer, head), NaN where a layer has no such head or it is missing.

        One row per site of (stack, kind) in the order of a forward pass; as many columns as the widest
        layer has heads. ``stack`` and ``kind`` may be left out where the table has only one of them.
        """
        stack, kind = _check.group(self.groups, stack, kind)
        sites = [site for site in self._layout.sites if (site.key.stack, site.key.kind) == (stack, kind)]
        means = self.mean(measure, rows)
        width = max(self._layout.blocks[site.block].query_heads for site in sites)
        out = np.full((len(sites), width), np.nan)
        line = {site.key: at for at, site in enumerate(sites)}
        for at, head in enumerate(self._heads):
            if head.site in line:
                out[line[head.site], head.head] = means[at]
        return out

    # Other tables made of it.

    def sort(self, measure: str, descending: bool = False, *, rows: RowClass = "token") -> HeadTable:
        """The same heads ordered by a measure; ties keep their order, missing values come last."""
        means = self.mean(measure, rows)
        missing = np.isnan(means)
        order = np.lexsort((np.where(missing, 0.0, -means if descending else means), missing))
        return self._take(order)

    def top(self, measure: str, n: int, *, descending: bool = True, rows: RowClass = "token") -> HeadTable:
        """The ``n`` heads with the largest (``descending=False``: smallest) values, best first; missing ones never."""
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
            raise InputError(f"n must be a whole number of heads, at least 0, not {n!r}")
        ordered = self.sort(measure, descending, rows=rows)
        there = int(np.count_nonzero(~np.isnan(ordered.mean(measure, rows))))
        return ordered._take(np.arange(min(int(n), there)))

    def select(
        self,
        *,
        stack: str | Iterable[str] | None = None,
        kind: str | Iterable[str] | None = None,
        layer: int | Iterable[int] | None = None,
        module: str | Iterable[str] | None = None,
        heads: int | HeadId | Iterable[int | HeadId] | None = None,
        where: Callable[[HeadRow], bool] | None = None,
    ) -> HeadTable:
        """The heads that satisfy every condition given, in the order they had.

        Each may be one value or several. ``module`` is a module's path, or the beginning of one up to a dot;
        ``heads`` are indices within a site, or :class:`~headwise.layout.HeadId`; ``where`` is called with each
        :class:`HeadRow`. A name that no head of the table has is refused; ``where`` may leave nothing.
        """
        keep = positions(self, stack=stack, kind=kind, layer=layer, module=module, heads=heads)
        if where is not None:
            keep = [at for at in keep if where(self._row(at))]
        return self._take(np.array(keep, np.int64))

    def merge(self, other: HeadTable, *, overlap: bool = False) -> HeadTable:
        """The table of both runs' rows together: exactly what one run over all the data would have given.

        Raises:
            InputError: the tables are of different weights, layouts, heads or measure definitions, or share
                a part of the data (``overlap=True`` allows that).
        """
        return merge(self, other, overlap=overlap)

    def compare(
        self, other: HeadTable, *, different_models: bool = False, different_measures: bool = False
    ) -> Comparison:
        """This table beside another, head by head; differences are ``other - self``.

        Raises:
            InputError: the tables are of different weights or layouts, unless ``different_models``; or of
                different measures, unless ``different_measures``. Then the heads and measures that both have
                are compared, and the rest is listed.
        """
        return compare(self, other, different_models=different_models, different_measures=different_measures)

    # Other forms of it.

    def to_pandas(self, rows: RowClass = "token") -> pd.DataFrame:
        """One line per head: its place, then for each measure mean, ``<measure>_std`` and ``<measure>_rows``."""
        return _show.frame(self, check_rows(rows))

    def to_document(self) -> dict[str, Any]:
        """The table as plain lists and dictionaries, as ``heads.json`` holds them (docs/format.md)."""
        return _document.to_document(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> HeadTable:
        """The table that :meth:`to_document` described.

        Raises:
            RunError: the parts contradict each other.
        """
        return _document.from_document(cls, document)

    def save(self, path: str | Path) -> Path:
        """Write the table as JSON (docs/format.md); a file that is there is replaced in one step.

        Raises:
            RunError: the file cannot be written; what was there is untouched.
        """
        return _document.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> HeadTable:
        """Read a table from a file, or from the run folder that holds its ``heads.json``.

        Raises:
            RunError: the file is missing, damaged, of another format or of a newer version.
        """
        return _document.load(cls, path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadTable):
            return NotImplemented
        return all(
            getattr(self, part) == getattr(other, part)
            for part in ("_heads", "_layout", "_measures", "_absent", "_values", "model", "weight_hash", "parts")
        ) and list(self._measures) == list(other._measures)

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def __repr__(self) -> str:
        return _show.text(self)

    def _repr_html_(self) -> str:
        return _show.html(self)

    def __rich__(self) -> Any:
        return _show.rich_table(self)

    def _row(self, at: int) -> HeadRow:
        head = self._heads[at]
        site = self._layout.site(head.site)
        block = self._layout.blocks[site.block]
        return HeadRow(head, site.layer, block.kv_map[head.head], block.d_k, block.d_v, at, self._values)

    def _take(self, order: npt.NDArray[np.int64]) -> HeadTable:
        return HeadTable(
            self._layout,
            self._measures,
            {key: moments.take(order) for key, moments in self._values.items()},
            absent=self._absent,
            heads=[self._heads[at] for at in order],
            model=self.model,
            weight_hash=self.weight_hash,
            parts=self.parts,
        )


__all__ = ["ROW_CLASSES", "HeadTable"]

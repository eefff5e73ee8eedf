"""A table as text, as HTML, in a terminal, and as a data frame."""

from __future__ import annotations

import html as markup
import math
from typing import TYPE_CHECKING, Any

from headwise.heads._measure import ROW_CLASSES, RowClass
from headwise.layout import HeadId

if TYPE_CHECKING:
    import pandas as pd

    from headwise.heads._table import HeadTable

_LINES = 10
_COLUMNS = 4


def number(value: float) -> str:
    """Four significant digits; a dash where the value is missing."""
    return "-" if math.isnan(value) else f"{value:.4g}"


def key_columns(table: HeadTable) -> dict[str, list[Any]]:
    """Where each head sits, a list per column."""
    places = {site.key: (site.layer, table.layout.blocks[site.block]) for site in table.layout.sites}
    ids = table.heads
    return {
        "stack": [head.site.stack for head in ids],
        "kind": [head.site.kind for head in ids],
        "layer": [places[head.site][0] for head in ids],
        "module": [head.site.module for head in ids],
        "call": [head.site.call for head in ids],
        "head": [head.head for head in ids],
        "kv_head": [places[head.site][1].kv_map[head.head] for head in ids],
        "d_k": [places[head.site][1].d_k for head in ids],
        "d_v": [places[head.site][1].d_v for head in ids],
    }


def frame(table: HeadTable, rows: RowClass) -> pd.DataFrame:
    """See :meth:`HeadTable.to_pandas`."""
    import pandas as pd

    columns: dict[str, Any] = dict(key_columns(table))
    for name in table.measures:
        columns[name] = table.mean(name, rows)
        columns[f"{name}_std"] = table.std(name, rows)
        columns[f"{name}_rows"] = table.count(name, rows)
    return pd.DataFrame(columns)


def summary(table: HeadTable) -> str:
    """One line: how many heads, where, how many measures and rows."""
    groups = ", ".join(
        f"{stack} {kind}: {sum((head.site.stack, head.site.kind) == (stack, kind) for head in table.heads)}"
        for stack, kind in table.groups
    )
    counts = {rows: max((_most(table, name, rows) for name in table.measures), default=0) for rows in ROW_CLASSES}
    named = f" of {table.model}" if table.model else ""
    return (
        f"HeadTable{named}: {len(table)} heads at {len(table.sites)} sites ({groups or 'none'}), "
        f"{len(table.measures)} measures, {counts['token']:,} token rows, {counts['special']:,} special rows"
    )


def _most(table: HeadTable, measure: str, rows: RowClass) -> int:
    counts = table.count(measure, rows)
    return int(counts.max()) if len(counts) else 0


def _cells(table: HeadTable, lines: int, columns: int) -> tuple[list[str], list[list[str]]]:
    names = list(table.measures)[:columns]
    layers = {site.key: site.layer for site in table.layout.sites}
    header = ["stack", "kind", "layer", "head", *(f"{name} [{table.measures[name].unit}]" for name in names)]
    body = []
    for at, head in enumerate(table.heads[:lines]):
        values = [number(float(table.mean(name)[at])) for name in names]
        body.append([head.site.stack, head.site.kind, str(layers[head.site]), _index(head), *values])
    return header, body


def _index(head: HeadId) -> str:
    return str(head.head)


def _rest(table: HeadTable, lines: int, columns: int) -> str:
    said = []
    if len(table) > lines:
        said.append(f"{len(table) - lines} more heads")
    if len(table.measures) > columns:
        said.append(f"{len(table.measures) - columns} more measures")
    return "... and " + ", ".join(said) if said else ""


def text(table: HeadTable) -> str:
    """The first lines and columns, aligned."""
    header, body = _cells(table, _LINES, _COLUMNS)
    widths = [max(len(row[at]) for row in [header, *body]) for at in range(len(header))]
    lines = [summary(table)]
    for row in [header, *body]:
        cells = [
            cell.ljust(w) if at < 2 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(line for line in [*lines, _rest(table, _LINES, _COLUMNS)] if line)


def html(table: HeadTable, lines: int = 20, columns: int = 8) -> str:
    """A plain HTML table for notebooks; everything in it is escaped."""
    header, body = _cells(table, lines, columns)
    head = "".join(f'<th scope="col">{markup.escape(cell)}</th>' for cell in header)
    rows = "".join(f"<tr>{''.join(f'<td>{markup.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return (
        f"<div><p>{markup.escape(summary(table))}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p>{markup.escape(_rest(table, lines, columns))}</p></div>"
    )


def rich_table(table: HeadTable, lines: int = 20, columns: int = 6) -> Any:
    """The table for a terminal, through rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    header, body = _cells(table, lines, columns)
    out = Table(
        title=Text(summary(table)),
        caption=Text(_rest(table, lines, columns)),
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for at, cell in enumerate(header):
        out.add_column(Text(cell), justify="left" if at < 2 else "right", no_wrap=at >= 2)
    for row in body:
        out.add_row(*(Text(cell) for cell in row))
    return out

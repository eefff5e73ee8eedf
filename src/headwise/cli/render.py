"""What ``headwise scan`` prints for people: heat maps, and the heads at both ends.

rich is imported here and only here (and for the progress bar), so that help stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwise.cli.heatmap import HeatMap, draw, legend

if TYPE_CHECKING:
    from headwise.heads import HeadTable
    from headwise.verbs import ScanResult

__all__ = ["heat_maps", "scan_page"]

#: What the heat map shows and the two tables are sorted by.
SHOWN = "normalized_entropy"
LISTED = 10

#: Columns of the two tables: header, measure, digits after the point.
COLUMNS = (
    ("entropy", "entropy", 3),
    ("of max", SHOWN, 3),
    ("largest", "max_weight", 3),
    ("previous", "previous_weight", 3),
    ("first", "first_weight", 3),
    ("distance", "distance", 1),
)
EXPLAINED = (
    "entropy in nats; of max: entropy / log(visible keys); largest, previous, first: weight; distance in tokens. "
    "Means over the rows of real tokens."
)


def scan_page(result: ScanResult, console: Console) -> RenderableType:
    """Everything that a scan says on stdout."""
    return Group(*_parts(result, console.width))


def _parts(result: ScanResult, width: int) -> Iterator[RenderableType]:
    table = result.table
    yield Text(_name(result), style="bold", no_wrap=True, overflow="ignore")
    yield Text(_headline(result))
    yield Text("")
    yield Text("Entropy of attention, as a share of the largest possible", style="bold")
    for heat_map in heat_maps(table):
        yield Text("")
        yield draw(heat_map, width)
    yield Text("")
    yield legend()
    peaked = table.top(SHOWN, LISTED, descending=False)
    uniform = table.top(SHOWN, LISTED)
    for title, heads in (("Most peaked heads", peaked), ("Most uniform heads", uniform)):
        yield Text("")
        yield Text(title, style="bold")
        yield listing(heads, several=len(table.groups) > 1)
    yield Text(EXPLAINED, style="dim")
    if result.folder is not None:
        yield Text("")
        # A path is never broken, so that it can be copied.
        yield Text(f"report: {result.folder / 'report.html'}", no_wrap=True, overflow="ignore")


def heat_maps(table: HeadTable) -> list[HeatMap]:
    """One heat map of the normalised entropy per stack and kind, in the order of the forward pass."""
    maps = []
    for stack, kind in table.groups:
        sites = [site for site in table.layout.sites if (site.key.stack, site.key.kind) == (stack, kind)]
        values = table.matrix(SHOWN, stack, kind).tolist()
        maps.append(HeatMap(f"{stack}, {kind}-attention", [site.layer for site in sites], values))
    return maps


def listing(table: HeadTable, *, several: bool) -> Table:
    """One line per head; ``several`` adds which stack and kind it is of."""
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    if several:
        grid.add_column("stack")
        grid.add_column("kind")
    grid.add_column("layer", justify="right")
    grid.add_column("head", justify="right")
    shown = [column for column in COLUMNS if column[1] in table.measures]
    for header, _, _ in shown:
        grid.add_column(header, justify="right", no_wrap=True)
    for row in table:
        place = [row.stack, row.kind] if several else []
        cells = [_number(row[measure], digits) for _, measure, digits in shown]
        grid.add_row(*place, str(row.layer), str(row.head), *cells)
    return grid


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _name(result: ScanResult) -> str:
    return str((result.run.get("model") or {}).get("name") or result.table.model or "model")


def _headline(result: ScanResult) -> str:
    """How many heads, how much text, how long."""
    run, table = result.run, result.table
    parts = [f"{len(table)} heads in {len(table.sites)} attention layers"]
    data = run.get("data") or {}
    counts = {key: data[key] for key in ("passages", "tokens") if isinstance(data.get(key), int)}
    said = [f"{value:,} {key if value != 1 else key.removesuffix('s')}" for key, value in counts.items()]
    if said:
        parts.append(" over " + ", ".join(said))
    seconds = run.get("seconds")
    if isinstance(seconds, int | float):
        parts.append(f", {seconds:.1f} s")
    return "".join(parts)

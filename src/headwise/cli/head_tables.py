"""What ``headwise importance`` and ``headwise redundancy``, and a scan of chosen measures, print for people."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwise.cli.heatmap import HeatMap, draw
from headwise.cli.surgery_page import counted

if TYPE_CHECKING:
    from headwise.heads import HeadTable
    from headwise.layout import HeadId
    from headwise.measures.similarity import Redundancy
    from headwise.measures.similarity.result import By
    from headwise.verbs import ScanResult

__all__ = ["importance_page", "measures_page", "redundancy_page"]

LISTED = 10
#: measures of a list: as many as fit in 80 columns
COLUMNS = 4


def importance_page(result: ScanResult, console: Console) -> RenderableType:
    """A heat map of the first measure, and the heads at both ends of it."""
    return Group(*_by_first(result, console.width, "Most important heads", "Least important heads"))


def measures_page(result: ScanResult, console: Console) -> RenderableType:
    """The same for measures that somebody chose."""
    first = next(iter(result.table.measures))
    return Group(*_by_first(result, console.width, f"Largest {first}", f"Smallest {first}"))


def _by_first(result: ScanResult, width: int, most: str, least: str) -> Iterator[RenderableType]:
    table = result.table
    first = next(iter(table.measures))
    data, name = result.run["data"], result.run["model"]["name"]
    yield Text(str(name), style="bold", no_wrap=True, overflow="ignore")
    yield Text(f"{len(table)} heads, {data['passages']:,} passages; {table.measures[first].description}")
    yield Text("")
    yield Text(f"{first}, as a share of the largest of its kind", style="bold")
    for heat_map in _maps(table, first):
        yield Text("")
        yield draw(heat_map, width)
    yield Text("")
    yield Text("0 = under a tenth of the largest, 9 = nine tenths and more, . = no value", style="dim")
    for title, heads in (
        (most, table.top(first, LISTED)),
        (least, table.top(first, LISTED, descending=False)),
    ):
        yield Text("")
        yield Text(title, style="bold")
        yield _listing(heads)
    if result.folder is not None:
        yield Text("")
        yield Text(f"report: {result.folder / 'report.html'}", no_wrap=True, overflow="ignore")


def _maps(table: HeadTable, measure: str) -> list[HeatMap]:
    maps = []
    for stack, kind in table.groups:
        sites = [site for site in table.layout.sites if (site.key.stack, site.key.kind) == (stack, kind)]
        values = table.matrix(measure, stack, kind)
        largest = max((abs(value) for row in values.tolist() for value in row if math.isfinite(value)), default=0.0)
        shares = (values / largest if largest > 0 else values).tolist()
        maps.append(HeatMap(f"{stack}, {kind}-attention", [site.layer for site in sites], shares))
    return maps


def _listing(table: HeadTable) -> Table:
    several = len(table.layout.sites) > 0 and len({(site.key.stack, site.key.kind) for site in table.layout.sites}) > 1
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    shown = list(table.measures)[:COLUMNS]
    for name in (*(("stack", "kind") if several else ()), "layer", "head", *shown):
        grid.add_column(name, justify="left" if name in ("stack", "kind") else "right", no_wrap=True)
    for row in table:
        place = [row.stack, row.kind] if several else []
        grid.add_row(*place, str(row.layer), str(row.head), *(_number(row[name]) for name in shown))
    return grid


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"


def redundancy_page(found: Redundancy, at: float) -> RenderableType:
    """The nearest pairs and the clusters, by outputs and by patterns."""
    return Group(*_redundancy(found, at))


def _redundancy(found: Redundancy, at: float) -> Iterator[RenderableType]:
    layers = dict(zip(found.heads, found.layers, strict=True))
    several = len({(head.site.stack, head.site.kind) for head in found.heads}) > 1

    def name(head: HeadId) -> str:
        place = f"{head.site.stack} {head.site.kind} " if several else ""
        return f"{place}{layers[head]}.{head.head}"

    yield Text(str(found.model), style="bold", no_wrap=True, overflow="ignore")
    exact = (
        "all directions" if found.outputs["exact"] else f"{found.outputs['directions']} random directions of each head"
    )
    yield Text(
        f"{len(found.heads)} heads; outputs over {found.outputs['rows']:,} rows ({exact} across layers), patterns on "
        f"{found.patterns['rows']:,} rows. Heads are written layer.head."
    )
    kinds: tuple[tuple[By, str], ...] = (
        ("outputs", "Outputs: 1 - CKA"),
        ("patterns", "Patterns: Jensen-Shannon distance"),
    )
    for by, title in kinds:
        yield Text("")
        yield Text(title, style="bold")
        grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        grid.add_column("head", no_wrap=True)
        grid.add_column("head", no_wrap=True)
        grid.add_column("distance", justify="right")
        for pair in found.nearest(LISTED, by):
            grid.add_row(name(pair.left), name(pair.right), f"{pair.distance:.3f}")
        yield grid
        groups = found.clusters(at, by)
        yield Text(f"{counted(len(groups), 'cluster')} of heads nearer than {at:g} (average linkage)")
        for group in groups[:LISTED]:
            yield Text("  " + ", ".join(name(head) for head in group))

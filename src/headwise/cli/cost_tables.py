"""What ``headwise cost`` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headwise.costs import BlockParameters, Ledger, Sweep
    from headwise.costs.ledger import SiteCost
    from headwise.costs.sweep import Column

#: Rows about single layers before the reader is sent to the table of layers.
LISTED = 20

__all__ = ["count", "layer_page", "ledger_page", "readable", "size", "sweep_page"]


def count(value: float) -> str:
    """A count with a decimal prefix, three digits.

    Example:
        >>> count(8_030_261_248), count(999), count(1_234), count(0)
        ('8.03 G', '999', '1.23 k', '0')
    """
    return _prefixed(value, 1000, ("", "k", "M", "G", "T", "P", "E", "Z"))


def size(value: float) -> str:
    """A number of bytes with a binary prefix.

    Example:
        >>> size(131_072), size(70_272), size(12), size(1_073_741_824)
        ('128 KiB', '68.6 KiB', '12 B', '1 GiB')
    """
    return _prefixed(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB"))


def seconds(value: float) -> str:
    """A time.

    Example:
        >>> seconds(0.00125), seconds(2.5)
        ('1.25 ms', '2.5 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    return "0 s"


def _prefixed(value: float, base: int, prefixes: Sequence[str]) -> str:
    step = 0
    # Half a unit below the next prefix rounds up to it.
    while value >= base - 0.5 and step < len(prefixes) - 1:
        value /= base
        step += 1
    digits = f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
    return f"{digits} {prefixes[step]}".rstrip()


def readable(value: float | bool | None, column: Column) -> str:
    """A value of a sweep with the unit of its column."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "*" if value else ""
    if column.unit == "bytes":
        return size(value)
    if column.unit == "s":
        return seconds(value)
    if column.unit in ("nats", "FLOP/byte") or column.name == "share":
        return f"{value:.3g}"
    if column.unit == "FLOP" or column.name in ("parameters", "exponentials"):
        return count(value)
    return f"{value:,.0f}"


def ledger_page(book: Ledger) -> RenderableType:
    """The whole ledger."""
    return Group(*_ledger_parts(book))


def _ledger_parts(book: Ledger) -> Iterator[RenderableType]:
    numbers = book.numbers
    yield Text(numbers.name, style="bold")
    for line in _shapes(book.sites):
        yield Text(line)
    yield Text(_setting(book))
    yield Text("")
    yield _parameters(book)
    yield Text("")
    yield _operations(book)
    yield Text("")
    yield _memory(book)


def _setting(book: Ledger) -> str:
    """Sizes and dtypes of the run that is accounted for."""
    if not any(cost.site.stack == "decoder" for cost in book.sites):
        vision = book.numbers.vision
        images = f", {vision:,} of an image" if vision not in (None, book.source) else ""
        return f"batch {book.batch:,}, length {book.source:,}{images}; {book.dtype}"
    source = f", {book.source:,} on the encoder's side" if book.source else ""
    cache = f", cache {book.cache_dtype}" if book.cache.bytes else ""
    return f"batch {book.batch:,}, context {book.context:,}{source}; {book.dtype}{cache}"


def _shapes(sites: Sequence[SiteCost]) -> Iterator[str]:
    """Layers of one shape on one line."""
    shapes: dict[str, int] = {}
    for cost in sites:
        site = cost.site
        heads = f"{site.query_heads}"
        if site.query_heads != site.kv_heads:
            heads += f" query and {site.kv_heads} key-value"
        width = f"{site.d_k}" if site.d_k == site.d_v else f"{site.d_k} and {site.d_v}"
        extra = "".join(
            f", {name} {value}" for name, value in (("window", site.window), ("chunk", site.chunk)) if value is not None
        )
        extra += f", latent {site.latent.kv_rank} + {site.latent.rope}" if site.latent else ""
        shape = f"{site.stack} {site.kind}: {heads} heads of width {width}, d_model {site.d_model:,}{extra}"
        shapes[shape] = shapes.get(shape, 0) + 1
    return (f"{number} x {shape}" for shape, number in shapes.items())


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for at, header in enumerate(headers):
        table.add_column(header, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def _runs(sites: Sequence[SiteCost]) -> list[tuple[str, BlockParameters, bool]]:
    """Layers of one stack and kind that follow each other with the same parameters: where, what, whether several."""
    runs = []
    for stack, kind in dict.fromkeys((cost.site.stack, cost.site.kind) for cost in sites):
        own = [cost for cost in sites if (cost.site.stack, cost.site.kind) == (stack, kind)]
        for block, costs in groupby(own, key=lambda cost: cost.parameters):
            layers = [cost.site.layer for cost in costs]
            last = f" to {layers[-1]}" if len(layers) > 1 else ""
            runs.append((f"{stack} {kind}, layer {layers[0]}{last}", block, len(layers) > 1))
    return runs


def _parameters(book: Ledger) -> Table:
    found, table = book.parameters, _table("parameters", "", "")
    if found.total is not None:
        table.add_row("model", f"{found.total:,}", "")
    share = f"{100 * found.share:.1f} %" if found.share is not None else ""
    table.add_row("attention", f"{found.attention:,}", share)
    alike = len({cost.parameters for cost in book.sites}) == 1
    for where, block, several in _runs(book.sites)[:LISTED]:
        table.add_row(f"  {where}", f"{block.total:,}", "each" if several else "")
    if len(_runs(book.sites)) > LISTED:
        table.add_row("  ...", "", "see --per-layer")
    if alike:
        block = book.sites[0].parameters
        table.add_row("  per query head", f"{block.per_head:,}", "")
        if block.per_group is not None and block.per_group != block.per_head:
            table.add_row("  per key-value head with its query heads", f"{block.per_group:,}", "")
    if found.embedding:
        tied = f"{found.tied:,} of them tied" if found.tied else ""
        table.add_row("embedding tables", f"{found.embedding:,}", tied)
    if found.experts:
        table.add_row("experts", f"{found.experts:,}", "")
    if found.active is not None and found.experts:
        table.add_row("used by one token", f"{found.active:,}", "")
    return table


def _operations(book: Ledger) -> Table:
    phases = [(name, work) for name, work in (("prefill", book.prefill), ("decode step", book.decode)) if work]
    table = _table("FLOP (a multiply-add is 2)", *(name for name, _ in phases))

    def row(label: str, values: list[float | None]) -> None:
        table.add_row(label, *("-" if value is None else count(value) for value in values))

    works = [work for _, work in phases]
    row("projections", [work.attention.projections for work in works])
    if any(work.attention.expansion for work in works):
        row("expanding the latents", [work.attention.expansion or None for work in works])
    row("scores, full", [work.attention.scores for work in works])
    row("mixing, full", [work.attention.mixing for work in works])
    row(
        "scores and mixing, visible pairs only",
        [work.attention.visible_scores + work.attention.visible_mixing for work in works],
    )
    row("rest of the model", [work.rest for work in works])
    if any(work.output for work in works):
        row("output matrix", [work.output for work in works])
    row("sum, full", [work.full for work in works])
    row("sum, visible pairs only", [work.visible for work in works])
    if any(work.absorbed is not None for work in works):
        row("attention if latents are absorbed", [work.absorbed for work in works])
    return table


def _memory(book: Ledger) -> Table:
    table = _table("bytes", "", "")
    if book.cache.bytes:
        table.add_row("cache per token", f"{book.cache.token_bytes:,.0f}", size(book.cache.token_bytes))
        table.add_row("cache at the context", f"{book.cache.bytes:,.0f}", size(book.cache.bytes))
        if book.cache.transformers_bytes != book.cache.bytes:
            theirs = book.cache.transformers_bytes
            table.add_row("  as transformers' DynamicCache keeps it", f"{theirs:,.0f}", size(theirs))
    table.add_row("one layer's scores, if built", f"{book.scores.largest:,.0f}", size(book.scores.largest))
    traffic = book.traffic
    if traffic is not None:
        table.add_row("decode step: weights read", f"{traffic.weight_bytes:,.0f}", size(traffic.weight_bytes))
        table.add_row("decode step: cache read", f"{traffic.cache_read_bytes:,.0f}", size(traffic.cache_read_bytes))
        over_cache = f"attention {traffic.attention_intensity:.3g}"
        table.add_row("decode step: FLOP per byte", f"{traffic.intensity:.3g}", over_cache)
        if traffic.seconds is not None and traffic.bandwidth is not None:
            rate = f"at {traffic.bandwidth / 1e9:.3g} GB/s"
            table.add_row("decode step: least time", seconds(traffic.seconds), rate)
    return table


def layer_page(book: Ledger) -> RenderableType:
    """One line per attention layer."""
    table = _table("layer", "", "heads", "d_k", "window", "parameters", "per head", "cache", "prefill", "decode")
    for cost in book.sites:
        site = cost.site
        heads = f"{site.query_heads}" if site.query_heads == site.kv_heads else f"{site.query_heads}/{site.kv_heads}"
        width = f"{site.d_k}" if site.d_k == site.d_v else f"{site.d_k}/{site.d_v}"
        span = site.window if site.window is not None else site.chunk
        table.add_row(
            f"{site.stack} {site.kind}",
            str(site.layer),
            heads,
            width,
            "-" if span is None else str(span),
            count(cost.parameters.total),
            count(cost.parameters.per_head),
            size(cost.cache.bytes) if cost.cache.bytes else "-",
            "-" if cost.prefill is None else count(cost.prefill.full),
            "-" if cost.decode is None else count(cost.decode.full),
        )
    return Group(Text(book.numbers.name, style="bold"), table)


def sweep_page(table: Sweep, width: int) -> RenderableType:
    """A sweep; columns that do not fit are put into further tables that begin with the same two."""
    return Group(*_sweep_parts(table, width))


def _sweep_parts(table: Sweep, width: int) -> Iterator[RenderableType]:
    yield Text(f"{table.model}: {table.over}", style="bold")
    cells = [[readable(value, column) for value, column in zip(row, table.columns, strict=True)] for row in table.rows]
    if table.own is not None:
        cells[table.own][0] = f"> {cells[table.own][0]}"
    shown, constant = [], []
    for at in range(_keys(table), len(table.columns)):
        values = {row[at] for row in cells}
        if len(values) > 1 or (len(cells) == 1 and values != {"-"}):
            shown.append(at)
        elif values != {"-"}:
            constant.append(f"{_header(table.columns[at])} {cells[0][at]}")
    for part in _fitting(table.columns, cells, list(range(_keys(table))), shown, width):
        yield Text("")
        places = (*range(_keys(table)), *part)
        printed = _table(*(_header(table.columns[at]) for at in places))
        printed.columns[0].justify = "right"
        for number, row in enumerate(cells):
            printed.add_row(*(row[at] for at in places), style="bold" if number == table.own else None)
        yield printed
    yield Text("")
    if constant:
        yield Text("the same in every row: " + ", ".join(constant))
    if table.own is not None:
        yield Text("> the model itself")
    if table.over == "heads":
        yield Text("* d_k from 64 to 128, as most models have it")


def _header(column: Column) -> str:
    return column.name if column.name == "d_k" else column.name.replace("_", " ")


def _keys(table: Sweep) -> int:
    return 3 if table.over == "heads" else 1


def _fitting(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], key: list[int], others: list[int], width: int
) -> Iterator[list[int]]:
    """Columns in groups that fit ``width`` beside the key columns."""

    def needed(at: int) -> int:
        return 2 + max([len(columns[at].name), *(len(row[at]) for row in cells)])

    base = sum(needed(at) for at in key)
    part: list[int] = []
    for at in others:
        if part and base + sum(needed(one) for one in part) + needed(at) > width:
            yield part
            part = []
        part.append(at)
    if part:
        yield part

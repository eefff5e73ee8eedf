"""``headwise plan --compare``: criteria and repairs side by side, on text that no criterion saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwise.cli.data_options import check, given, running
from headwise.cli.options import Settings
from headwise.cli.plan import BUDGETS, CRITERIA, Share, writable
from headwise.cli.plots import check_plot
from headwise.cli.sink import Sink

if TYPE_CHECKING:
    from headwise.verbs.plan_compare import Comparison

__all__ = ["compare", "comparison_page"]

#: Options of planning that a comparison takes as well.
ASKED = (
    "repair", "unit", "per_layer", "protect", "only", "uniform", "loss", "statistics", "skip_first", "sample", "width",
    "seed",
)  # fmt: skip
#: Options that say what one plan is to be.
ALONE = (*BUDGETS, "criterion", "replacement", "save_statistics", "weight")


def compare(settings: Settings, options: dict[str, Any]) -> None:
    """Run the comparison that the command line asks for."""
    for name in ALONE:
        if options.pop(name) not in (None, ()):
            raise click.UsageError(f"--{name.replace('_', '-')} is about one plan, and --compare makes several.")
    check(options)
    names = options.pop("compare")
    criteria = CRITERIA if names == "all" else tuple(one.strip() for one in names.split(",") if one.strip())
    wrong = [one for one in criteria if one not in CRITERIA]
    if wrong or not criteria:
        raise click.UsageError(f"--compare takes all, or names of {', '.join(CRITERIA)}; {names!r} came.")
    output, plot, overwrite = (options.pop(name) for name in ("output", "plot", "overwrite"))
    for path in (output, plot):
        writable(path, overwrite)
    if plot is not None:
        check_plot(plot)
    sink, arguments = Sink(settings), given(options)
    model = arguments.pop("model")
    if "at" in arguments:
        arguments["at"] = [Share()(one) for one in arguments["at"].split(",")]
    if "held_out" in arguments:
        arguments["held_out"] = list(arguments["held_out"])
    asked = {name: arguments.pop(name) for name in ASKED if name in arguments}
    asked |= {"relative": False} if arguments.pop("plain", False) else {}
    with running(sink) as shown:
        from headwise.verbs.choosing import Asked
        from headwise.verbs.plan_compare import compare as compared

        found = compared(model, criteria=criteria, asked=Asked(**asked), **arguments, **shown)
        if output is not None:
            found.save(output)
        if plot is not None:
            from headwise.cli.plan_plot import draw

            draw(found, plot)
        tell(sink, found, output, plot)


def tell(sink: Sink, found: Comparison, output: Path | None, plot: Path | None) -> None:
    """Notes to stderr; the comparison to stdout."""
    for said in found.notes:
        sink.note(f"note: {said}")
    if sink.json:
        sink.document(found.to_document())
        return
    console = sink.console(plain_width=100)
    console.print(comparison_page(found, [path for path in (output, plot) if path is not None]), crop=False)


def comparison_page(found: Comparison, files: list[Path]) -> RenderableType:
    """The table of a comparison."""
    return Group(*_parts(found, files))


def _parts(found: Comparison, files: list[Path]) -> Iterator[RenderableType]:
    yield Text(found.model, style="bold", no_wrap=True, overflow="ignore")
    yield Text(f"{found.loss}; the whole model has {found.base:.4g}. Rise by heads removed of {found.heads}:")
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    grid.add_column("criterion\nrepair", no_wrap=True)
    for point in found.curves[0].points if found.curves else ():
        grid.add_column(f"{point.heads}\n{point.heads / max(1, found.heads):.0%}", justify="right", no_wrap=True)
    grid.add_column("passes", justify="right", no_wrap=True)
    grid.add_column("seconds", justify="right", no_wrap=True)
    for one in found.curves:
        name = one.criterion if one.seed is None else f"{one.criterion} {one.seed}"
        points = [f"{point.loss:.4f}\n±{(point.high - point.low) / 2:.4f}" for point in one.points]
        grid.add_row(f"{name}\n{one.repair}", *points, f"{one.passes:.1f}", f"{one.seconds:.1f}")
    yield grid
    yield Text(
        f"± 95 % over {found.held_out['passages']:,} held-out passages; passes over the text of "
        f"{found.text['tokens']:,} tokens; seconds without the pass over it that every repair needs as well",
        style="dim",
    )
    for path in files:
        yield Text(f"written: {path}", no_wrap=True, overflow="ignore")

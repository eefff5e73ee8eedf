"""``headwise statistics``: covariances of head outputs, layer by layer, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwise.cli.data_options import READING, check, given, running, scan_options
from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

__all__ = ["command"]


@click.command("statistics", short_help="Covariances of head outputs, for planning and repair.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write, .safetensors; replaced in one step if it is there.",
)
@scan_options(READING)
@click.option("--gradients", is_flag=True, help="Take the covariance of the loss's gradients, too (a backward pass).")
@click.option("--loss", metavar="NAME", help="Whose gradients; see headwise importance --help.")
@click.option(
    "--skip-first",
    type=click.IntRange(min=0),
    metavar="ROWS",
    help="Leave out so many rows at the beginning of every passage.  [default: 0]",
)
@click.option("--relative", is_flag=True, help="Weigh rows as headwise plan does: by the inverse of their energy.")
@click.option("--running-means", is_flag=True, help="Take running means along, for plans that put them in place.")
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Measure the covariance of the concatenated head outputs of every layer of MODEL.

    \b
    headwise statistics ./my-model --text book.txt --window 512 -o book.safetensors
    """
    check({**options, "output": None})
    if options["loss"] is not None and not options["gradients"]:
        raise click.UsageError("--loss is about gradients: it needs --gradients.")
    sink = Sink(settings)
    arguments = given(options)
    model, path = arguments.pop("model"), arguments.pop("output")
    with running(sink) as shown:
        from headwise.verbs.statistics import statistics

        found = statistics(model, **arguments, **shown)
        found.save(path)
    rows = [one.z.rows for one in found.sites.values()]
    if sink.json:
        sink.document({"file": str(path), "sites": len(found), "rows": rows, "loss": found.loss})
        return
    with_gradients = f", gradients of {found.loss}" if found.loss else ""
    sink.line(f"{len(found)} layers, {max(rows, default=0):,} rows{with_gradients}: {path}")

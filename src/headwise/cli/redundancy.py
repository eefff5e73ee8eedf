"""``headwise redundancy``: which heads do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwise.cli.data_options import READING, check, given, running, scan_options
from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

__all__ = ["command"]


@click.command("redundancy", short_help="Which heads do the same.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write, .safetensors: both matrices of all heads.",
)
@scan_options(READING)
@click.option(
    "--rows", type=click.IntRange(min=1), help="Query rows of each passage to compare patterns on.  [default: 4]"
)
@click.option(
    "--directions",
    type=click.IntRange(min=1),
    help="Random directions of each head across layers.  [default: as many as fit]",
)
@click.option(
    "--at",
    type=click.FloatRange(0.0, 1.0),
    default=0.3,
    show_default=True,
    help="Heads nearer than this form a cluster.",
)
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Compare every two heads of MODEL: their patterns and their outputs.

    \b
    headwise redundancy ./my-model --text book.txt --window 256
    """
    check({**options, "output": None})
    sink = Sink(settings)
    arguments = given(options)
    model, path, at = arguments.pop("model"), arguments.pop("output", None), arguments.pop("at", 0.0)
    with running(sink) as shown:
        from headwise.verbs.redundancy import redundancy

        found = redundancy(model, **arguments, **shown)
        if path is not None:
            found.save(path)
    if sink.json:
        sink.document({**found.to_document(at=at), "file": None if path is None else str(path)})
        return
    from headwise.cli.head_tables import redundancy_page

    console = sink.console()
    console.print(redundancy_page(found, at), crop=False)
    if path is not None:
        sink.line(f"file: {path}")

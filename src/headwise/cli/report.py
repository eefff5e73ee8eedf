"""``headwise report``: make a run's report again from its saved files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

__all__ = ["command"]


@click.command("report", short_help="Make a run's report again from its saved files.", no_args_is_help=True)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Write RUN/report.html from run.json and heads.json.

    The page is one file that needs no network. No model is loaded.

    \b
    headwise report runs/book
    """
    from headwise.verbs.report import report

    sink = Sink(settings)
    page = report(options["run"])
    if sink.json:
        sink.document({"report": str(page)})
    else:
        sink.line(str(page))

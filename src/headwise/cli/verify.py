"""``headwise verify``: prove again that one model is another without certain heads."""

from __future__ import annotations

from typing import Any

import click

from headwise.cli.data_options import LOADING, scan_options
from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

__all__ = ["command"]


@click.command("verify", short_help="Prove that a pruned model is the original without heads.", no_args_is_help=True)
@click.argument("original", metavar="ORIGINAL")
@click.argument("pruned", metavar="PRUNED")
@click.option("--time", "timed", is_flag=True, help="Measure what the cut saves here: passes of 32 x 128 tokens.")
@output_options
@scan_options(LOADING)
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Prove that PRUNED is ORIGINAL without certain heads, and otherwise the same.

    Every weight that is left must be ORIGINAL's bit for bit, but for output projections that were repaired; and every
    layer must give what ORIGINAL's gives with those heads gated, on the same input. Exit status 1 where it is not so.

    The options of loading are ORIGINAL's, as they were given to headwise prune; PRUNED goes to the same device.

    \b
    headwise verify ./my-model ./my-model-small
    """
    sink = Sink(settings)
    with sink.warnings_as_notes():
        from headwise.models import load
        from headwise.verbs.timing import timing
        from headwise.verbs.verify import verify

        loading = {name: options[name] for name in LOADING if options[name]}
        original = load(options["original"], **loading)
        pruned = load(options["pruned"], **{name: value for name, value in loading.items() if name == "device"})
        found = verify(original, pruned)
        measured = timing(original, pruned, removed=found.removed) if options["timed"] else None
    from headwise.cli.surgery_page import tell_verified

    tell_verified(sink, found, measured)

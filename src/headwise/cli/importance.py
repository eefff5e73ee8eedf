"""``headwise importance``: how much the loss depends on every head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headwise.cli.data_options import READING, check, given, running, scan_options
from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

if TYPE_CHECKING:
    from headwise.verbs import ScanResult

__all__ = ["command"]

METHODS = ("gradient", "zero", "mean", "resample")


@click.command("importance", short_help="How much a loss depends on every head.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@scan_options(("output", "overwrite", *READING))
@click.option(
    "--method",
    multiple=True,
    type=click.Choice(METHODS),
    help="gradient (one backward pass), or ablation by zero, mean or resample (one pass per head). Repeatable.  "
    "[default: gradient]",
)
@click.option(
    "--loss",
    metavar="NAME",
    help="next_token, masked_token, target, labels, fidelity_cosine, fidelity_kl, projection, or module:function.  "
    "[default: what fits the model]",
)
@click.option("--per", type=click.Choice(("example", "token")), help="Sum the loss over an example, or average it.")
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Measure how much a loss depends on every head of MODEL.

    One number per head and example: the absolute gradient of the loss by the head's gate, its
    square, or how much the loss rises when the head is replaced.

    \b
    headwise importance ./my-model --text book.txt --window 512
    headwise importance ./my-model --text book.txt --method zero --loss fidelity_kl
    """
    check(options)
    sink = Sink(settings)
    arguments = given(options)
    model = arguments.pop("model")
    if "method" in arguments:
        arguments["method"] = list(arguments["method"])
    with running(sink) as shown:
        from headwise import verbs

        result = verbs.importance_run(model, **arguments, **shown)
        tell(sink, result)


def tell(sink: Sink, result: ScanResult) -> None:
    """Notes to stderr; the result to stdout."""
    for kind in ("warning", "note"):
        for said in result.run.get(f"{kind}s", ()):
            sink.note(f"{kind}: {said}")
    if sink.json:
        from headwise.cli.documents import scan_document

        sink.document(scan_document(result))
        return
    from headwise.cli.head_tables import importance_page

    console = sink.console()
    console.print(importance_page(result, console), crop=False)

"""``headwise scan``: measure every head of a model on a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

if TYPE_CHECKING:
    from headwise.verbs import ScanResult

__all__ = ["command"]

DTYPES = ("float32", "float64", "bfloat16", "float16")
POSITIVE = click.IntRange(min=1)


def check(options: dict[str, Any]) -> None:
    """Refuse combinations of options that cannot be meant.

    Raises:
        click.UsageError: what does not go together, and what does.
    """
    texts = bool(options["text"] or options["sentence"])
    if not texts and options["inputs"] is None:
        raise click.UsageError("nothing to read: give --text FILE, --sentence TEXT or --inputs FILE.")
    if texts and options["inputs"] is not None:
        raise click.UsageError(
            "--inputs stands alone: ready inputs and --text or --sentence cannot be mixed in one run."
        )
    for name in ("field", "target_field", "window"):
        if options[name] is not None and not options["text"]:
            raise click.UsageError(f"--{name.replace('_', '-')} is about a file of text: it needs --text FILE.")
    if options["overwrite"] and options["output"] is None:
        raise click.UsageError("--overwrite needs -o RUN, the folder that may be replaced.")
    _check_backend(options.get("backend"))
    window, max_length = options["window"], options["max_length"]
    if window is not None and max_length is not None and window > max_length:
        raise click.UsageError(
            f"--window {window} is longer than --max-length {max_length}: every window would lose its end."
        )
    for sentence in options["sentence"]:
        if not sentence.strip():
            raise click.UsageError("--sentence is empty.")


def _check_backend(name: str | None) -> None:
    if name is None:
        return
    from headwise.kernels import backends

    if name not in backends():
        raise click.BadParameter(f"{name!r} is none of {', '.join(backends())}.", param_hint="'--backend'")


@click.command("scan", short_help="Measure every head of a model on a text.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@click.option(
    "--text",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text to run: .txt, .jsonl, .csv or .parquet. Repeatable.",
)
@click.option("--sentence", multiple=True, metavar="TEXT", help="One passage, given here. Repeatable.")
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ready model inputs: .jsonl of input_ids, or .safetensors of named tensors.",
)
@click.option(
    "--measures",
    metavar="NAMES",
    help="Measures or groups of them, separated by commas: pattern, rank, replaceable, spread, ...  [default: pattern]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Folder to write: run.json, heads.json and report.html.",
)
@click.option("--overwrite", is_flag=True, help="Replace a finished run in RUN.")
@click.option("--field", metavar="NAME", help="The field or column that holds the text.  [default: text]")
@click.option("--target-field", metavar="NAME", help="The field with the decoder's text (encoder-decoder models).")
@click.option("--window", type=POSITIVE, metavar="TOKENS", help="Cut long text into windows of this many tokens.")
@click.option("--max-length", type=POSITIVE, metavar="TOKENS", help="Truncate passages; how much is said.")
@click.option("--limit", type=POSITIVE, metavar="PASSAGES", help="Read no more than this many passages.")
@click.option("--batch-size", type=POSITIVE, metavar="PASSAGES", help="Passages in one forward pass.")
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1, mps ...  [default: cpu]")
@click.option("--dtype", type=click.Choice(DTYPES), help="Run the model in this dtype.  [default: that of its weights]")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of whatever is random.  [default: 0]")
@click.option("--backend", metavar="NAME", help="Force one way of computing attention.  [default: the best that can]")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub model.")
@click.option("--allow-pickle", is_flag=True, help="Load a checkpoint that exists only as a pickle (weights only).")
@click.option("--trust-remote-code", is_flag=True, help="Run the code that comes with the model.")
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Measure every head of MODEL on a text.

    MODEL is a folder or the id of a model in the local cache. Entropy, largest weight, weight on
    the previous, next, own and first position, distance, and the norms of what a head writes: each
    with its mean, its spread and the number of rows.

    \b
    headwise scan ./my-model --text book.txt -o runs/book
    headwise scan ./my-model --sentence "The cat sat on the mat."
    """
    check(options)
    sink = Sink(settings)
    with sink.warnings_as_notes():
        result = measure(sink, options)
        tell(sink, result)


def measure(sink: Sink, options: dict[str, Any]) -> ScanResult:
    """Run the verb with the options that were given."""
    from headwise import verbs

    given = {name: value for name, value in options.items() if value is not None and value is not False and value != ()}
    if "measures" in given:
        given["measures"] = [name.strip() for name in given["measures"].split(",") if name.strip()]
    model, texts, sentences = given.pop("model"), given.pop("text", ()), given.pop("sentence", ())
    sources = [*texts, *sentences]
    if sources:
        given["texts"] = sources
    with sink.progress() as bar:
        return verbs.scan_run(model, progress=bar, notice=sink.note, **given)


def tell(sink: Sink, result: ScanResult) -> None:
    """Notes to stderr; the result to stdout, as a table for people or as one JSON document."""
    for kind in ("warning", "note"):
        for said in result.run.get(f"{kind}s", ()):
            sink.note(f"{kind}: {said}")
    if sink.json:
        from headwise.cli.documents import scan_document

        sink.document(scan_document(result))
        return
    from headwise.cli.head_tables import measures_page
    from headwise.cli.render import SHOWN, scan_page

    console = sink.console()
    page = scan_page if SHOWN in result.table.measures else measures_page
    console.print(page(result, console), crop=False)

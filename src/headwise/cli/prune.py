"""``headwise prune``: cut heads out of a model, repair what is left, prove it, and save it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwise.cli.options import Settings, output_options
from headwise.cli.scan import DTYPES, POSITIVE
from headwise.cli.sink import Sink

__all__ = ["command", "heads_of"]


def heads_of(given: tuple[str, ...]) -> dict[str, list[int]]:
    """``("encoder.layer.0:1,5",)`` as ``{"encoder.layer.0": [1, 5]}``.

    Raises:
        click.UsageError: it is not written like that.
    """
    found: dict[str, list[int]] = {}
    for one in given:
        block, _, heads = one.rpartition(":")
        try:
            indices = [int(head) for head in heads.split(",")]
        except ValueError:
            raise click.UsageError(f"--heads is BLOCK:HEAD,HEAD and was {one!r}.") from None
        if not block:
            raise click.UsageError(f"--heads is BLOCK:HEAD,HEAD and was {one!r}.")
        found.setdefault(block, []).extend(indices)
    return found


def check(options: dict[str, Any]) -> None:
    """Refuse combinations of options that cannot be meant."""
    if (options["plan"] is None) == (not options["heads"]):
        raise click.UsageError("say which heads go: --plan FILE, or --heads BLOCK:HEAD,HEAD; one of the two.")
    sources = [bool(options["text"]), options["inputs"] is not None, options["statistics"] is not None]
    if sum(sources) > 1:
        raise click.UsageError("--text, --inputs and --statistics cannot be mixed.")
    if options["weight"] and len(options["weight"]) != len(options["text"]):
        raise click.UsageError("give --weight once for every --text, or not at all.")
    if not any(sources) and options["repair"] not in ("none", None):
        raise click.UsageError(f"--repair {options['repair']} needs --text, --inputs or --statistics to learn from.")


@click.command("prune", short_help="Cut heads out of a model and repair what is left.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@click.option("--plan", type=click.Path(path_type=Path), metavar="FILE", help="Which heads go, from headwise plan.")
@click.option("--heads", multiple=True, metavar="BLOCK:HEAD,..", help="Heads that go, named here. Repeatable.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", required=True, help="Folder to save the model in."
)
@click.option("--overwrite", is_flag=True, help="Replace a model that headwise saved in DIR.")
@click.option(
    "--repair",
    type=click.Choice(("least_squares", "bias", "none")),
    help="What the remaining output projections learn.  [default: least_squares]",
)
@click.option(
    "--text",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text that the repair learns from: .txt, .jsonl, .csv or .parquet. Repeatable.",
)
@click.option("--weight", multiple=True, type=float, metavar="W", help="What each --text counts. Repeatable.")
@click.option("--inputs", type=click.Path(path_type=Path), metavar="FILE", help="Ready model inputs instead of text.")
@click.option("--statistics", type=click.Path(path_type=Path), metavar="FILE", help="Saved statistics of this model.")
@click.option("--field", metavar="NAME", help="The field or column that holds the text.  [default: text]")
@click.option("--target-field", metavar="NAME", help="The field with the decoder's text (encoder-decoder models).")
@click.option("--window", type=POSITIVE, metavar="TOKENS", help="Cut long text into windows of this many tokens.")
@click.option("--max-length", type=POSITIVE, metavar="TOKENS", help="Truncate passages.")
@click.option("--limit", type=POSITIVE, metavar="PASSAGES", help="Read no more than this many passages.")
@click.option("--batch-size", type=POSITIVE, metavar="PASSAGES", help="Passages in one forward pass.")
@click.option("--shard-size", type=POSITIVE, metavar="BYTES", help="Largest file of weights.  [default: 5 GB]")
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1, mps ...  [default: cpu]")
@click.option("--dtype", type=click.Choice(DTYPES), help="Dtype of the model.  [default: that of its weights]")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub model.")
@click.option("--allow-pickle", is_flag=True, help="Load a checkpoint that exists only as a pickle (weights only).")
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Cut heads out of MODEL, prove that removed equals gated, repair what is left, and save it in DIR.

    \b
    headwise prune ./my-model --plan plan.json --text book.txt -o ./my-model-small
    headwise prune ./my-model --heads encoder.layer.0:1,5 --repair none -o ./my-model-small
    """
    check(options)
    sink = Sink(settings)
    given = {name: value for name, value in options.items() if value is not None and value is not False and value != ()}
    model, output = given.pop("model"), given.pop("output")
    saving = {"overwrite": given.pop("overwrite", False)}
    if "shard_size" in given:
        saving["max_shard_size"] = given.pop("shard_size")
    plan = given.pop("plan", None) or heads_of(given.pop("heads"))
    for ours, theirs in (("text", "texts"), ("weight", "weights")):
        if ours in given:
            given[theirs] = list(given.pop(ours))
    from headwise.models.saving import check_target
    from headwise.verbs.prune import prune

    check_target(output, overwrite=saving["overwrite"])
    with sink.warnings_as_notes(), sink.progress() as bar:
        small = prune(model, plan, progress=bar, notice=sink.note, **given)
        small.save(output, **saving)
    tell(sink, small, output)


def tell(sink: Sink, small: Any, output: Path) -> None:
    """What was cut, the proof, and where it is."""
    record = small.surgery
    if sink.json:
        sink.document({"folder": str(output), "surgery": record.to_document()})
        return
    heads = sum(len(one.removed) for one in record.blocks)
    before, after = record.parameters
    worst = max((one.difference / one.largest for one in record.proof.layers if one.largest), default=0.0)
    lines = [
        f"{heads} heads of {len(record.blocks)} blocks removed: {before:,} -> {after:,} parameters",
        f"proved: removed equals gated in {len(record.proof.layers)} layers, largest difference {worst:.2g} of the "
        f"largest output (allowed: {record.proof.bound:g})",
    ]
    layers = record.repair["layers"]
    if layers:
        lost, left = (sum(one[name] for one in layers) / len(layers) for name in ("lost", "left"))
        lines.append(f"repaired ({record.repair['method']}): lost part of a layer's output {lost:.1%} -> {left:.1%}")
    print("\n".join([*lines, str(output)]), file=sink.stdout)

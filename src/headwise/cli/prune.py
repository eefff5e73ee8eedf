"""``headwise prune``: cut heads out of a model, repair what is left, prove it, and save it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import click

from headwise.cli.data_options import LOADING, READING, check_weight, given, running, scan_options, weight_option
from headwise.cli.options import Settings, output_options
from headwise.cli.scan import POSITIVE
from headwise.cli.scan import check as check_reading
from headwise.cli.sink import Sink

__all__ = ["command", "heads_of"]


def heads_of(named: tuple[str, ...]) -> dict[str, list[int]]:
    """``("encoder.layer.0:1,5",)`` as ``{"encoder.layer.0": [1, 5]}``.

    Raises:
        click.UsageError: it is not written like that.
    """
    found: dict[str, list[int]] = {}
    for one in named:
        block, _, heads = one.rpartition(":")
        indices = [int(head) for head in heads.split(",") if head.strip().isdecimal()]
        if not block or len(indices) != heads.count(",") + 1:
            raise click.UsageError(f"--heads is written BLOCK:HEAD,HEAD (encoder.layer.0:1,5) and was {one!r}.")
        found.setdefault(block, []).extend(indices)
    return found


def check(options: dict[str, Any]) -> None:
    """Refuse combinations of options that cannot be meant.

    Raises:
        click.UsageError: what does not go together, and what does.
    """
    if (options["plan"] is None) == (not options["heads"]):
        raise click.UsageError("say which heads go: --plan FILE, or --heads BLOCK:HEAD,HEAD; one of the two.")
    reads = bool(options["text"] or options["sentence"] or options["inputs"] is not None)
    if options["statistics"] is not None and reads:
        raise click.UsageError("--statistics stands alone: it cannot be mixed with --text, --sentence or --inputs.")
    if reads or any(options[name] is not None for name in ("field", "target_field", "window")):
        check_reading({**options, "overwrite": False})
    if options["heal"] and not reads:
        raise click.UsageError("--heal learns from text: it needs --text, --sentence or --inputs.")
    if options["heal_rate"] is not None and not options["heal"]:
        raise click.UsageError("--heal-rate is about healing: it needs --heal STEPS.")
    check_weight(options)
    if not reads and options["statistics"] is None and options["repair"] not in ("none", None):
        raise click.UsageError(f"--repair {options['repair']} needs --text, --inputs or --statistics to learn from.")


@click.command("prune", short_help="Cut heads out of a model and repair what is left.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@click.option(
    "--plan",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Which heads go: a plan that headwise plan wrote for this model.",
)
@click.option("--heads", multiple=True, metavar="BLOCK:HEAD,..", help="Heads that go, named here. Repeatable.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", required=True, help="Folder to save the model in."
)
@click.option("--overwrite", is_flag=True, help="Replace a model that headwise saved in DIR.")
@click.option(
    "--repair",
    type=click.Choice(("least_squares", "least_squares_no_bias", "bias", "none")),
    help="What the remaining output projections learn.  [default: least_squares]",
)
@click.option(
    "--stock",
    is_flag=True,
    help="Promise a checkpoint that plain transformers loads: refuse what it cannot say, and repair without an "
    "intercept where it has no place for one.",
)
@weight_option
@click.option(
    "--statistics",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Saved statistics of this model (headwise statistics) instead of text.",
)
@click.option(
    "--heal",
    type=POSITIVE,
    metavar="STEPS",
    help="Then train the pruned model for so many steps to give what MODEL gives, on the same text.",
)
@click.option(
    "--heal-rate",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    metavar="RATE",
    help="Peak learning rate of --heal.  [default: 0.0001]",
)
@click.option("--time", "timed", is_flag=True, help="Measure what the cut saves here: passes of 32 x 128 tokens.")
@click.option("--shard-size", type=POSITIVE, metavar="BYTES", help="Largest file of weights.  [default: 5 GB]")
@scan_options(READING)
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Cut heads out of MODEL, prove that removed equals gated, repair what is left, and save it in DIR.

    The heads come from a plan or are named: BLOCK is the path of an attention module, or of the layer that has it.
    The text is what the repair learns from; with --repair none none is needed. MODEL is not changed.

    \b
    headwise prune ./my-model --plan plan.json --text book.txt -o ./my-model-small
    headwise prune ./my-model --heads encoder.layer.0:1,5 --repair none -o ./my-model-small
    headwise prune ./my-model --plan uniform.json --stock --text book.txt -o ./my-model-small

    An interrupted --heal goes on where it was when the same command is given again (checkpoints are in DIR.healing
    until it is done).
    """
    check(options)
    sink = Sink(settings)
    arguments = given(options)
    model, output = arguments.pop("model"), arguments.pop("output")
    saving = {"overwrite": arguments.pop("overwrite", False)}
    if "shard_size" in arguments:
        saving["max_shard_size"] = arguments.pop("shard_size")
    named = arguments.pop("heads", ())
    plan = arguments.pop("plan", None) or heads_of(named)
    if "weight" in arguments:
        arguments["weights"] = list(arguments.pop("weight"))
    timed, steps, rate = arguments.pop("timed", False), arguments.pop("heal", 0), arguments.pop("heal_rate", 1e-4)
    loading = {name: arguments.pop(name) for name in LOADING if name in arguments}
    whole = Path(os.path.abspath(output))
    checkpoints = whole.with_name(whole.name + ".healing") if whole.name else whole
    with running(sink) as shown:
        from headwise.models import check_target, load
        from headwise.surgery import Healing
        from headwise.verbs.prune import prune
        from headwise.verbs.timing import check_timed, timing

        check_target(output, overwrite=saving["overwrite"])
        if steps:
            arguments["heal"] = Healing(steps, rate, arguments.get("seed", 0), checkpoints)
        original = load(model, **loading)
        if timed:
            check_timed(original)
        small = prune(original, plan, **arguments, **shown)
        small.save(output, **saving)
        if steps:
            shutil.rmtree(checkpoints)
        measured = timing(original, small) if timed else None
    from headwise.cli.surgery_page import tell_pruned

    tell_pruned(sink, small, output, measured)

"""``headwise plan``: choose the heads that go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headwise.cli.data_options import READING, check, check_weight, given, running, scan_options, weight_option
from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink
from headwise.errors import RunError

if TYPE_CHECKING:
    from headwise.plans import HeadPlan

__all__ = ["BUDGETS", "CRITERIA", "Share", "command", "writable"]

CRITERIA = (
    "set-aware",
    "lazy",
    "greedy",
    "leave-one-out",
    "fisher",
    "michel-iterative",
    "michel",
    "weight-norm",
    "random",
)
BUDGETS = ("keep", "params", "cache_bytes", "speed", "max_loss")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}


class Count(click.ParamType[int]):
    """A whole number, perhaps with k, M or G behind it: ``80M``."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number meant."""
        text = str(value).strip().lower()
        factor = _UNITS.get(text[-1:], 1)
        try:
            number = float(text[:-1] if factor > 1 else text) * factor
            return int(number)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no number like 1500000, 80M or 1.5G.", param, ctx)


class Share(click.ParamType[float]):
    """A number, or a percentage: ``0.6``, ``60%``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number meant."""
        text = str(value).strip()
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is no number like 0.6 or 60%.", param, ctx)


@click.command("plan", short_help="Choose the heads that go.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Plan to write, .json."
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it is there.")
@scan_options(READING)
@weight_option
@click.option("--keep", type=Share(), metavar="SHARE", help="Budget: share of the query heads that stay: 0.6 or 60%.")
@click.option("--params", type=Count(), metavar="N", help="Budget: parameters of the whole model at most: 80M.")
@click.option("--cache-bytes", type=Count(), metavar="N", help="Budget: bytes of keys and values per token at most.")
@click.option(
    "--speed", type=float, metavar="TIMES", help="Budget: times as fast, predicted from measured layer times."
)
@click.option(
    "--max-loss",
    type=Share(),
    metavar="SHARE",
    help="Budget: how much worse the repaired model may be, 1%: searched on one half of the text, confirmed on the "
    "other.",
)
@click.option("--criterion", type=click.Choice(CRITERIA), help="How heads are chosen.  [default: set-aware]")
@click.option(
    "--repair",
    type=click.Choice(("none", "bias", "least_squares", "least_squares_no_bias")),
    help="The repair that criteria reckon with.  [default: least_squares]",
)
@click.option("--unit", type=click.Choice(("head", "group")), help="What goes together.  [default: head]")
@click.option(
    "--per-layer", type=click.IntRange(min=0), metavar="HEADS", help="Heads that every layer keeps.  [default: 1]"
)
@click.option("--protect", multiple=True, metavar="BLOCK[:HEADS]", help="Heads that stay: encoder.layer.0:1,5.")
@click.option(
    "--only", multiple=True, metavar="PART", help="Only this part loses heads: a path, encoder, decoder/self."
)
@click.option("--uniform", is_flag=True, help="The same number of heads goes from every layer.")
@click.option(
    "--replacement",
    type=click.Choice(("nothing", "constant", "running_mean")),
    help="In their place: nothing, their mean, or the mean of the values that a query sees.  [default: nothing]",
)
@click.option("--loss", metavar="NAME", help="What exact criteria measure; see headwise importance --help.")
@click.option(
    "--statistics",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Moments from headwise statistics, instead of a pass over the text.",
)
@click.option(
    "--save-statistics",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the moments for headwise prune, .safetensors.",
)
@click.option("--skip-first", type=click.IntRange(min=0), metavar="ROWS", help="Rows left out of every passage.")
@click.option("--plain", is_flag=True, help="All rows count alike, not by their energy in the residual stream.")
@click.option("--sample", type=click.IntRange(min=1), metavar="TOKENS", help="Text of exact criteria.  [default: 2048]")
@click.option("--width", type=click.IntRange(min=1), metavar="HEADS", help="Shortlist of lazy.  [default: 4]")
@click.option(
    "--compare",
    metavar="NAMES",
    help="Instead of one plan: quality against heads removed for these criteria, separated by commas, or for all.",
)
@click.option(
    "--held-out",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text to compare on that no criterion sees.  [default: every fourth passage]",
)
@click.option("--at", metavar="SHARES", help="Where to compare: shares of heads removed.  [default: 10%,...,60%]")
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="Random orders in a comparison.  [default: 3]")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the comparison.")
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Choose which heads of MODEL go, and write the plan.

    One budget says how far: --keep, --params, --cache-bytes, --speed or --max-loss. The default
    criterion needs one forward pass over the text and no labels.

    \b
    headwise plan ./my-model --text book.txt --keep 0.6 -o plan.json
    headwise plan ./my-model --text book.txt --window 512 --max-loss 1% -o plan.json
    headwise plan ./my-model --text book.txt --compare set-aware,michel,random --plot curve.png
    """
    if options["compare"] is not None:
        from headwise.cli.plan_compare import compare

        compare(settings, options)
        return
    for name in ("held_out", "at", "seeds", "plot"):
        if options.pop(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is about comparing: it needs --compare.")
    chosen = [name for name in BUDGETS if options[name] is not None]
    if len(chosen) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in BUDGETS)
        raise click.UsageError(f"give one budget of {names}; {len(chosen)} came.")
    check_weight(options)
    if not _needs_no_text(options):
        check(options)
    output, kept = options["output"], options["save_statistics"]
    for path in (output, kept):
        writable(path, options["overwrite"])
    if kept is not None and options["criterion"] in ("weight-norm", "random"):
        raise click.UsageError(
            f"--criterion {options['criterion']} takes no statistics that --save-statistics could keep."
        )
    if kept is not None and output is not None and os.path.realpath(kept) == os.path.realpath(output):
        raise click.UsageError("-o and --save-statistics name the same file; give two.")
    sink = Sink(settings)
    arguments = given(options)
    model, output = arguments.pop("model"), arguments.pop("output", None)
    arguments.pop("overwrite", None)
    saved = arguments.pop("save_statistics", None)
    if arguments.pop("plain", False):
        arguments["relative"] = False
    if "weight" in arguments:
        arguments["weights"] = list(arguments.pop("weight"))
    with running(sink) as shown:
        from headwise import verbs

        plan = verbs.plan(model, **arguments, **shown)
        _save(plan, output, saved)
        tell(sink, plan, output)


def _needs_no_text(options: dict[str, Any]) -> bool:
    if options["text"] or options["sentence"] or options["inputs"] is not None:
        return False
    if options["speed"] is not None or options["max_loss"] is not None:
        return False
    criterion = options["criterion"] or "set-aware"
    return criterion in ("weight-norm", "random") or (criterion == "set-aware" and options["statistics"] is not None)


def writable(path: Path | None, overwrite: bool) -> None:
    """Refuse a target before the work, not after it.

    Raises:
        RunError: it is there, or its folder is not or cannot be written.
    """
    if path is None:
        return
    if path.exists() and not overwrite:
        raise RunError(f"{path} is there; give another file, or --overwrite to replace it")
    if not path.parent.is_dir():
        raise RunError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise RunError(f"{path} cannot be written: the folder {path.parent} is read-only")


def _save(plan: HeadPlan, output: Path | None, statistics: Path | None) -> None:
    if statistics is not None:
        if plan.statistics is None:
            raise RunError(f"the criterion {plan.criterion} takes no statistics, so {statistics} was not written")
        plan.statistics.save(statistics)
    if output is not None:
        plan.save(output)


def tell(sink: Sink, plan: HeadPlan, output: Path | None) -> None:
    """Notes to stderr; the plan to stdout, as a page for people or as one JSON document."""
    for said in plan.facts.get("notes", ()):
        sink.note(f"note: {said}")
    if sink.json:
        sink.document({"plan": plan.to_document(), "file": None if output is None else str(output)})
        return
    from headwise.cli.plan_page import plan_page

    sink.console().print(plan_page(plan, output), crop=False)

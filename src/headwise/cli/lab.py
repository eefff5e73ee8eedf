"""``headwise lab``: what is said about attention heads, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from headwise.lab import Outcome

__all__ = ["command"]


@click.command("lab", short_help="What is said about attention heads, measured.")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the experiments with their claims; run nothing.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Where the random numbers of every experiment start.",
)
@click.option("--quick", is_flag=True, help="Small sizes: a look in seconds, whose verdicts count for nothing.")
@click.option(
    "--page",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Also write a results page with figures (needs matplotlib: headwise[plot]).",
)
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Run the experiments called NAME, or all of them.

    Each is a claim about multi-head attention with a number, its spread over seeds, and a verdict by a
    rule that was fixed before the run: it holds, holds under a condition, or does not hold as stated.
    All of them take a few minutes.

    \b
    headwise lab --list
    headwise lab worked-split
    headwise lab --page results/
    """
    if options["listing"] and (options["quick"] or options["page"] is not None):
        raise click.UsageError("--list runs nothing: it does not go with --quick or --page.")
    sink = Sink(settings)
    if options["listing"]:
        _list(sink, options["names"])
        return
    with sink.warnings_as_notes():
        outcomes = _measure(sink, options)
        _tell(sink, outcomes, options)


def _list(sink: Sink, names: tuple[str, ...]) -> None:
    """The catalogue, without importing anything that computes."""
    from rich.text import Text

    from headwise.lab.catalogue import CATALOGUE, find

    chosen = [find(name) for name in names] or list(CATALOGUE)
    if sink.json:
        sink.document({"experiments": [{"name": e.name, "title": e.title, "claim": e.claim} for e in chosen]})
        return
    console = sink.console()
    for entry in chosen:
        console.print(entry.name, style="bold")
        console.print(_indented(Text(entry.claim)))


def _measure(sink: Sink, options: dict[str, Any]) -> list[Outcome]:
    """Check that what was asked for can be given, then run."""
    from headwise.lab import run_all
    from headwise.lab.figures import require_matplotlib

    if options["page"] is not None:
        require_matplotlib()
    size = "small" if options["quick"] else "full"
    with sink.progress() as bar:
        return run_all(options["names"], seed=options["seed"], size=size, progress=bar)


def _tell(sink: Sink, outcomes: list[Outcome], options: dict[str, Any]) -> None:
    """Results to stdout; the page, if wanted, to its folder."""
    if options["quick"]:
        sink.note("note: --quick uses small sizes; its verdicts count for nothing.")
    page = None
    if options["page"] is not None:
        from headwise.lab import write_page

        page = write_page(options["page"], outcomes)
    if sink.json:
        document: dict[str, Any] = {"experiments": [_document(outcome) for outcome in outcomes]}
        sink.document({**document, "page": str(page)} if page else document)
        return
    console = sink.console()
    for outcome in outcomes:
        console.print(_result(outcome, detailed=len(outcomes) == 1))
    if page:
        console.print(f"page: {page}", soft_wrap=True)


def _document(outcome: Outcome) -> dict[str, Any]:
    """An outcome with its claim and the condition of its rule."""
    from headwise.lab import definition, find

    entry = find(outcome.name)
    found = outcome.to_dict()
    return {
        "name": found.pop("name"),
        "title": entry.title,
        "claim": entry.claim,
        "condition": definition(outcome.name).rule.condition or None,
        **found,
    }


def _result(outcome: Outcome, *, detailed: bool) -> RenderableType:
    """One experiment as people read it; alone, also its rule and all its numbers."""
    from rich.console import Group
    from rich.text import Text

    from headwise.lab import Verdict, definition, find

    entry, rule = find(outcome.name), definition(outcome.name).rule
    colour = {Verdict.HOLDS: "green", Verdict.CONDITION: "yellow", Verdict.FAILS: "red"}[outcome.verdict]
    verdict = outcome.verdict.value + (f": {rule.condition}" if outcome.verdict is Verdict.CONDITION else "")
    parts: list[RenderableType] = [
        Text(f"{entry.name}  ", style="bold").append(f"({outcome.seconds:.1f} s)", style="dim"),
        _indented(Text(entry.claim, style="italic")),
        _indented(Text("-> ").append(verdict, style=f"bold {colour}")),
        _indented(Text(outcome.finding)),
    ]
    if detailed:
        parts.append(_numbers(outcome))
    return Group(*parts, Text(""))


def _indented(text: Text) -> RenderableType:
    """Two blanks before every line, also of what is wrapped."""
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, 2))


def _numbers(outcome: Outcome) -> RenderableType:
    """The rule with what came out, then every quantity."""
    from rich.console import Group
    from rich.table import Table

    rule = Table("the rule", "threshold", "measured", "kept", box=None, pad_edge=False)
    for check in (*outcome.conditioned, *outcome.stated):
        rule.add_row(
            check.threshold.says,
            check.threshold.text().replace("`", ""),
            f"{check.value:.3g}",
            "yes" if check.kept else "no",
        )
    numbers = Table("quantity", "value", "what it is", box=None, pad_edge=False)
    for quantity in outcome.quantities.values():
        numbers.add_row(quantity.name, quantity.text(), quantity.meaning)
    return Group("", rule, "", numbers)

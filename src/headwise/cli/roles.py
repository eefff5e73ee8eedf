"""``headwise roles``: what heads do."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headwise.cli.data_options import READING, check, given, running, scan_options
from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from headwise.measures.roles import RoleTable
    from headwise.verbs.roles import RolesResult

__all__ = ["command"]

#: Heads that are listed for each role.
LISTED = 8


@click.command("roles", short_help="Find heads that follow a rule, with the evidence.", no_args_is_help=True)
@click.argument("model", metavar="MODEL")
@click.option("--role", multiple=True, metavar="NAME", help="Look for this role only. Repeatable.  [default: all]")
@click.option(
    "--rule",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="A rule of your own: a function from tokens to (query, key) pairs, or a Role. Repeatable.",
)
@click.option(
    "--conllu",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Syntactic heads and relations from a CoNLL-U file; its text is read where no other is given.",
)
@click.option("--unit", type=click.Choice(["sentence", "document"]), help="A passage of FILE.  [default: sentence]")
@click.option("--subtypes", is_flag=True, help="Keep nmod:poss apart from nmod.")
@click.option("--spacy", metavar="NAME", help="Syntactic heads and relations by an installed spaCy model.")
@click.option(
    "--pairs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A .jsonl file of given pairs, a passage a line; the role is called as the file. Repeatable.",
)
@click.option("--no-confirm", is_flag=True, help="Do not measure induction on repeated random tokens.")
@click.option("--margin", type=click.FloatRange(0, 1), help="Least excess of the share over the nulls.  [default: 0.1]")
@click.option("--replicates", type=click.IntRange(min=1), help="Of the bootstrap.  [default: 1000]")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="File to write, .json.")
@click.option("--overwrite", is_flag=True, help="Replace FILE.")
@scan_options((*READING, "backend"))
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Find the heads of MODEL that follow a rule: previous token, induction, syntactic head, ...

    For each role: the best head, how often its largest weight is on the key that the rule names, the best rule of
    position on the same rows, the same on shuffled pairs, and an interval over passages.

    \b
    headwise roles ./my-model --text book.txt --window 256
    headwise roles ./my-model --conllu treebank.conllu --role head --role dependent
    """
    _check(options)
    sink = Sink(settings)
    arguments = given(options)
    model = arguments.pop("model")
    named = [*arguments.pop("role", ()), *(_rule(one) for one in arguments.pop("rule", ()))]
    margin = arguments.pop("margin", None)
    arguments["confirm"] = not arguments.pop("no_confirm", False)
    with running(sink) as shown:
        from headwise.measures.roles import Criterion
        from headwise.verbs.roles import roles_run

        criterion = None if margin is None else Criterion(margin=margin)
        result = roles_run(model, roles=named or None, criterion=criterion, **arguments, **shown)
    _tell(sink, result)


def _check(options: dict[str, Any]) -> None:
    if options["conllu"] is None and options["unit"] is not None:
        raise click.UsageError("--unit is about a CoNLL-U file: it needs --conllu FILE.")
    if options["subtypes"] and options["conllu"] is None and options["spacy"] is None:
        raise click.UsageError("--subtypes is about relations: it needs --conllu FILE or --spacy NAME.")
    if options["conllu"] is not None and options["spacy"] is not None:
        raise click.UsageError("--conllu and --spacy are two parses of the same text: give one of them.")
    texts = options["text"] or options["sentence"] or options["inputs"] is not None
    stand_in = () if texts or options["conllu"] is None else (options["conllu"],)
    check({**options, "text": options["text"] or stand_in})


def _rule(named: str) -> Any:
    """The function or role that ``module:name`` means.

    Raises:
        click.UsageError: there is none.
    """
    module, _, name = named.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise click.UsageError(f"--rule {named}: write MODULE:FUNCTION, an importable module and a function of it.")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--rule {named}: there is no module {error.name!r}; is it on PYTHONPATH?") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"--rule {named}: {module} has no {name!r}.")
        found = getattr(found, part)
    return found


def _tell(sink: Sink, result: RolesResult) -> None:
    for kind in ("warning", "note"):
        for said in result.run.get(f"{kind}s", ()):
            sink.note(f"{kind}: {said}")
    if sink.json:
        path = None if result.path is None else str(result.path)
        sink.document({"run": result.run, "roles": result.table.to_document(), "file": path})
        return
    console = sink.console()
    for line in _page(result, console):
        console.print(line, crop=False)
    if result.path is not None:
        print(f"file: {result.path}", file=sink.stdout)


def _page(result: RolesResult, console: Console) -> Iterator[Any]:
    from rich.text import Text

    table, counts = result.table, result.run["counts"]
    yield Text(str(table.model), style="bold", no_wrap=True, overflow="ignore")
    yield Text(f"{counts['heads']} heads over {counts['passages']:,} passages, {counts['tokens']:,} tokens")
    yield Text("")
    yield _evidence(table, console)
    for role in table.roles:
        listed = table.assigned(role)
        if listed:
            some = ", ".join(f"{one.layer}.{one.head.head} ({one.share:.2f})" for one in listed[:LISTED])
            more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
            yield Text("")
            yield Text(f"{role}: {some}{more}")
    yield Text("")
    yield Text(
        "Heads are written layer.head. share: of the rows whose largest weight is on the role's key; by position: the "
        "best fixed offset (-2: two tokens back) or key on the same rows; shuffled: keys of other rows; heads: how "
        f"many have the role ({table.criterion}).",
        style="dim",
    )


def _evidence(table: RoleTable, console: Console) -> Table:
    """One line per role; wider than the console where it must be, since a number cut short says nothing."""
    from rich.measure import Measurement
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in (
        ("role", "left"), ("best", "left"), ("share", "right"), ("interval", "left"), ("by position", "left"),
        ("shuffled", "right"), ("rows", "right"), ("heads", "right"),
    ):  # fmt: skip
        grid.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for role in table.roles:
        best = table.best(role)
        fixed = f"{best.fixed_share:.2f} {_position(best.fixed)}" if best.fixed else "-"
        interval = f"{best.share_low:.2f}-{best.share_high:.2f}" if best.share_low == best.share_low else "-"
        count = sum(one.assigned for one in table[role])
        grid.add_row(
            role, f"{best.layer}.{best.head.head}", f"{best.share:.2f}", interval, fixed, f"{best.null_share:.2f}",
            f"{best.rows:,}", str(count) if count else "-", style="bold" if best.assigned else None,
        )  # fmt: skip
    grid.width = Measurement.get(console, console.options.update(max_width=1000), grid).maximum
    return grid


def _position(fixed: str) -> str:
    """A rule of position in short: ``-2`` for ``offset -2``, ``first`` for ``first key``."""
    return fixed.removeprefix("offset ").removesuffix(" key")

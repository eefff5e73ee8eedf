"""The group of verbs, and how a run of it ends.

A verb's module is imported when the verb is used (or listed), and imports what computes only when
it runs: ``headwise --help`` imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module

import click

from headwise.cli.failures import is_refusal, sentence
from headwise.cli.options import Settings, traceback_option, wants_traceback

__all__ = ["app", "run"]

#: Each verb and the module that holds its command, in the order in which help lists them.
VERBS: dict[str, str] = {
    "scan": "headwise.cli.scan",
    "importance": "headwise.cli.importance",
    "redundancy": "headwise.cli.redundancy",
    "roles": "headwise.cli.roles",
    "statistics": "headwise.cli.statistics",
    "plan": "headwise.cli.plan",
    "prune": "headwise.cli.prune",
    "verify": "headwise.cli.verify",
    "report": "headwise.cli.report",
    "cost": "headwise.cli.cost",
    "lab": "headwise.cli.lab",
}

PROGRAM = "headwise"
COMPLETE = "_HEADWISE_COMPLETE"


@dataclass(frozen=True)
class _Suggestion:
    """What a mistyped verb may have meant."""

    typed: str

    def message(self) -> str:
        from difflib import get_close_matches

        near = get_close_matches(self.typed, VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "the verbs are " + ", ".join(VERBS) + "."
        return f"there is no verb {self.typed!r}; {hint}"


class Verbs(click.Group):
    """A group that imports a verb's module when the verb is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The verbs, in the order in which a user meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of a verb, or None where there is no such verb."""
        if cmd_name not in VERBS:
            return None
        command = import_module(VERBS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that ``args`` begin with; a mistyped one is answered with the nearest."""
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            ctx.fail(_Suggestion(args[0]).message())
        return super().resolve_command(ctx, args)


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import headwise

        click.echo(f"{PROGRAM} {headwise.__version__}")
        ctx.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@traceback_option
def app() -> None:
    """Run, measure, prune and account for the attention heads of transformers.

    Results go to stdout, progress and notes to stderr. Exit status: 0 done, 1 refused or failed
    (one sentence says why), 2 wrong usage, 130 interrupted.
    """


def run(arguments: list[str]) -> int:
    """Run the command line once; return the exit status.

    ``KeyboardInterrupt`` and ``BrokenPipeError`` pass through to :func:`headwise.cli.main.main`.
    """
    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(app, {}, PROGRAM, COMPLETE, instruction)
    settings = Settings()
    try:
        with app.make_context(PROGRAM, arguments, obj=settings) as context:
            app.invoke(context)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as problem:
        problem.show()
        return problem.exit_code
    except BaseException as error:
        if isinstance(error, BrokenPipeError) or not is_refusal(error) or wants_traceback(settings):
            raise
        print(sentence(error), file=sys.stderr)
        return 1
    return 0

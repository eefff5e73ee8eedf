"""Options of verbs that run a model over data: those of ``headwise scan``, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from headwise.cli import scan
from headwise.cli.sink import Sink

__all__ = ["LOADING", "READING", "check", "check_weight", "given", "running", "scan_options", "weight_option"]

#: How data is read and how the model is loaded.
READING = (
    "text",
    "sentence",
    "inputs",
    "field",
    "target_field",
    "window",
    "max_length",
    "limit",
    "batch_size",
    "device",
    "dtype",
    "seed",
    "revision",
    "allow_pickle",
    "trust_remote_code",
)

#: How a model is loaded.
LOADING = ("device", "dtype", "revision", "allow_pickle", "trust_remote_code")


def weight_option(function: Any) -> Any:
    """Give a command ``--weight``, which goes with ``--text``."""
    return click.option(
        "--weight",
        multiple=True,
        type=click.FloatRange(min=0, min_open=True),
        metavar="W",
        help="What each --text counts, in their order. Repeatable.  [default: its length]",
    )(function)


def check_weight(options: dict[str, Any]) -> None:
    """Refuse weights that are not one for every text."""
    if options["weight"] and (len(options["weight"]) != len(options["text"]) or options["sentence"]):
        raise click.UsageError("give --weight once for every --text (and no --sentence), or not at all.")


def scan_options(names: Sequence[str]) -> Callable[[Any], Any]:
    """Give a command the options of ``scan`` of these names, as they stand there."""
    known = {option.name: option for option in scan.command.params}

    def decorate(function: Any) -> Any:
        function.__click_params__ = [
            *(known[name] for name in reversed(names)),
            *getattr(function, "__click_params__", []),
        ]
        return function

    return decorate


def check(options: dict[str, Any]) -> None:
    """Refuse combinations of options that cannot be meant; see :func:`headwise.cli.scan.check`."""
    scan.check({"overwrite": False, "output": None, **options})


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a verb: what was given, with texts and sentences as its texts."""
    kept = {name: value for name, value in options.items() if value is not None and value is not False and value != ()}
    sources = [*kept.pop("text", ()), *kept.pop("sentence", ())]
    return {**kept, "texts": sources} if sources else kept


@contextmanager
def running(sink: Sink) -> Iterator[dict[str, Any]]:
    """The progress bar and the notes, as a verb takes them."""
    with sink.warnings_as_notes(), sink.progress() as bar:
        yield {"progress": bar, "notice": sink.note}

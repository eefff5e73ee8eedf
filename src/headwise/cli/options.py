"""Options that every verb takes, and where their values are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

__all__ = ["Settings", "output_options", "traceback_option", "wants_traceback"]

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Settings:
    """What the whole run of the command line goes by; one per run, the context's object."""

    traceback: bool = False
    json: bool = False
    quiet: bool = False


def _keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Store a flag in the run's settings instead of handing it to the verb."""
    settings = ctx.ensure_object(Settings)
    assert param.name is not None
    if value:
        setattr(settings, param.name, True)


def traceback_option(function: Function) -> Function:
    """``--traceback``, on the group and on every verb."""
    return click.option(
        "--traceback",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_keep,
        help="Show the traceback of an error, not only its sentence (also: HEADWISE_TRACEBACK=1).",
    )(function)


def output_options(function: Function) -> Function:
    """``--json``, ``--quiet`` and ``--traceback``."""
    options = [
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="Print one JSON document to stdout and nothing else there.",
        ),
        click.option(
            "--quiet",
            "-q",
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="No progress, no notes.",
        ),
        traceback_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function


def wants_traceback(settings: Settings) -> bool:
    """Whether an error of the user's making shows its traceback."""
    return settings.traceback or os.environ.get("HEADWISE_TRACEBACK", "") not in ("", "0")

"""The one output sink: results to stdout, progress and notes to stderr."""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from headwise.cli.options import Settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Bar", "Sink"]

#: Width of what is printed where there is no terminal to ask.
PLAIN_WIDTH = 80


class Bar:
    """A progress bar on stderr, or nothing where stderr is no terminal.

    Called as ``bar(done, total, stage)``; a total of None is an unknown one.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}

    def __call__(self, done: int, total: int | None = None, stage: str = "") -> None:
        """Show ``done`` of ``total`` steps of ``stage``."""
        if self._progress is None:
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


class Sink:
    """Where a verb's words go.

    Attributes:
        json: results are one JSON document.
        quiet: no progress and no notes.
    """

    def __init__(self, settings: Settings, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.json = settings.json
        self.quiet = settings.quiet
        self._stdout = stdout
        self._stderr = stderr
        self._told: set[str] = set()

    @property
    def stdout(self) -> TextIO:
        """The stream of results."""
        return sys.stdout if self._stdout is None else self._stdout

    @property
    def stderr(self) -> TextIO:
        """The stream of progress and notes."""
        return sys.stderr if self._stderr is None else self._stderr

    def console(self, plain_width: int = PLAIN_WIDTH) -> Console:
        """A console on stdout: colour on a terminal (unless NO_COLOR is set), plain text elsewhere."""
        from rich.console import Console

        if isinstance(self.stdout, io.TextIOWrapper):  # a name that is no UTF-8 is shown with escapes
            self.stdout.reconfigure(errors="backslashreplace")
        width = None if self.stdout.isatty() else plain_width
        return Console(file=self.stdout, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)

    def document(self, document: Mapping[str, Any]) -> None:
        """Print one JSON document; NaN and infinities, which JSON does not know, become null."""
        text = json.dumps(_plain(document), allow_nan=False, ensure_ascii=False, indent=2)
        try:
            print(text, file=self.stdout)
        except UnicodeEncodeError:
            print(json.dumps(_plain(document), allow_nan=False, indent=2), file=self.stdout)

    def line(self, text: str) -> None:
        """Print one line; what the stream cannot hold is shown with escapes."""
        try:
            print(text, file=self.stdout)
        except UnicodeEncodeError:
            encoding = self.stdout.encoding or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=self.stdout)

    def note(self, text: str) -> None:
        """Say something once on stderr."""
        line = "headwise: " + " ".join(text.split())
        if not self.quiet and line not in self._told:
            self._told.add(line)
            print(line, file=self.stderr, flush=True)

    @contextmanager
    def progress(self) -> Iterator[Bar]:
        """A bar while the block runs; it draws only on a terminal."""
        if self.quiet or not self.stderr.isatty():
            yield Bar(None)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=Console(file=self.stderr), transient=True) as progress:
            yield Bar(progress)

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        """Tell Python warnings of the block in one line each, without file names of libraries."""
        with warnings.catch_warnings():

            def show(message: Warning | str, *_where: object, **_more: object) -> None:
                self.note(f"warning: {message}")

            warnings.showwarning = show
            yield


def _plain(value: Any) -> Any:
    """``value`` in the types of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)

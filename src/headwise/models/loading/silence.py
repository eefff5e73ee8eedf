"""Loading without a word on the terminal: what the libraries say becomes notes."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Final

__all__ = ["silenced"]

_LIBRARIES: Final = ("transformers", "huggingface_hub", "accelerate", "gguf")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
#: said in other words by the loader itself, or about image processors that nobody asked for
_DROPPED: Final = ("LOAD REPORT", "requires torchvision (not installed)", "This checkpoint seem corrupted")
_BAR: Final = re.compile(r"\r|\d+%\|")
_LONGEST: Final = 300


class _Keeper(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(record.getMessage())


@contextmanager
def silenced() -> Iterator[list[str]]:
    """Nothing is printed inside; the list that is given fills with the warnings, one line each, when it ends.

    Loggers (level, handlers, propagation), progress bars, the warning filters and the standard streams are
    as before on every exit.
    """
    heard: list[str] = []
    notes: list[str] = []
    out, err = io.StringIO(), io.StringIO()
    try:
        with ExitStack() as stack:
            stack.enter_context(_loggers(heard))
            stack.enter_context(_bars())
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            yield notes
        heard += [
            str(one.message) for one in caught if not issubclass(one.category, DeprecationWarning | ImportWarning)
        ]
        heard += [line for text in (out, err) for line in text.getvalue().split("\n") if not _BAR.search(line)]
    finally:
        notes += _sentences(heard)


def _sentences(heard: list[str]) -> list[str]:
    found: list[str] = []
    for text in heard:
        line = " ".join(_COLOUR.sub("", text).split())
        if line and not any(dropped in line for dropped in _DROPPED):
            line = line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
            found.append(line)
    return list(dict.fromkeys(found))


@contextmanager
def _loggers(heard: list[str]) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    before = [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    keeper = _Keeper(heard)
    try:
        for logger in loggers:
            logger.handlers = [keeper]
            logger.propagate = False
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers = handlers
            logger.propagate = propagate


@contextmanager
def _bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as library

    shown, hub_hidden = library.is_progress_bar_enabled(), are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.disable_progress_bar()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if shown:
                library.enable_progress_bar()
            (disable_progress_bars if hub_hidden else enable_progress_bars)()

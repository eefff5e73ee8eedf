"""The entry point: runs the command line and turns what stopped it into an exit status.

=====  =================================================================================
 0     done (also when the reader of a pipe had enough)
 1     refused or failed: one sentence on stderr; a defect keeps its traceback
 2     wrong usage
 130   interrupted (Ctrl-C)
=====  =================================================================================

This module imports nothing heavy, so that Ctrl-C is answered from the first moment on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

__all__ = ["main"]

INTERRUPTED = 130


@dataclass
class _Interrupt:
    """Whether Ctrl-C came.

    A library that is interrupted in the middle of its own start may turn the interrupt into an
    error of its own; the flag tells the two apart.
    """

    came: bool = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``headwise`` with ``arguments`` (default: those of the process); return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with _watch_interrupt() as interrupt:
        try:
            return _answer(arguments)
        except KeyboardInterrupt:
            return _interrupted()
        except BrokenPipeError:
            return _reader_gone()
        except BaseException:
            if interrupt.came:
                return _interrupted()
            raise


def _answer(arguments: list[str]) -> int:
    """Run the verb and flush, so that a full disk or a closed pipe is noticed here."""
    from headwise.cli.app import run

    status = run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from headwise.cli.failures import sentence

        _discard_stdout()
        print(sentence(error), file=sys.stderr)
        return 1
    return status


@contextmanager
def _watch_interrupt() -> Iterator[_Interrupt]:
    """Note Ctrl-C while the block runs; an ignored SIGINT stays ignored."""
    interrupt = _Interrupt()
    watching = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, interrupt)
            watching = True
    try:
        yield interrupt
    finally:
        if watching:
            signal.signal(signal.SIGINT, signal.SIG_DFL if interrupt.came else signal.default_int_handler)


def _interrupted() -> int:
    with suppress(OSError, ValueError):
        print("headwise: interrupted; nothing was saved", file=sys.stderr, flush=True)
    return INTERRUPTED


def _reader_gone() -> int:
    """The reader of a pipe closed it: stop writing, quietly."""
    _discard_stdout()
    return 0


def _discard_stdout() -> None:
    """Send what is still buffered for stdout nowhere, so that the interpreter's own flush cannot fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

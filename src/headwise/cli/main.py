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

import signal
import sys

from headwise import saved

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

__all__ = ["main"]

INTERRUPTED = 130


class _Interrupt:
    """Notes Ctrl-C while a block runs; an ignored SIGINT stays ignored.

    A library that is interrupted in the middle of its own start may turn the interrupt into an error of its own;
    ``came`` tells the two apart.
    """

    def __init__(self) -> None:
        self.came = False
        self._watching = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def __enter__(self) -> _Interrupt:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self)
                self._watching = True
            except ValueError:  # not the main thread
                self._watching = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching:
            signal.signal(signal.SIGINT, signal.SIG_DFL if self.came else signal.default_int_handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``headwise`` with ``arguments`` (default: those of the process); return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    saved.forget()
    with _Interrupt() as interrupt:
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


def _open_closed_streams() -> None:
    """Put nothing in the place of a standard stream that was closed (``>&-``), before a file takes its number."""
    import os

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8", errors="backslashreplace"))
            if name == "stdout" and sys.stderr is not None:
                print("headwise: stdout is closed, so results are not shown", file=sys.stderr)


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


def _interrupted() -> int:
    """Say so; and undo that Python ends by the signal itself, instead of by our status, after ``python -m headwise``.

    It does so where Ctrl-C came while a string was being executed (data classes do that, so every import may), although
    the interrupt was caught. Executing another string, empty, takes the note away.
    """
    from contextlib import suppress

    exec("")
    there = saved.so_far()
    what = f"{', '.join(there)} had been saved" if there else "nothing was saved"
    with suppress(OSError, ValueError):
        print(f"headwise: interrupted; {what}", file=sys.stderr, flush=True)
    return INTERRUPTED


def _reader_gone() -> int:
    """The reader of a pipe closed it: stop writing, quietly."""
    _discard_stdout()
    return 0


def _discard_stdout() -> None:
    """Send what is still buffered for stdout nowhere, so that the interpreter's own flush cannot fail."""
    import os
    from contextlib import suppress

    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

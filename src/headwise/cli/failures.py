"""The table from errors to sentences.

Everything listed here is of the user's world (a refusal, a file, the memory of the machine) and
becomes one sentence and exit status 1. What is not listed is a defect and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from headwise.errors import HeadwiseError

__all__ = ["is_refusal", "sentence"]

Describe = Callable[[BaseException], str]


def is_refusal(error: BaseException) -> bool:
    """Whether ``error`` is told in one sentence rather than by its traceback."""
    return _describe(error) is not None


def sentence(error: BaseException) -> str:
    """``headwise: `` and what ``error`` says, in one line.

    Example:
        >>> from headwise.errors import InputError
        >>> sentence(InputError("keep must lie in (0, 1], got 2.0"))
        'headwise: keep must lie in (0, 1], got 2.0'
    """
    describe = _describe(error)
    text = str(error) if describe is None else describe(error)
    return "headwise: " + (" ".join(text.split()) or type(error).__name__)


def _describe(error: BaseException) -> Describe | None:
    for matches, describe in TABLE:
        if matches(error):
            return describe
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Memory of the machine or of its accelerator, as Python and torch report it."""
    if isinstance(error, MemoryError):
        return True
    kind = type(error)
    if kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] == "torch":
        return True
    return kind is RuntimeError and "DefaultCPUAllocator" in str(error)


def _memory_sentence(_error: BaseException) -> str:
    return "out of memory; use a smaller --batch-size, or cut the passages with --window or --max-length"


def _file_sentence(error: BaseException) -> str:
    """The operating system's words and the file, without the error number."""
    assert isinstance(error, OSError)
    if error.errno is None or error.strerror is None:
        return str(error)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    words = os.strerror(error.errno) if error.errno in errno.errorcode else error.strerror
    return ": ".join([" -> ".join(names), words]) if names else words


#: Which errors are told in a sentence, and how; the first that matches counts.
TABLE: tuple[tuple[Callable[[BaseException], bool], Describe], ...] = (
    (lambda error: isinstance(error, HeadwiseError), str),
    (_is_out_of_memory, _memory_sentence),
    (lambda error: isinstance(error, OSError), _file_sentence),
)

"""Plain text: one passage a line, blank-line separated paragraphs, or the file as one document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from headwise.data.files import decoded_lines

__all__ = ["SPLITS", "read_plain"]

SPLITS: Final = ("line", "paragraph", "file")
_LOOK: Final = 1000
_LONGEST_PARAGRAPH: Final = 20
#: a document that is cut into windows reaches the tokenizer in pieces of about so many characters, cut at line ends
PIECE: Final = 1 << 20

Row = tuple[str, str | None, str, bool]


def read_plain(
    path: Path, split: str | None, *, pieces: bool = False
) -> tuple[Path, str, Callable[[], Iterator[Row]], str | None]:
    """How ``path`` will be read: (path, format, start, note); with ``pieces`` as one document in several pieces."""
    how = "pieces" if pieces else split or _guess(path)
    readers = {"line": _lines, "paragraph": _paragraphs, "file": _whole, "pieces": _pieces}
    note = None
    if split is None and not pieces:
        said = {"line": "one passage a line", "paragraph": "paragraphs separated by blank lines"}[how]
        note = f"{path.name}: read as {said}"
    else:
        next(decoded_lines(path), None)
    return path, f"txt ({'file' if pieces else how})", lambda: readers[how](path), note


def _guess(path: Path) -> str:
    blocks, lines, inside = 0, 0, False
    for _, line in islice(decoded_lines(path), _LOOK):
        if line.strip():
            lines += 1
            blocks += not inside
            inside = True
        else:
            inside = False
    separated = blocks > 1 and lines > blocks and lines <= _LONGEST_PARAGRAPH * blocks
    return "paragraph" if separated else "line"


def _lines(path: Path) -> Iterator[Row]:
    for number, line in decoded_lines(path):
        if line.strip():
            yield line, None, f"{path.name} line {number}", False


def _paragraphs(path: Path) -> Iterator[Row]:
    held: list[str] = []
    first = 0
    for number, line in decoded_lines(path):
        if line.strip():
            first = first if held else number
            held.append(line)
        elif held:
            yield "\n".join(held), None, f"{path.name} line {first}", False
            held = []
    if held:
        yield "\n".join(held), None, f"{path.name} line {first}", False


def _whole(path: Path) -> Iterator[Row]:
    yield "\n".join(line for _, line in decoded_lines(path)), None, path.name, False


def _pieces(path: Path) -> Iterator[Row]:
    held: list[str] = []
    size = 0
    more = False
    for _, line in decoded_lines(path):
        held.append(line + "\n")
        size += len(line) + 1
        if size >= PIECE:
            yield "".join(held), None, path.name, more
            held, size, more = [], 0, True
    if held:
        yield "".join(held), None, path.name, more

"""Passages of text: from a file, from strings, from anything that gives strings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from headwise.data import tables
from headwise.data.files import check_file, inner_suffix, sha256_of
from headwise.data.memory import restartable
from headwise.data.plain import SPLITS, read_plain
from headwise.errors import DataError, InputError

__all__ = ["Passage", "Passages", "as_passages", "read_passages"]

FORMATS: Final = ("txt", "jsonl", "csv", "tsv", "parquet")
_BY_SUFFIX: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_NAMES: Final = (".txt", *_BY_SUFFIX)
_NOT_TEXT: Final = {
    ".json": "is one JSON document; write one JSON object a line and name it .jsonl",
    ".safetensors": "holds tensors, not text; give it as ready inputs (--inputs, or read_inputs)",
    ".bin": "holds no text",
    ".gguf": "is a model, not text",
    ".npz": "holds arrays, not text",
    ".pt": "holds tensors, not text",
    ".pdf": "is a PDF; extract its text to a .txt file first",
    ".docx": "is a Word document; save it as a .txt file first",
    ".xlsx": "is a spreadsheet; save it as .csv first",
    ".zst": "is compressed in a way that is not read here; unpack it first, or use .gz",
    ".zip": "is an archive; unpack it first",
}


@dataclass(frozen=True)
class Passage:
    """One text.

    Attributes:
        text: the text itself.
        target: what the decoder of an encoder-decoder model reads, or None.
        where: where it stands, for messages: ``"a.txt line 3"``.
        continues: this text continues the document of the passage before it (only where documents are cut into
            windows).
    """

    text: str
    target: str | None = None
    where: str = ""
    continues: bool = False


@dataclass(frozen=True)
class Passages:
    """Texts that can be gone through again and again, and where they come from.

    Attributes:
        open: gives the passages from the start; files are read piece by piece.
        window: cut each document into windows of this many tokens, special tokens included; None: leave passages whole.
        limit: stop after so many passages (windows, with ``window``); None: all.
        files: for each file its path, format and SHA-256.
        notes: how the files were understood, one sentence each.
    """

    open: Callable[[], Iterator[Passage]]
    window: int | None = None
    limit: int | None = None
    files: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[Passage]:
        found = self.open()
        limit = None if self.limit is None else min(self.limit, sys.maxsize)
        return found if self.window is not None else islice(found, limit)


def read_passages(
    path: str | Path | Sequence[str | Path],
    *,
    window: int | None = None,
    field: str | None = None,
    target_field: str | None = None,
    limit: int | None = None,
    format: str | None = None,
    split: str | None = None,
) -> Passages:
    """Open one file of text, or several as if joined.

    A ``.txt`` file (and any file of unknown suffix) is read as *paragraphs* when blank lines cut its first thousand
    lines into blocks of on average at most 20 lines and at least one block has two lines; otherwise *one passage a
    line*. ``split`` overrides this. The lines of a paragraph stay separate lines of one passage. With ``window`` the
    whole file is one document and windows run across line breaks. Compressed files (.gz, .bz2, .xz) are unpacked on
    the way.

    Args:
        path: .txt, .jsonl, .csv, .tsv or .parquet; or a list of such files.
        window: cut into windows of so many tokens, special tokens included; the last one may be shorter.
        field: column or key that holds the text; default ``"text"``, or the only column of a table.
        target_field: column or key of the decoder's text, for encoder-decoder models.
        limit: use only the first so many passages (or windows).
        format: one of "txt", "jsonl", "csv", "tsv", "parquet"; default by suffix.
        split: for .txt: ``"line"``, ``"paragraph"`` or ``"file"``.

    Raises:
        DataError: a file is missing, empty, binary, not UTF-8 or not of its format. What only shows further down in a
            file is raised while its passages are read.
        InputError: an argument has a value that its rule does not allow.
    """
    _check_counts(window=window, limit=limit)
    if format is not None and format not in FORMATS:
        raise InputError(f"format must be one of {', '.join(FORMATS)}, and is {format!r}")
    if split is not None and split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}, and is {split!r}")
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise InputError("path is an empty list of files; name at least one")
    opened = [_open_one(Path(one), window, field, target_field, format, split) for one in paths]
    files = tuple({"path": str(source), "format": kind, "sha256": sha256_of(source)} for source, kind, _, _ in opened)
    notes = tuple(note for *_, note in opened if note)

    def everything() -> Iterator[Passage]:
        for _, _, start, _ in opened:
            yield from (Passage(*row) for row in start())

    return Passages(everything, window=window, limit=limit, files=files, notes=notes)


def _open_one(
    path: Path, window: int | None, field: str | None, target: str | None, format: str | None, split: str | None
) -> tuple[Path, str, Callable[[], Iterator[tables.Row]], str | None]:
    path = check_file(path)
    suffix = inner_suffix(path)
    if format is None and suffix in _NOT_TEXT:
        raise DataError(f"{path}: {_NOT_TEXT[suffix]}")
    kind = format or _BY_SUFFIX.get(suffix, "txt")
    if kind == "txt":
        if field is not None or target is not None:
            raise InputError(
                f"{path}: a .txt file has no fields, and field={field or target!r} was given; leave it out"
            )
        return read_plain(path, split, pieces=window is not None and split in (None, "file"))
    if split is not None:
        raise InputError(f"{path}: split={split!r} is for .txt files, and this is {kind}; leave it out")
    start = tables.reader(path, kind, field, target)
    return path, kind, start, None


def as_passages(source: Any, *, window: int | None = None, limit: int | None = None) -> Passages:
    """Passages from a path, a list of strings, or anything that gives strings.

    A ``str`` is taken as the path of an existing file, a ``Path`` always as a path. One sentence is given as a list
    of one.

    Raises:
        InputError: not strings, a ``str`` that is no existing file, or one in a list that is the name of one.

    >>> [passage.text for passage in as_passages(["one", "two"])]
    ['one', 'two']
    """
    _check_counts(window=window, limit=limit)
    if isinstance(source, Passages):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and _is_file(source)):
        return read_passages(source, window=window, limit=limit)
    if isinstance(source, str):
        raise InputError(
            f"texts is the string {_short(source)}, which is not an existing file; give a list of strings ([text] "
            "for one "
            f"sentence) or the path of a file"
        )
    if isinstance(source, bytes) or not isinstance(source, Iterable):
        raise InputError(f"texts must be a list of strings, and is a {type(source).__name__}")
    items = restartable(source, "texts")

    def start() -> Iterator[Passage]:
        for index, text in enumerate(items()):
            yield _passage(index, text)

    return Passages(start, window=window, limit=limit)


def _passage(index: int, text: Any) -> Passage:
    where = f"passage {index} (counted from 0)"
    if isinstance(text, str):
        if text.endswith(_NAMES) and _is_file(text):
            raise InputError(
                f"texts: {where} is {_short(text)}, the name of a file; in a list a string is the text itself, so give "
                "Path(...) for the file, or the name alone for one file"
            )
        return Passage(text, None, where)
    if isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text):
        return Passage(text[0], text[1], where)
    raise InputError(
        f"texts: {where} is a {type(text).__name__}, and a string is needed (or a pair of strings, text and "
        "decoder text)"
    )


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, ValueError):
        return False


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} must be a whole number of at least 1, and is {value!r}")

"""Opening files of text: what is there, is it text, which line is wrong."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

from headwise.errors import DataError

__all__ = ["check_file", "decoded_lines", "inner_suffix", "open_bytes", "sha256_of"]

_COMPRESSED: Final[dict[str, Callable[..., Any]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

#: what the first bytes say, for files that are no text
_MAGIC: Final = (
    (b"PAR1", "a parquet file; name it .parquet"),
    (b"\x1f\x8b", "gzip-compressed; name it .gz"),
    (b"PK\x03\x04", "a zip archive (or a .docx, .xlsx or .pt file)"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first"),
    (b"BZh", "bzip2-compressed; name it .bz2"),
    (b"\xfd7zXZ", "xz-compressed; name it .xz"),
    (b"GGUF", "a GGUF model"),
    (b"RIFF", "audio or video"),
)
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
_UTF32: Final = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_BROKEN: Final = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def check_file(path: str | Path) -> Path:
    """The path of an existing, readable, non-empty file.

    Raises:
        DataError: nothing there, a folder, no permission, or no bytes.
    """
    path = Path(path).expanduser()
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; check the path{_near(path)}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None
    if path.is_dir():
        raise DataError(f"{path}: is a folder, and one file is needed; name a file in it{_inside(path)}")
    if not path.is_file():
        raise DataError(
            f"{path}: is a pipe or a device, and files are read more than once; save it to a file and give that"
        )
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    if size == 0:
        raise DataError(f"{path}: is empty (0 bytes); give a file with text in it")
    return path


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (its folder {folder} does not exist either)"
    stem = path.stem.lower()
    near = sorted(other.name for other in folder.iterdir() if other.is_file() and other.stem.lower() == stem)
    return f" (beside it there is {', '.join(near[:3])})" if near else ""


def _inside(path: Path) -> str:
    names = sorted(
        child.name
        for child in path.iterdir()
        if child.suffix in (".txt", ".jsonl", ".csv", ".parquet", ".safetensors") and child.is_file()
    )
    return f", such as {', '.join(names[:3])}" if names else ""


def inner_suffix(path: Path) -> str:
    """The suffix that tells the format, below a compression suffix: ``"a.txt.gz"`` -> ``".txt"``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked where its name ends in .gz, .bz2 or .xz.

    Raises:
        DataError: the compressed file is damaged or cut off.
    """
    opener = _COMPRESSED.get(path.suffix.lower())
    if opener is None:
        with path.open("rb") as stream:
            yield stream
        return
    try:
        with opener(path, "rb") as packed:
            yield cast("IO[bytes]", packed)
    except (*_BROKEN, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile) and error.errno is not None:
            raise
        raise DataError(
            f"{path}: cannot be unpacked ({error}); the file is damaged, cut off, or not {path.suffix}"
        ) from None


def sha256_of(path: Path) -> str:
    """SHA-256 of the file as it lies on disk, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def decoded_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its line end), decoded as UTF-8 with or without a byte order mark.

    Lines end in LF, CRLF or CR.

    Raises:
        DataError: the file is binary, or a line is not UTF-8.
    """
    with open_bytes(path) as raw:
        buffered = io.BufferedReader(cast("io.RawIOBase", raw)) if not hasattr(raw, "peek") else raw
        head = cast("io.BufferedReader", buffered).peek(4096)[:4096]
        _refuse_binary(path, head)
        number = 0
        for piece in buffered:
            if number == 0:
                piece = piece.removeprefix(b"\xef\xbb\xbf")
            if b"\x00" in piece:
                raise DataError(
                    f"{path}: line {number + 1} holds a zero byte, so this is binary data; give a UTF-8 text file"
                )
            text = _decode(path, number + 1, piece)
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                yield number, line


def _decode(path: Path, number: int, piece: bytes) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: line {number} is not UTF-8 (byte 0x{piece[error.start]:02x} at column {error.start + 1}); "
            "convert the "
            f"file first, for example with `iconv -f WINDOWS-1252 -t UTF-8` if it is Western European"
        ) from None


def _one_in_four(head: bytes) -> bool:
    """Whether each group of four bytes holds one character of ASCII and three zeros, in one order."""
    return any(
        head[at::4].isascii()
        and 0 not in head[at::4]
        and not any(head[3 - at :: 4])
        and not any(head[1::4])
        and not any(head[2::4])
        for at in (0, 3)
    )


def _refuse_binary(path: Path, head: bytes) -> None:
    for magic, what in _MAGIC:
        if head.startswith(magic):
            raise DataError(f"{path}: is binary data, {what}; give a UTF-8 text file")
    if head.startswith(_UTF32) or (len(head) >= 8 and len(head) % 4 == 0 and _one_in_four(head)):
        raise DataError(f"{path}: is UTF-32, and UTF-8 is needed; convert it with `iconv -f UTF-32 -t UTF-8`")
    if head.startswith(_UTF16) or (len(head) >= 4 and head[1::2].count(0) > len(head) // 4):
        raise DataError(f"{path}: is UTF-16, and UTF-8 is needed; convert it with `iconv -f UTF-16 -t UTF-8`")
    if b"\x00" in head:
        raise DataError(f"{path}: is binary data (it holds zero bytes); give a UTF-8 text file")

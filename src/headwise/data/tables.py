"""Tables of text: .jsonl, .csv, .tsv and .parquet, read piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from headwise.data.files import decoded_lines, open_bytes
from headwise.errors import DataError

__all__ = ["Row", "json_objects", "reader"]

#: text, decoder text or None, where it stands, whether it continues the document of the row before
Row = tuple[str, str | None, str, bool]

_ROWS_AT_ONCE: Final = 4096


def reader(path: Path, kind: str, field: str | None, target: str | None) -> Callable[[], Iterator[Row]]:
    """A function that reads the table from the start. Fields are checked at once, rows as they come."""

    def start() -> Iterator[Row]:
        if kind == "jsonl":
            return _jsonl(path, field, target)
        if kind == "parquet":
            return _parquet(path, field, target)
        return _csv(path, "\t" if kind == "tsv" else ",", field, target)

    next(start(), None)
    return start


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file with one JSON object a line; blank lines are skipped."""
    for number, line in decoded_lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            whole = " (a file that is one JSON document must be rewritten, one object a line)" if number == 1 else ""
            raise DataError(
                f"{path}: line {number} is not valid JSON: {error.msg} at column {error.colno}{whole}"
            ) from None
        except RecursionError:
            raise DataError(f"{path}: line {number} is JSON nested too deeply to be read") from None
        except ValueError:
            raise DataError(
                f"{path}: line {number} holds a number with too many digits to be read; write numbers that fit 64 bits"
            ) from None
        if not isinstance(value, dict):
            raise DataError(
                f'{path}: line {number} is a JSON {_kind(value)}, and an object such as {{"text": "..."}} is needed'
            )
        yield number, value


def _jsonl(path: Path, field: str | None, target: str | None) -> Iterator[Row]:
    name = field or "text"
    for number, row in json_objects(path):
        where = f"{path.name} line {number}"
        texts = [_text_of(path, number, row, key) for key in (name, target) if key is not None]
        yield texts[0], texts[1] if target is not None else None, where, False


def _text_of(path: Path, number: int, row: dict[str, Any], key: str) -> str:
    if key not in row:
        ready = "; input_ids are given as ready inputs (--inputs, or read_inputs)" if "input_ids" in row else ""
        choose = "; choose one with field= (--field)" if row and not ready else ""
        raise DataError(f"{path}: line {number} has no field {key!r}; it has {_listed(list(row))}{ready or choose}")
    value = row[key]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{path}: field {key!r} of line {number} is a {_kind(value)}, not text; name a field that holds text"
        )
    return value


def _choose(path: Path, names: Sequence[str], field: str | None) -> str:
    if field is None and len(names) == 1 and "text" not in names:
        return names[0]
    wanted = field or "text"
    if wanted not in names:
        raise DataError(f"{path}: has no column {wanted!r}; it has {_listed(names)}; choose one with field= (--field)")
    return wanted


def _csv(path: Path, separator: str, field: str | None, target: str | None) -> Iterator[Row]:
    import pandas as pd

    next(decoded_lines(path), None)
    with open_bytes(path) as stream:
        try:
            pieces = pd.read_csv(
                cast("Any", _Checked(stream, path)),
                sep=separator,
                dtype=str,
                keep_default_na=False,
                encoding="utf-8-sig",
                chunksize=_ROWS_AT_ONCE,
            )
            number = 0
            for piece in pieces:
                names = [str(name) for name in piece.columns]
                if not isinstance(piece.index, pd.RangeIndex):  # pandas takes surplus leading fields for row labels
                    raise DataError(
                        f"{path}: its rows have more fields than the header names columns ({_listed(names)}); put "
                        'quotes around a text that holds the separator ("the cat, sat")'
                    )
                text = _choose(path, names, field)
                wanted = [text] if target is None else [text, _choose(path, names, target)]
                if number == 0:
                    for name in wanted:
                        _refuse_numbers(path, name, piece[name].tolist())
                for values in zip(*(piece[name].tolist() for name in wanted), strict=True):
                    number += 1
                    yield values[0], values[1] if target is not None else None, f"{path.name} row {number}", False
        except pd.errors.EmptyDataError:
            raise DataError(f"{path}: holds no table (no header line); the first line must name the columns") from None
        except pd.errors.ParserError as error:
            said = str(error).removeprefix("Error tokenizing data. C error: ").strip()
            raise DataError(
                f"{path}: is not valid {path.suffix.lstrip('.') or 'csv'}: {said}; quote fields that hold the separator"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: is not UTF-8 ({error.reason}); convert it first, for example with iconv"
            ) from None


class _Checked:
    """A stream of bytes that refuses zero bytes, which the CSV reader would take for an end."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path = stream, path

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes."""
        held = self._stream.read(size)
        if b"\x00" in held:
            raise DataError(f"{self._path}: holds a zero byte, so this is binary data; give a UTF-8 text file")
        return held

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)


def _refuse_numbers(path: Path, name: str, values: Sequence[str]) -> None:
    filled = [value for value in values if value.strip()]
    if filled and all(_is_number(value) for value in filled):
        raise DataError(
            f"{path}: column {name!r} holds numbers (such as {filled[0]}), not text; choose another with field="
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet(path: Path, field: str | None, target: str | None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            schema = table.schema_arrow
            text = _choose(path, schema.names, field)
            wanted = [text] if target is None else [text, _choose(path, schema.names, target)]
            for name in wanted:
                kind = schema.field(name).type
                kind = kind.value_type if pa.types.is_dictionary(kind) else kind
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                    raise DataError(f"{path}: column {name!r} is of type {kind}, not text; choose another with field=")
            number = 0
            for piece in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
                for values in zip(*(piece.column(name).to_pylist() for name in wanted), strict=True):
                    number += 1
                    yield (
                        values[0] or "",
                        (values[1] or "") if target is not None else None,
                        f"{path.name} row {number}",
                        False,
                    )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{path}: is not a readable parquet file ({error}); it is damaged, cut off, or something else"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read as parquet ({error}); it is damaged or cut off") from None


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return (shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "no fields"

"""Strict JSON: the same document always gives the same bytes, and nothing loose is read.

Written: UTF-8 (ASCII with escapes), keys sorted, two spaces of indent, lists of plain values on one
line, floats as ``repr`` gives them (they read back exactly), a newline at the end. Refused on both
sides: NaN and infinities, numbers that overflow, a key twice, what is not UTF-8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

_PLAIN = (str, int, float, bool, type(None))


def encode(document: Mapping[str, Any]) -> bytes:
    """The document's bytes; ``ValueError`` names the place of a value that JSON cannot hold."""
    pieces: list[str] = []
    _write(document, "", "$", pieces)
    pieces.append("\n")
    return "".join(pieces).encode("ascii")


def _write(value: Any, indent: str, where: str, out: list[str]) -> None:
    if isinstance(value, Mapping):
        _write_object(value, indent, where, out)
    elif isinstance(value, (list, tuple)):
        if all(isinstance(item, _PLAIN) for item in value):
            out.append(f"[{', '.join([_scalar(item, where) for item in value])}]")
        else:
            inner = indent + "  "
            for at, item in enumerate(value):
                out.append(f"{'[' if at == 0 else ','}\n{inner}")
                _write(item, inner, f"{where}[{at}]", out)
            out.append(f"\n{indent}]")
    else:
        out.append(_scalar(value, where))


def _write_object(value: Mapping[Any, Any], indent: str, where: str, out: list[str]) -> None:
    odd = [key for key in value if not isinstance(key, str)]
    if odd:
        raise ValueError(f"{where} has the key {odd[0]!r}; keys are strings")
    if not value:
        out.append("{}")
        return
    inner = indent + "  "
    for at, key in enumerate(sorted(value)):
        out.append(f"{'{' if at == 0 else ','}\n{inner}{json.dumps(key)}: ")
        _write(value[key], inner, f"{where}.{key}", out)
    out.append(f"\n{indent}}}")


def _scalar(value: Any, where: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(str(value))
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} holds {value!r}, which JSON cannot hold")
        return float.__repr__(value)
    raise ValueError(f"{where} holds a {type(value).__name__}, which JSON cannot hold")


def decode(raw: bytes) -> Any:
    """The value that the bytes describe; ``ValueError`` says what is wrong with them."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from error
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark")
    try:
        return json.loads(
            text,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_no_duplicates,
        )
    except json.JSONDecodeError as error:
        cut = " (the file is cut short)" if not text[error.pos :].strip() else ""
        raise ValueError(f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}{cut}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} does not fit a float64")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError(f"the number {digits[:40]}... has {len(digits)} digits")
    return int(digits)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} occurs twice in one object")
            seen.add(key)
    return out

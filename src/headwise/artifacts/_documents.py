"""Documents: which formats there are, their schemas, reading and writing one file."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from headwise.artifacts import _json
from headwise.errors import RunError

HEADS_FORMAT: Final = "headwise.heads"
HEADS_VERSION: Final = "1.0"
RUN_FORMAT: Final = "headwise.run"
RUN_VERSION: Final = "1.0"
STATISTICS_FORMAT: Final = "headwise.statistics"
STATISTICS_VERSION: Final = "1.0"
REDUNDANCY_FORMAT: Final = "headwise.redundancy"
REDUNDANCY_VERSION: Final = "1.0"
MODEL_FORMAT: Final = "headwise.model"
MODEL_VERSION: Final = "1.0"
ROLES_FORMAT: Final = "headwise.roles"
ROLES_VERSION: Final = "1.0"
PLAN_FORMAT: Final = "headwise.plan"
PLAN_VERSION: Final = "1.0"
COMPARISON_FORMAT: Final = "headwise.comparison"
COMPARISON_VERSION: Final = "1.0"

_VERSIONS: Final = {
    HEADS_FORMAT: HEADS_VERSION,
    RUN_FORMAT: RUN_VERSION,
    STATISTICS_FORMAT: STATISTICS_VERSION,
    REDUNDANCY_FORMAT: REDUNDANCY_VERSION,
    MODEL_FORMAT: MODEL_VERSION,
    ROLES_FORMAT: ROLES_VERSION,
    PLAN_FORMAT: PLAN_VERSION,
    COMPARISON_FORMAT: COMPARISON_VERSION,
}
_LARGEST: Final = 2**29
"""Bytes: a document larger than this is not one of ours (100,000 heads with 12 measures take some 100 MB)."""


def schema(format: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a format, as shipped in the package."""
    name = format.removeprefix("headwise.") + ".schema.json"
    raw = resources.files("headwise.artifacts").joinpath("schemas", name).read_bytes()
    out: dict[str, Any] = _json.decode(raw)
    return out


def check_document(document: Any, format: str, named: str = "the document") -> None:
    """Refuse what is not a document of ``format`` in a version that this headwise reads.

    Within a major version later minor versions only add keys, which are ignored here; another major
    version is refused.

    Raises:
        RunError: says what is wrong and where.
    """
    if not isinstance(document, Mapping):
        raise RunError(f"{named} is not a {format} document: it holds a {_kind(document)}, not an object")
    found = document.get("format")
    if found != format:
        said = f"its format is {_short(found)}" if "format" in document else "it names no format"
        raise RunError(f"{named} is not a {format} document: {said}")
    _check_version(document.get("version"), format, named)
    error = _first_error(document, format)
    if error is not None:
        raise RunError(f"{named} does not follow the {format} format: {error}")


def _check_version(version: Any, format: str, named: str) -> None:
    ours = _VERSIONS[format]
    parts = version.split(".") if isinstance(version, str) else []
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise RunError(f"{named} has the version {_short(version)}; a version is written like {ours!r}")
    major = ours.split(".")[0]
    if parts[0] != major:
        newer = int(parts[0]) > int(major)
        next_step = "it was written by a newer headwise: upgrade to read it" if newer else "scan again to replace it"
        raise RunError(f"{named} is {format} version {version}; this headwise reads version {major}.x: {next_step}")


def _first_error(document: Mapping[str, Any], format: str) -> str | None:
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_validator(format).iter_errors(document))
    except RecursionError:
        return "it is nested too deeply"
    if error is None:
        return None
    where = error.json_path.removeprefix("$").removeprefix(".") or "the whole document"
    return f"{where[:120]}: {_said(error)}"


def _said(error: Any) -> str:
    """The library's sentence, shortened where it quotes a long value."""
    rule = error.validator_value
    if error.validator == "type":
        wanted = rule if isinstance(rule, str) else " or ".join(rule)
        return f"must be {wanted}, not {_short(error.instance)}"
    if error.validator in (
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "enum",
        "const",
        "pattern",
        "minLength",
        "minItems",
    ):
        return f"{_short(error.instance)} breaks the rule {error.validator} {_short(rule)}"
    message: str = error.message
    return message if len(message) <= 160 else f"{message[:120]} ... breaks the rule {error.validator}"


@functools.cache
def _validator(format: str) -> Any:
    import jsonschema

    base = jsonschema.Draft202012Validator
    generic = base.VALIDATORS["items"]

    def items(validator: Any, rule: Any, instance: Any, whole: Mapping[str, Any]) -> Iterator[Any]:
        # Long lists of numbers are checked in one loop; only a list with a fault goes the general way.
        if isinstance(instance, list) and isinstance(rule, dict) and _plain_numbers(rule, instance):
            return
        yield from generic(validator, rule, instance, whole)

    # 2.0 is an integer to JSON schema; to what reads the document it is a float, which counts and indexes nothing.
    whole = base.TYPE_CHECKER.redefine("integer", lambda _checker, value: type(value) is int)
    fast: Any = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        base, {"items": items}, type_checker=whole
    )
    return fast(schema(format))


_PYTHON: Final[dict[str, set[type]]] = {"number": {int, float}, "integer": {int}, "null": {type(None)}}


def _plain_numbers(rule: dict[str, Any], instance: list[Any]) -> bool:
    """Whether every item satisfies a rule that only speaks of type, minimum and maximum."""
    if not rule.keys() <= {"type", "minimum", "maximum"}:
        return False
    wanted = rule.get("type", ())
    allowed: set[type] = set()
    for name in [wanted] if isinstance(wanted, str) else wanted:
        allowed |= _PYTHON.get(name, set())
    low, high = rule.get("minimum", float("-inf")), rule.get("maximum", float("inf"))
    return all(type(item) in allowed and (item is None or low <= item <= high) for item in instance)


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", str: "string", list: "list", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."


def encode_document(document: Mapping[str, Any]) -> bytes:
    """The bytes of a document, after checking that it follows its own format.

    Raises:
        RunError: it does not, or holds something that JSON cannot.
    """
    format = document.get("format")
    if format not in _VERSIONS:
        raise RunError(f"the document's format is {_short(format)}; known are {', '.join(_VERSIONS)}")
    try:
        raw = _json.encode(document)
    except ValueError as error:
        raise RunError(f"the {format} document cannot be written: {error}") from error
    check_document(_json.decode(raw), format)
    return raw


def read_document(path: str | Path, format: str) -> dict[str, Any]:
    """Read and check one file.

    Raises:
        RunError: it is missing, no regular file, damaged, of another format or of a newer version.
    """
    file = Path(path)
    raw = _read(file)
    try:
        document = _json.decode(raw)
    except ValueError as error:
        raise RunError(f"{file} cannot be read as {format}: {error}") from error
    check_document(document, format, str(file))
    out: dict[str, Any] = document
    return out


def _read(file: Path) -> bytes:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise RunError(f"{file} does not exist; check the path") from None
    except OSError as error:
        raise RunError(f"{file} cannot be opened: {error.strerror}") from error
    with os.fdopen(handle, "rb") as stream:
        facts = os.fstat(stream.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise RunError(f"{file} is not a regular file")
        if facts.st_size > _LARGEST:
            raise RunError(f"{file} has {facts.st_size:,} bytes; documents of headwise have at most {_LARGEST:,}")
        if facts.st_size == 0:
            raise RunError(f"{file} is empty")
        try:
            return stream.read()
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror}") from error


def write_document(path: str | Path, document: Mapping[str, Any]) -> Path:
    """Check a document and write it in one step: the file is the old one or the new one, never half of it.

    Raises:
        RunError: the document is not valid, or the file cannot be written; what was there is untouched.
    """
    file = Path(path)
    if file.is_dir():
        raise RunError(f"{file} is a folder; give the path of a file, for example {file / 'heads.json'}")
    return replace_file(file, encode_document(document))


def replace_file(file: Path, raw: bytes) -> Path:
    """Write a file in one step: it is the old one or the new one, never half of it. A link stays a link.

    Raises:
        RunError: it cannot be written; what was there is untouched.
    """
    target = Path(os.path.realpath(file))
    if os.path.lexists(target) and not target.is_file():
        raise RunError(f"{file} is not a regular file and cannot be replaced by one; give the path of a file")
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}; nothing was changed") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return file


def _mode(target: Path) -> int:
    """The mode of the file that is replaced, or that of a new file under the process's umask."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask

"""Arrays with a document: a safetensors file whose one metadata entry is a JSON document with a schema."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headwise import saved
from headwise.artifacts import _json
from headwise.artifacts._documents import check_document, encode_document, replace_file
from headwise.errors import RunError

_KEY: Final = "headwise"
_KINDS: Final = ("float64", "float32", "int64", "int32", "bool")


def write_tensors(path: str | Path, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write arrays and the document that says what they are, in one step.

    The bytes are a function of the content. Nothing is pickled; any reader of safetensors can take the arrays.

    Args:
        path: the file, ``.safetensors``.
        document: follows the schema of its ``format``.
        arrays: float64, float32, int64, int32 or bool, by name.

    Raises:
        RunError: the document is not valid, an array has another dtype, or the file cannot be written; what was there
            is untouched.
    """
    from safetensors.numpy import save

    file = Path(path)
    if file.is_dir():
        raise RunError(f"{file} is a folder; give the path of a file, for example {file / 'statistics.safetensors'}")
    for name, array in arrays.items():
        if array.dtype.name not in _KINDS:
            raise RunError(f"array {name!r} is {array.dtype.name}; a file of arrays holds {', '.join(_KINDS)}")
    text = encode_document(document).decode("ascii")
    replace_file(file, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, {_KEY: text}))
    saved.note(file)
    return file


def read_tensors(path: str | Path, format: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The document and the arrays of a file that :func:`write_tensors` wrote.

    Raises:
        RunError: it is missing, damaged, not of this format, or of a newer version.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.exists():
        raise RunError(f"{file} does not exist; check the path")
    if not os.path.isfile(file):
        raise RunError(f"{file} is not a regular file")
    try:
        with safe_open(file, framework="np") as stored:
            text = (stored.metadata() or {}).get(_KEY)
            if text is None:
                raise RunError(f"{file} is not a {format} file: it has no entry {_KEY!r} that says what it holds")
            document = _decoded(text, file, format)
            arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise RunError(
            f"{file} cannot be read as {format}: {error}; it is damaged, cut off, or something else"
        ) from None
    return document, arrays


def _decoded(text: str, file: Path, format: str) -> dict[str, Any]:
    try:
        document = _json.decode(text.encode())
    except ValueError as error:
        raise RunError(f"{file} cannot be read as {format}: {error}") from error
    check_document(document, format, str(file))
    out: dict[str, Any] = document
    return out

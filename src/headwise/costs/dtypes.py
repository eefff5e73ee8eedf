"""Bytes of an element, by the name of its dtype."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from headwise.errors import InputError

__all__ = ["BYTES", "bytes_of", "dtype_name"]

#: Bytes per element; 4-bit formats are without the scales that are stored beside them.
BYTES: Final[dict[str, float]] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int4": 0.5,
}

_OTHER_NAMES: Final = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "uint8": "int8",
    "uint4": "int4",
}


def dtype_name(dtype: object) -> str:
    """The name in :data:`BYTES` of a dtype given by name or as ``torch.dtype``.

    Raises:
        InputError: no such dtype.

    Example:
        >>> dtype_name("bf16")
        'bfloat16'
    """
    name = str(dtype).removeprefix("torch.").lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in BYTES:
        near = get_close_matches(name, [*BYTES, *_OTHER_NAMES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(BYTES)}"
        raise InputError(f"dtype {str(dtype)!r} is not known; {hint}")
    return name


def bytes_of(dtype: object) -> float:
    """Bytes of one element.

    Example:
        >>> bytes_of("float16")
        2
    """
    return BYTES[dtype_name(dtype)]

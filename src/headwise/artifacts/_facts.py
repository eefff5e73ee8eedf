"""The facts of a run, as ``run.json`` holds them."""

from __future__ import annotations

import datetime
import enum
import math
import numbers
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from headwise.artifacts._documents import RUN_FORMAT, RUN_VERSION
from headwise.errors import InputError


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; None for a package that is not installed. Imports none of them."""
    out: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("headwise", "torch", "transformers", "tokenizers", "numpy"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = None
    return out


def run_document(
    *,
    model: Mapping[str, Any],
    arguments: Mapping[str, Any],
    seed: int | None,
    backends: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any],
    mask: Mapping[str, Any],
    counts: Mapping[str, int],
    seconds: float,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    date: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The content of ``run.json`` (docs/format.md) from the facts of a run.

    Args:
        model: ``name`` and ``weight_hash``, and as far as known ``kind`` (folder, hub, memory), ``path``,
            ``revision``, ``class``, ``model_type``, ``dtype``, ``device``, ``parameters``.
        arguments: what the run was asked for, by name.
        seed: the seed, or None where nothing was drawn.
        backends: one entry per backend that ran: ``backend``, ``sites`` (which) and ``reasons`` (for every
            other backend why not: a mapping, or pairs of backend and reason).
        data: facts of the data (source, passages, tokens, truncated, ...).
        mask: ``mode`` (``"compact"`` or ``"dense"``) and ``reason``.
        counts: whole numbers (heads, sites, rows, ...).
        seconds: how long it took.
        notes, warnings: sentences for people.
        date: ISO 8601 with a time zone; now by default.
        more: further facts, kept as they are.

    Paths become strings, tuples lists, enumerations their names, and numbers that are not finite become
    null with a note that says which.

    Raises:
        InputError: something that JSON cannot hold, with its place.
    """
    said: list[str] = []
    facts: dict[str, Any] = {
        "model": model,
        "arguments": arguments,
        "seed": seed,
        "backends": [_backend(entry) for entry in backends],
        "data": data,
        "mask": mask,
        "counts": counts,
        "seconds": seconds,
        "warnings": list(warnings),
        "date": date or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "system": {"platform": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()},
        **more,
    }
    out: dict[str, Any] = {key: _plain(value, key, said) for key, value in facts.items()}
    out["notes"] = [*_plain(list(notes), "notes", said), *said]
    out["format"] = RUN_FORMAT
    out["version"] = RUN_VERSION
    return out


def _backend(entry: Mapping[str, Any]) -> dict[str, Any]:
    reasons = entry["reasons"]
    pairs = reasons.items() if isinstance(reasons, Mapping) else reasons
    listed = [pair if isinstance(pair, Mapping) else {"backend": pair[0], "reason": pair[1]} for pair in pairs]
    return {**entry, "reasons": listed}


def _plain(value: Any, where: str, said: list[str]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number):
            return number
        said.append(f"{where} was {number} and is written as null")
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", said) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item, where, said) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{at}]", said) for at, item in enumerate(value)]
    raise InputError(f"{where} is a {type(value).__name__}; run.json holds numbers, strings, lists and dictionaries")

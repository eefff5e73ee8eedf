"""Roles whose pairs are given, passage by passage, rather than found by a rule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headwise.errors import DataError, InputError
from headwise.measures.roles.role import Candidates, Role
from headwise.measures.roles.tokens import Tokens

__all__ = ["given_count", "given_pairs", "read_pairs"]


@dataclass(frozen=True)
class _Listed:
    name: str
    lists: Sequence[Any]

    def __call__(self, tokens: Tokens) -> Any:
        if tokens.passage >= len(self.lists):
            raise DataError(
                f"role {self.name!r}: pairs of {len(self.lists)} passages were given, and {tokens.where} is passage "
                f"{tokens.passage} (counted from 0); give pairs for each passage (an empty list where there are none)"
            )
        return self.lists[tokens.passage]


def given_pairs(
    name: str,
    pairs: Sequence[Iterable[tuple[int, int]]],
    *,
    candidates: Sequence[Candidates] | None = None,
    kind: Literal["self", "cross"] = "self",
    description: str = "",
    hidden: Literal["error", "skip"] = "error",
) -> Role:
    """A role from pairs that are known: gold alignments, annotations.

    Args:
        name: how tables call it.
        pairs: for each passage, in the order of the source, its (query, key) pairs: positions among the passage's
            tokens, special ones included, padding not.
        candidates: for each passage the keys that compete, or a mapping from query to keys; all visible by default.
        kind, description, hidden: as for :class:`Role`.

    >>> given_pairs("gold", [[(4, 1)], []], candidates=[[0, 1, 2], []]).name
    'gold'
    """
    listed = [list(one) for one in pairs]
    if candidates is not None and len(candidates) != len(listed):
        raise InputError(
            f"role {name!r}: {len(listed)} lists of pairs and {len(candidates)} of candidates; give one of each "
            "for every passage"
        )
    return Role(
        name,
        _Listed(name, listed),
        candidates=None if candidates is None else _Listed(name, list(candidates)),
        kind=kind,
        description=description or "Pairs that were given",
        hidden=hidden,
    )


def given_count(role: Role) -> int | None:
    """Of how many passages a role's pairs were given; None for a role that finds its pairs.

    >>> given_count(given_pairs("gold", [[(4, 1)], []]))
    2
    """
    return len(role.find.lists) if isinstance(role.find, _Listed) else None


def read_pairs(path: str | Path, name: str | None = None, *, kind: Literal["self", "cross"] = "self") -> Role:
    """A role from a .jsonl file: for each passage a line ``{"pairs": [[query, key], ...], "candidates": [key, ...]}``.

    ``candidates`` may be left out, or be an object from query to keys. The role's name is that of the file by default.

    Raises:
        DataError: the file is missing or a line is not of this form; the message names the line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{path}: there is no such file; give a .jsonl file of pairs")
    pairs: list[list[tuple[int, int]]] = []
    candidates: list[Candidates] = []
    some = False
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{file.name} line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: is not JSON ({error.msg})") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: cannot be read as JSON ({str(error).partition(';')[0]})") from None
        if not isinstance(row, Mapping) or not isinstance(row.get("pairs"), list):
            raise DataError(f'{where}: must be an object with "pairs", a list of [query, key]')
        pairs.append(row["pairs"])
        competing = row.get("candidates")
        some = some or competing is not None
        candidates.append(_competing(competing, where))
    if not pairs:
        raise DataError(f"{path}: holds no line of pairs")
    return given_pairs(name or file.stem, pairs, candidates=candidates if some else None, kind=kind)


def _competing(given: Any, where: str) -> Candidates:
    if given is None:
        return []
    if isinstance(given, list):
        return given
    if isinstance(given, Mapping):
        try:
            return {int(query): keys for query, keys in given.items()}
        except ValueError:
            raise DataError(
                f"{where}: candidates is an object, and its names must be whole numbers (queries)"
            ) from None
    raise DataError(f"{where}: candidates must be a list of keys, or an object from query to keys")

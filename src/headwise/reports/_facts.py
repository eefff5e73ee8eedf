"""What the page says about a run in words: sections of (name, value) lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headwise.heads import HeadTable
from headwise.reports._numbers import label

Lines = list[tuple[str, str]]


@dataclass(frozen=True)
class Backend:
    """A backend that ran: where, and for every other one why not."""

    name: str
    sites: str
    reasons: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Absence:
    """A measure that does not apply at some sites."""

    measure: str
    reason: str
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Everything the page says in words."""

    title: str
    summary: tuple[str, ...]
    sections: tuple[tuple[str, Lines], ...]
    backends: tuple[Backend, ...]
    absences: tuple[Absence, ...]
    unknown: tuple[tuple[str, str, str], ...]
    uncovered: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def facts(run: Mapping[str, Any], table: HeadTable) -> Facts:
    """Gather the facts of a run from ``run.json`` and its table."""
    return Facts(
        title=run["model"]["name"] or "unnamed model",
        summary=_summary(run, table),
        sections=tuple((name, lines) for name, lines in _sections(run) if lines),
        backends=tuple(_backend(entry, table) for entry in run["backends"]),
        absences=_absences(table),
        unknown=tuple(
            (path, part, reason) for path, block in table.layout.blocks.items() for part, reason in block.unknown
        ),
        uncovered=table.layout.uncovered,
        notes=tuple(run["notes"]),
        warnings=tuple(run["warnings"]),
    )


def _summary(run: Mapping[str, Any], table: HeadTable) -> tuple[str, ...]:
    said = [_count(len(table), "head"), _count(len(table.sites), "attention site")]
    for stack, kind in table.groups:
        sites = [site for site in table.sites if (site.key.stack, site.key.kind) == (stack, kind)]
        widths = sorted({table.layout.blocks[site.block].query_heads for site in sites})
        heads = _count(widths[0], "head") if len(widths) == 1 else f"{widths[0]} to {widths[-1]} heads"
        said.append(f"{stack} {kind}-attention: {_count(len(sites), 'layer')} of {heads}")
    for rows, words in (("token", "rows of real tokens"), ("special", "rows of special tokens")):
        most = max((int(table.count(name, rows).max(initial=0)) for name in table.measures), default=0)  # type: ignore[arg-type]
        if most:
            said.append(f"{most:,} {words} per head")
    said.append(str(run["date"])[:10])
    return tuple(said)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _sections(run: Mapping[str, Any]) -> Iterable[tuple[str, Lines]]:
    yield "Model", _lines(run["model"])
    yield "Data", _lines(run["data"])
    mask = run["mask"]
    yield (
        "Run",
        [
            ("date", str(run["date"])),
            ("seconds", f"{run['seconds']:,.1f}"),
            ("seed", words(run["seed"])),
            ("masks", words(mask["mode"]) + (f" ({mask['reason']})" if mask["reason"] else "")),
            *_lines(run["counts"]),
        ],
    )
    yield "Arguments", _lines(run["arguments"])
    yield "Versions", _lines(run["versions"])
    yield "System", _lines(run["system"])


def _lines(given: Mapping[str, Any]) -> Lines:
    return [(name.replace("_", " "), words(value)) for name, value in given.items() if value is not None]


def words(value: Any) -> str:
    """A value of ``run.json`` for people."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, str):
        return value if value else "(empty)"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {words(item)}" for key, item in value.items()) or "none"
    between = "; " if any(isinstance(item, (list, Mapping)) for item in value) else ", "
    return between.join(words(item) for item in value) or "none"


def _backend(entry: Mapping[str, Any], table: HeadTable) -> Backend:
    sites = entry["sites"]
    everywhere = len(sites) == len(table.layout.sites) > 0
    shown = (
        "every site" if everywhere else ", ".join(sites[:6]) + (f" and {len(sites) - 6} more" if len(sites) > 6 else "")
    )
    reasons = tuple((reason["backend"], reason["reason"]) for reason in entry["reasons"])
    return Backend(entry["backend"], shown or "no site", reasons)


def _absences(table: HeadTable) -> tuple[Absence, ...]:
    gathered: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, reasons in table.absent.items():
        for key, reason in reasons.items():
            gathered[label(name), reason].append(f"{key} ({key.stack}, {key.kind})")
    return tuple(Absence(measure, reason, tuple(sites)) for (measure, reason), sites in gathered.items())

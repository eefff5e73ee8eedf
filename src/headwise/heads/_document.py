"""A table as plain lists and dictionaries, and back: the content of ``heads.json``.

docs/format.md describes the format; the schema that is checked first ships in headwise.artifacts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise import artifacts
from headwise.errors import InputError, RunError
from headwise.heads._measure import ROW_CLASSES, MeasureInfo, RowClass
from headwise.heads._moments import Floats, Moments
from headwise.layout import Block, HeadId, HeadLayout, Projection, Site, SiteKey

if TYPE_CHECKING:
    from headwise.heads._table import HeadTable

_NOT_FINITE = "some rows gave a value that is not finite: an overflow, or NaN in the model's activations"
_PARTS = ("q", "k", "v", "o")


def to_document(table: HeadTable) -> dict[str, Any]:
    """See :meth:`HeadTable.to_document`."""
    site_at = {site.key: at for at, site in enumerate(table.layout.sites)}
    return {
        "format": artifacts.HEADS_FORMAT,
        "version": artifacts.HEADS_VERSION,
        "model": {"name": table.model, "weight_hash": table.weight_hash},
        "parts": list(table.parts),
        "blocks": [_block(block) for block in table.layout.blocks.values()],
        "sites": [_site(site) for site in table.layout.sites],
        "uncovered": [{"module": path, "reason": reason} for path, reason in table.layout.uncovered],
        "facts": [{"name": name, "text": said} for name, said in table.layout.facts],
        "heads": {
            "site": [site_at[head.site] for head in table.heads],
            "head": [head.head for head in table.heads],
        },
        "measures": [_measure(info) for info in table.measures.values()],
        "values": [
            _values(name, rows, table.moments(name, rows))
            for name in table.measures
            for rows in ROW_CLASSES
            if rows == "token" or table.count(name, rows).any()
        ],
        "absent": [
            {"measure": name, "site": site_at[key], "reason": reason}
            for name, reasons in sorted(table.absent.items())
            for key, reason in sorted(reasons.items(), key=lambda item: site_at[item[0]])
        ],
    }


def _block(block: Block) -> dict[str, Any]:
    out: dict[str, Any] = {
        "module": block.module,
        "query_heads": block.query_heads,
        "kv_heads": block.kv_heads,
        "d_k": block.d_k,
        "d_v": block.d_v,
        "kv_map": list(block.kv_map),
        "o_path": block.o_path,
        "unknown": [{"part": part, "reason": reason} for part, reason in block.unknown],
    }
    for part in _PARTS:
        out[part] = _projection(getattr(block, part))
    if block.gate is not None:
        out["gate"] = _projection(block.gate)
    if block.partial:
        out["partial"] = [{"part": part, "reason": reason} for part, reason in block.partial]
    return out


def _projection(projection: Projection | None) -> dict[str, Any] | None:
    if projection is None:
        return None
    out: dict[str, Any] = {
        "parameter": projection.parameter,
        "transposed": projection.transposed,
        "arrangement": projection.arrangement,
    }
    if projection.starts:
        out["starts"] = list(projection.starts)
    if projection.width:
        out["width"] = projection.width
    return out


def _site(site: Site) -> dict[str, Any]:
    return {
        "stack": site.key.stack,
        "kind": site.key.kind,
        "module": site.key.module,
        "call": site.key.call,
        "block": site.block,
        "layer": site.layer,
        "causal": site.causal,
        "window": site.window,
    }


def _measure(info: MeasureInfo) -> dict[str, Any]:
    pooled = {"pooled": True} if info.pooled else {}
    return {
        "name": info.name,
        "unit": info.unit,
        "low": info.low,
        "high": info.high,
        "better": info.better,
        "description": info.description,
        "source": info.source,
        **pooled,
    }


def _values(name: str, rows: RowClass, moments: Moments) -> dict[str, Any]:
    odd = [
        at
        for at in np.flatnonzero(moments.count).tolist()
        if not (math.isfinite(moments.mean[at]) and math.isfinite(moments.m2[at]))
    ]
    return {
        "measure": name,
        "rows": rows,
        "count": moments.count.tolist(),
        "mean": [value if math.isfinite(value) else None for value in moments.mean.tolist()],
        "m2": [value if math.isfinite(value) else None for value in moments.m2.tolist()],
        "not_finite": [
            {"at": at, "mean": _word(moments.mean[at]), "m2": _word(moments.m2[at]), "reason": _NOT_FINITE}
            for at in odd
        ],
    }


def _word(value: float) -> str | None:
    return None if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def from_document(kind: type[HeadTable], document: Mapping[str, Any]) -> HeadTable:
    """See :meth:`HeadTable.from_document`."""
    artifacts.check_document(document, artifacts.HEADS_FORMAT)
    try:
        return _table(kind, document)
    except InputError as error:
        raise RunError(f"a table of heads contradicts itself: {error}") from error


def _table(kind: type[HeadTable], document: Mapping[str, Any]) -> HeadTable:
    blocks: dict[str, Block] = {}
    for entry in document["blocks"]:
        if entry["module"] in blocks:
            raise InputError(f"block {entry['module']!r} is listed twice")
        blocks[entry["module"]] = _read_block(entry)
    sites = tuple(_read_site(entry) for entry in document["sites"])
    layout = HeadLayout(
        sites,
        blocks,
        uncovered=tuple((entry["module"], entry["reason"]) for entry in document["uncovered"]),
        facts=tuple((entry["name"], entry["text"]) for entry in document["facts"]),
    )
    place = document["heads"]
    if len(place["site"]) != len(place["head"]):
        raise InputError(f"heads lists {len(place['site'])} sites for {len(place['head'])} heads")
    heads = [
        HeadId(_at(sites, site, "heads.site").key, head)
        for site, head in zip(place["site"], place["head"], strict=True)
    ]
    measures: dict[str, MeasureInfo] = {}
    for entry in document["measures"]:
        if entry["name"] in measures:
            raise InputError(f"measure {entry['name']!r} is listed twice")
        measures[entry["name"]] = MeasureInfo(
            **{part: entry[part] for part in _MEASURE_PARTS}, pooled=entry.get("pooled", False)
        )
    values: dict[tuple[str, RowClass], Moments] = {}
    for entry in document["values"]:
        key = (entry["measure"], entry["rows"])
        if key in values:
            raise InputError(f"values of measure {key[0]!r} over {key[1]} rows are listed twice")
        values[key] = _read_moments(entry)
    absent: dict[str, dict[SiteKey, str]] = {}
    for entry in document["absent"]:
        reasons = absent.setdefault(entry["measure"], {})
        site_key = _at(sites, entry["site"], "absent.site").key
        if site_key in reasons:
            raise InputError(f"absent lists measure {entry['measure']!r} at site {site_key} twice")
        reasons[site_key] = entry["reason"]
    return kind(
        layout,
        measures,
        values,
        absent=absent,
        heads=heads,
        model=document["model"]["name"],
        weight_hash=document["model"]["weight_hash"],
        parts=document["parts"],
    )


_MEASURE_PARTS = ("name", "unit", "low", "high", "better", "description", "source")


def _at(sites: tuple[Site, ...], index: int, where: str) -> Site:
    if not 0 <= index < len(sites):
        raise InputError(f"{where} names site {index}; there are {len(sites)}")
    return sites[index]


def _read_block(entry: Mapping[str, Any]) -> Block:
    parts: dict[str, Any] = {part: _read_projection(entry.get(part)) for part in (*_PARTS, "gate")}
    return Block(
        module=entry["module"],
        query_heads=entry["query_heads"],
        kv_heads=entry["kv_heads"],
        d_k=entry["d_k"],
        d_v=entry["d_v"],
        kv_map=tuple(entry["kv_map"]),
        o_path=entry["o_path"],
        unknown=tuple((reason["part"], reason["reason"]) for reason in entry["unknown"]),
        partial=tuple((reason["part"], reason["reason"]) for reason in entry.get("partial", ())),
        **parts,
    )


def _read_projection(entry: Mapping[str, Any] | None) -> Projection | None:
    if entry is None:
        return None
    starts, width = tuple(entry.get("starts", ())), entry.get("width", 0)
    return Projection(entry["parameter"], entry["transposed"], entry["arrangement"], starts, width)


def _read_site(entry: Mapping[str, Any]) -> Site:
    key = SiteKey(entry["stack"], entry["kind"], entry["module"], entry["call"])
    return Site(key, entry["block"], entry["layer"], entry["causal"], entry["window"])


def _read_moments(entry: Mapping[str, Any]) -> Moments:
    named = f"values of {entry['measure']!r} over {entry['rows']} rows"
    count = np.array(entry["count"], np.int64)
    odd = {fact["at"]: fact for fact in entry["not_finite"]}
    if len(odd) != len(entry["not_finite"]) or any(at >= len(count) for at in odd):
        raise InputError(f"{named}: not_finite names a head twice, or one that is not there")
    arrays: dict[str, Floats] = {}
    for part in ("mean", "m2"):
        given = entry[part]
        if len(given) != len(count):
            raise InputError(f"{named}: {part} has {len(given)} entries and count has {len(count)}")
        array = np.array([math.nan if value is None else value for value in given], np.float64)
        for at, fact in odd.items():
            if fact[part] is not None:
                if given[at] is not None:
                    raise InputError(f"{named}: {part} of head {at} is both {given[at]} and {fact[part]}")
                array[at] = float(fact[part])
        for at, value in enumerate(given):
            if value is None and count[at] and (at not in odd or odd[at][part] is None):
                raise InputError(f"{named}: {part} of head {at} is null although {count[at]} rows were counted")
            if value is not None and not count[at]:
                raise InputError(f"{named}: {part} of head {at} is {value} although no rows were counted")
        arrays[part] = array
    return Moments(count, arrays["mean"], arrays["m2"])


def save(table: HeadTable, path: str | Path) -> Path:
    """See :meth:`HeadTable.save`."""
    return artifacts.write_document(path, to_document(table))


def load(kind: type[HeadTable], path: str | Path) -> HeadTable:
    """See :meth:`HeadTable.load`."""
    file = Path(path)
    if file.is_dir():
        file = file / artifacts.HEADS_FILE
    document = artifacts.read_document(file, artifacts.HEADS_FORMAT)
    try:
        return _table(kind, document)
    except InputError as error:
        raise RunError(f"{file}: the table contradicts itself: {error}") from error

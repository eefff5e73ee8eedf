"""The table of heads as the compact data that the page's scripts read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headwise.heads import HeadTable, Moments, RowClass


def page_data(table: HeadTable) -> dict[str, Any]:
    """Sites, heads, measures and values of a table, in lists; what is missing is null.

    Means are exact; standard deviations have eight significant digits; a list of counts that are all
    equal is one number.
    """
    site_at = {site.key: at for at, site in enumerate(table.layout.sites)}
    return {
        "model": table.model or "unnamed model",
        "groups": [{"stack": stack, "kind": kind} for stack, kind in table.groups],
        "sites": [_site(table, at) for at in range(len(table.layout.sites))],
        "heads": {
            "site": [site_at[head.site] for head in table.heads],
            "head": [head.head for head in table.heads],
        },
        "measures": [
            {
                "name": info.name,
                "label": label(info.name),
                "unit": "" if info.unit == "1" else info.unit,
                "low": info.low,
                "high": info.high,
                "better": info.better,
                "description": info.description,
                "source": info.source,
                "token": _values(table, info.name, "token"),
                "special": _values(table, info.name, "special"),
                "absent": {str(site_at[key]): reason for key, reason in table.absent.get(info.name, {}).items()},
            }
            for info in table.measures.values()
        ],
    }


def label(name: str) -> str:
    """A measure's name for people: ``max_weight`` becomes ``Max weight``, ``z_norm`` stays ``z norm``."""
    words = name.replace("_", " ")
    return words if words[1:2] == " " else words[0].upper() + words[1:]


def _site(table: HeadTable, at: int) -> dict[str, Any]:
    site = table.layout.sites[at]
    block = table.layout.blocks[site.block]
    return {
        "stack": site.key.stack,
        "kind": site.key.kind,
        "module": site.key.module,
        "call": site.key.call,
        "block": site.block,
        "layer": site.layer,
        "causal": site.causal,
        "window": site.window,
        "heads": block.query_heads,
        "kv": list(block.kv_map),
        "d_k": block.d_k,
        "d_v": block.d_v,
    }


def _values(table: HeadTable, measure: str, rows: RowClass) -> dict[str, Any] | None:
    moments = table.moments(measure, rows)
    if not moments.count.any():
        return None
    counts = moments.count.tolist()
    return {
        "mean": [value if math.isfinite(value) else None for value in moments.mean.tolist()],
        "std": [float(f"{value:.8g}") if math.isfinite(value) else None for value in moments.std.tolist()],
        "rows": counts[0] if len(set(counts)) == 1 else counts,
        "odd": _odd(moments),
    }


def _odd(moments: Moments) -> dict[str, str]:
    """Means that are NaN or infinite although rows were counted, in words."""
    at = np.flatnonzero((moments.count > 0) & ~np.isfinite(moments.mean)).tolist()
    return {str(head): str(float(moments.mean[head])) for head in at}

"""Two partial runs of one model made into the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headwise.errors import InputError
from headwise.layout import HeadLayout, SiteKey

if TYPE_CHECKING:
    from headwise.heads._table import HeadTable


def merge(left: HeadTable, right: HeadTable, *, overlap: bool) -> HeadTable:
    """The rows of both; see :meth:`HeadTable.merge`."""
    if not isinstance(right, type(left)):
        raise InputError(f"a table can only be merged with a HeadTable, not with {type(right).__name__}")
    same_weights(left, right, "merge", "")
    same_layout(left.layout, right.layout, "merge", "")
    same_measures(left, right, "merge", "")
    _no_pooled(left)
    missing = set(left.heads) ^ set(right.heads)
    if missing:
        head = min(missing)
        side = "first" if head in left else "second"
        raise InputError(f"cannot merge: {len(missing)} heads are in one table only, e.g. {head}, in the {side}")
    shared = sorted(set(left.parts) & set(right.parts))
    if shared and not overlap:
        raise InputError(
            f"cannot merge: both tables measured {shared[0]!r}, whose rows would count twice; "
            "merge tables of different data, or pass overlap=True"
        )
    order = np.array([right._at[head] for head in left.heads], np.int64)
    values = {key: moments.merge(right._values[key].take(order)) for key, moments in left._values.items()}
    return type(left)(
        left.layout,
        left.measures,
        values,
        absent=_absent(left, right),
        heads=left.heads,
        model=left.model if left.model is not None else right.model,
        weight_hash=left.weight_hash,
        parts={*left.parts, *right.parts},
    )


def _no_pooled(table: HeadTable) -> None:
    """Refuse to make a mean of numbers that are no means."""
    pooled = [name for name, info in table.measures.items() if info.pooled]
    if pooled:
        raise InputError(
            f"cannot merge: {pooled[0]!r} depends on all rows together, and that of the whole does not follow from "
            "the parts'; measure all the data in one run, or leave it out of both tables"
        )


def same_weights(left: HeadTable, right: HeadTable, verb: str, otherwise: str) -> None:
    """Refuse tables of different weights (or, where no hash is known, of different names)."""
    if left.weight_hash != right.weight_hash:
        raise InputError(
            f"cannot {verb}: the tables are of different weights, {left.model or 'unnamed'} "
            f"({left.weight_hash or 'no hash'}) and {right.model or 'unnamed'} ({right.weight_hash or 'no hash'})"
            f"{otherwise}"
        )
    if left.weight_hash is None and left.model != right.model:
        raise InputError(
            f"cannot {verb}: the tables are of different models, {left.model!r} and {right.model!r}{otherwise}"
        )


def same_layout(left: HeadLayout, right: HeadLayout, verb: str, otherwise: str) -> None:
    """Refuse tables whose heads sit in different places."""
    ours = {site.key: _shape(left, site.key) for site in left.sites}
    theirs = {site.key: _shape(right, site.key) for site in right.sites}
    if ours == theirs:
        return
    for key in [*ours, *theirs]:
        if key not in theirs or key not in ours:
            side = "first" if key in ours else "second"
            raise InputError(
                f"cannot {verb}: site {key} ({key.stack}, {key.kind}) is in the {side} table only{otherwise}"
            )
        if ours[key] != theirs[key]:
            part = next(name for name in ours[key] if ours[key][name] != theirs[key][name])
            raise InputError(
                f"cannot {verb}: site {key} has {part} {ours[key][part]} in the first table and "
                f"{theirs[key][part]} in the second{otherwise}"
            )


def _shape(layout: HeadLayout, key: SiteKey) -> dict[str, object]:
    site, block = layout.site(key), layout.block_of(key)
    return {
        "query heads": block.query_heads,
        "key-value heads": block.kv_heads,
        "d_k": block.d_k,
        "d_v": block.d_v,
        "head map": block.kv_map,
        "block": site.block,
        "layer": site.layer,
        "causal": site.causal,
        "window": site.window,
    }


def same_measures(left: HeadTable, right: HeadTable, verb: str, otherwise: str) -> None:
    """Refuse tables that measured different things, or the same name defined differently."""
    lacking = [
        name for name in [*left.measures, *right.measures] if (name in left.measures) != (name in right.measures)
    ]
    if lacking:
        side = "first" if lacking[0] in left.measures else "second"
        raise InputError(f"cannot {verb}: measure {lacking[0]!r} is in the {side} table only{otherwise}")
    same_definitions(left, right, verb)


def same_definitions(left: HeadTable, right: HeadTable, verb: str) -> None:
    """Refuse tables in which one name stands for two definitions."""
    for name, info in left.measures.items():
        other = right.measures.get(name, info)
        for part in ("unit", "low", "high", "better", "description", "source", "pooled"):
            if getattr(info, part) != getattr(other, part):
                raise InputError(
                    f"cannot {verb}: measure {name!r} is defined differently: {part} is {getattr(info, part)!r} in the "
                    f"first table and {getattr(other, part)!r} in the second"
                )


def _absent(left: HeadTable, right: HeadTable) -> dict[str, dict[SiteKey, str]]:
    out: dict[str, dict[SiteKey, str]] = {}
    for name in left.measures:
        ours, theirs = left.absent.get(name, {}), right.absent.get(name, {})
        for key in dict.fromkeys([*ours, *theirs]):
            reasons = [reasons[key] for reasons in (ours, theirs) if key in reasons]
            for table, known, side in ((left, ours, "first"), (right, theirs, "second")):
                if key not in known and _has_rows(table, name, key):
                    raise InputError(
                        f"cannot merge: measure {name!r} at site {key} has rows in the {side} table and does not "
                        f"apply in the other ({reasons[0]})"
                    )
            out.setdefault(name, {})[key] = min(reasons)
    return out


def _has_rows(table: HeadTable, measure: str, key: SiteKey) -> bool:
    at = [position for position, head in enumerate(table.heads) if head.site == key]
    return any(bool(table._values[measure, rows].count[at].any()) for rows in ("token", "special"))

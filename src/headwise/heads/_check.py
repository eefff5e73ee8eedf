"""Whether the parts of a table fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from headwise.errors import InputError
from headwise.heads._measure import ROW_CLASSES, MeasureInfo, RowClass
from headwise.heads._moments import Moments
from headwise.layout import HeadId, HeadLayout, SiteKey

Values = dict[tuple[str, RowClass], Moments]


def layout(given: HeadLayout) -> HeadLayout:
    """The layout, if every site has a block and a name of its own, and every block a whole head map."""
    if not isinstance(given, HeadLayout):
        raise InputError(f"layout must be a HeadLayout, not {type(given).__name__}")
    if len(given.sites) != len({site.key for site in given.sites}):
        twice = Counter(site.key for site in given.sites).most_common(1)[0][0]
        raise InputError(f"site {twice} ({twice.stack}, {twice.kind}) is in the layout twice")
    for site in given.sites:
        if site.block not in given.blocks:
            raise InputError(f"site {site.key} reads block {site.block!r}, which the layout does not have")
    for path, block in given.blocks.items():
        if path != block.module:
            raise InputError(f"block {block.module!r} is filed under {path!r}")
        if len(block.kv_map) != block.query_heads:
            raise InputError(
                f"block {path}: kv_map has {len(block.kv_map)} entries for {block.query_heads} query heads"
            )
        if any(not 0 <= kv < block.kv_heads for kv in block.kv_map):
            raise InputError(f"block {path}: kv_map names a key-value head outside 0..{block.kv_heads - 1}")
    return given


def heads(layout: HeadLayout, given: Iterable[HeadId] | None) -> tuple[HeadId, ...]:
    """The heads of the table: all of the layout, or those given, each once and each in the layout."""
    if given is None:
        return tuple(layout.heads())
    out = tuple(given)
    widths = {site.key: layout.blocks[site.block].query_heads for site in layout.sites}
    for head in out:
        if not 0 <= head.head < widths.get(head.site, 0):
            raise InputError(f"head {head} ({head.site.stack}, {head.site.kind}) is not in the layout")
    if len(set(out)) != len(out):
        twice = Counter(out).most_common(1)[0][0]
        raise InputError(f"head {twice} is in the table twice")
    return out


def measures(given: Mapping[str, MeasureInfo]) -> dict[str, MeasureInfo]:
    """The measures, each filed under its own name; at least one."""
    if not given:
        raise InputError("a table needs at least one measure")
    for name, info in given.items():
        if not isinstance(info, MeasureInfo):
            raise InputError(f"measure {name!r} must be described by a MeasureInfo, not by {type(info).__name__}")
        if name != info.name:
            raise InputError(f"measure {info.name!r} is filed under {name!r}")
    return dict(given)


def absent(
    layout: HeadLayout, measures: Mapping[str, MeasureInfo], given: Mapping[str, Mapping[SiteKey, str]]
) -> dict[str, dict[SiteKey, str]]:
    """The reasons why a measure is not given at a site, each with a known measure, a known site and words."""
    known = {site.key for site in layout.sites}
    for name, reasons in given.items():
        if name not in measures:
            raise InputError(f"absent names measure {name!r}, which is not in the table")
        for key, reason in reasons.items():
            if key not in known:
                raise InputError(f"absent[{name!r}] names site {key}, which is not in the layout")
            if not isinstance(reason, str) or not reason.strip():
                raise InputError(f"absent[{name!r}] at site {key} needs a reason in words")
    return {name: dict(reasons) for name, reasons in given.items() if reasons}


def values(
    measures: Mapping[str, MeasureInfo],
    absent: Mapping[str, Mapping[SiteKey, str]],
    heads: tuple[HeadId, ...],
    given: Mapping[tuple[str, RowClass], Moments],
) -> Values:
    """The moments of every measure and class of rows, over these heads; none where a measure is absent."""
    for key in given:
        if not (isinstance(key, tuple) and len(key) == 2 and key[0] in measures and key[1] in ROW_CLASSES):
            raise InputError(f"values has the key {key!r}: keys are (measure of the table, 'token' or 'special')")
    out: Values = {}
    for name in measures:
        if (name, "token") not in given:
            raise InputError(f"values has no moments for measure {name!r} over rows of real tokens")
        for rows in ROW_CLASSES:
            moments = given.get((name, rows))
            moments = Moments.empty(len(heads)) if moments is None else moments
            if not isinstance(moments, Moments):
                raise InputError(f"values[{name!r}, {rows!r}] must be Moments, not {type(moments).__name__}")
            if len(moments) != len(heads):
                raise InputError(f"values[{name!r}, {rows!r}] is over {len(moments)} heads; the table has {len(heads)}")
            reasons = absent.get(name)
            if reasons:
                for at in np.flatnonzero(moments.count):
                    if heads[at].site in reasons:
                        raise InputError(
                            f"measure {name!r} is declared absent at site {heads[at].site} but has "
                            f"{moments.count[at]} {rows} rows there"
                        )
            out[name, rows] = moments
    return out


def group(groups: tuple[tuple[str, str], ...], stack: str | None, kind: str | None) -> tuple[str, str]:
    """The one (stack, kind) of ``groups`` that is meant."""
    fits = [pair for pair in groups if stack in (None, pair[0]) and kind in (None, pair[1])]
    if len(fits) == 1:
        return fits[0]
    listed = ", ".join(f"({s}, {k})" for s, k in fits or groups) or "none"
    if not fits:
        raise InputError(f"the table has no heads of stack {stack!r} and kind {kind!r}; it has {listed}")
    raise InputError(f"stack={stack!r}, kind={kind!r} fits several: {listed}; name both")

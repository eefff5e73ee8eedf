"""From what observers collected to the table of heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwise.errors import MeasureError
from headwise.heads import HeadTable, Moments, RowClass
from headwise.layout import HeadLayout, SiteKey
from headwise.measures.observing import MeasureObserver

__all__ = ["table_of"]

_CLASSES: tuple[RowClass, ...] = ("token", "special")


def table_of(
    layout: HeadLayout,
    observer: MeasureObserver,
    *,
    model: str | None = None,
    weight_hash: str | None = None,
    parts: Sequence[str] = (),
) -> HeadTable:
    """The table over every head of ``layout`` from what ``observer`` saw.

    Args:
        layout: the layout of the model that was run.
        observer: an observer that has looked on at its forward passes.
        model, weight_hash: which model, for :meth:`HeadTable.merge` and :meth:`HeadTable.compare`.
        parts: names of the pieces of data.

    Raises:
        MeasureError: no attention call was seen at all, or a site of the layout was never called.
    """
    lacking = observer.finish()
    if not observer.sites:
        raise MeasureError("no attention was computed while headwise looked on; run the model on at least one passage")
    seen = {site.key: moments for site, moments in observer.sites.items()}
    silent = [site.key for site in layout.sites if site.key not in seen]
    if silent:
        raise MeasureError(
            f"{len(silent)} of {len(layout.sites)} attention sites were never called, the first is {silent[0]}; the "
            "inputs do not reach them (a decoder needs decoder_input_ids, a vision tower needs pixel_values): give "
            "inputs that do"
        )
    values: dict[tuple[str, RowClass], Moments] = {}
    infos = {measure.name: measure.info for measure in observer.measures}
    for name in infos:
        for row_class in _CLASSES:
            parts_of = [seen[site.key].of(name, row_class) for site in layout.sites]
            values[name, row_class] = _joined(parts_of)
    absent: dict[str, dict[SiteKey, str]] = {
        name: {site.key: reason for site, reason in sites.items()} for name, sites in lacking.items() if sites
    }
    return HeadTable.build(layout, infos, values, absent=absent, model=model, weight_hash=weight_hash, parts=parts)


def _joined(parts: Sequence[Moments]) -> Moments:
    return Moments(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("count", "mean", "m2")))

"""A table of roles as a table of heads, for what works on those: reports, plans, comparisons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from headwise.heads import HeadTable, MeasureInfo, Moments, RowClass
from headwise.layout import HeadLayout

if TYPE_CHECKING:
    from headwise.measures.roles.table import RoleTable

__all__ = ["table_of_heads"]


def table_of_heads(table: RoleTable, layout: HeadLayout) -> HeadTable:
    """Two pooled measures per role; heads without a row have none."""
    at = {head: index for index, head in enumerate(layout.heads())}
    infos: dict[str, MeasureInfo] = {}
    values: dict[tuple[str, RowClass], Moments] = {}
    for role in table.roles:
        weight, share = (np.full(len(at), np.nan) for _ in range(2))
        for one in table[role]:
            weight[at[one.head]], share[at[one.head]] = one.score, one.share
        for what, number, said in (
            ("weight", weight, "mean weight on its key"),
            ("share", share, "share of rows whose largest weight is on its key"),
        ):
            name = _column(role, what, infos)
            infos[name] = MeasureInfo(name, what, 0.0, 1.0, None, f"Role {role}: {said}.", pooled=True)
            has = ~np.isnan(number)
            values[name, "token"] = Moments(has.astype(np.float64), number, np.where(has, 0.0, np.nan))
    return HeadTable.build(layout, infos, values, model=table.model, weight_hash=table.weight_hash, parts=table.parts)


def _column(role: str, what: str, taken: dict[str, MeasureInfo]) -> str:
    """A column's name: lower-case letters, digits and underscores, each once."""
    plain = re.sub("[^a-z0-9]+", "_", role.lower()).strip("_")
    name, again = f"role_{plain}_{what}", 2
    while name in taken:
        name, again = f"role_{plain}_{again}_{what}", again + 1
    return name

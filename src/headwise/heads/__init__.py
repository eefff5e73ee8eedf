"""Numbers per head: the table, what a measure is, and sums that can be merged.

Nothing here knows a model or torch. A :class:`HeadTable` holds, for every head and every
measure, the number of rows, their mean and their spread, for real tokens and for special
tokens apart; it sorts, selects, compares, merges, saves and loads.
"""

from __future__ import annotations

from headwise.heads._compare import Comparison as Comparison
from headwise.heads._measure import MeasureInfo as MeasureInfo
from headwise.heads._measure import RowClass as RowClass
from headwise.heads._moments import Moments as Moments
from headwise.heads._row import HeadRow as HeadRow
from headwise.heads._row import Stat as Stat
from headwise.heads._table import HeadTable as HeadTable

__all__ = ["Comparison", "HeadRow", "HeadTable", "MeasureInfo", "Moments", "RowClass", "Stat"]

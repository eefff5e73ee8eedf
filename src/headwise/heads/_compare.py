"""Two tables side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.errors import InputError
from headwise.heads._measure import MeasureInfo
from headwise.heads._merge import same_definitions, same_layout, same_measures, same_weights
from headwise.heads._moments import Floats
from headwise.layout import HeadId

if TYPE_CHECKING:
    import pandas as pd

    from headwise.heads._table import HeadTable


@dataclass(frozen=True, eq=False)
class Comparison:
    """The heads and measures that two tables have in common, and how far apart they are.

    Attributes:
        left, right: the two tables, cut to the common heads in the same order.
        measures: the common measures.
        only_left, only_right: heads that one table has and the other has not.
        measures_only_left, measures_only_right: measures that one table has and the other has not.
    """

    left: HeadTable
    right: HeadTable
    measures: dict[str, MeasureInfo]
    only_left: tuple[HeadId, ...]
    only_right: tuple[HeadId, ...]
    measures_only_left: tuple[str, ...]
    measures_only_right: tuple[str, ...]

    @property
    def heads(self) -> tuple[HeadId, ...]:
        """The common heads, in the order of the first table."""
        return self.left.heads

    def difference(self, measure: str) -> Floats:
        """Second minus first, means over rows of real tokens, (heads,); NaN where either is missing."""
        self._known(measure)
        with np.errstate(invalid="ignore"):
            out: Floats = self.right.mean(measure) - self.left.mean(measure)
        return out

    def largest(self, measure: str, n: int = 10) -> list[tuple[HeadId, float]]:
        """The ``n`` heads that differ most, with the difference; those that are missing on a side never."""
        difference = self.difference(measure)
        order = np.argsort(-np.abs(difference), kind="stable")
        return [(self.heads[at], float(difference[at])) for at in order if not np.isnan(difference[at])][:n]

    def to_pandas(self) -> pd.DataFrame:
        """One line per common head: its place, then ``<measure>_first``, ``_second`` and ``_difference``."""
        import pandas as pd

        from headwise.heads._show import key_columns

        columns: dict[str, Any] = dict(key_columns(self.left))
        for name in self.measures:
            columns[f"{name}_first"] = self.left.mean(name)
            columns[f"{name}_second"] = self.right.mean(name)
            columns[f"{name}_difference"] = self.difference(name)
        return pd.DataFrame(columns)

    def __len__(self) -> int:
        return len(self.heads)

    def __repr__(self) -> str:
        lines = [f"Comparison: {len(self)} heads in both, {len(self.only_left)} + {len(self.only_right)} in one only"]
        for name in self.measures:
            top = self.largest(name, 1)
            said = f"largest difference {top[0][1]:+.4g} at {top[0][0]}" if top else "nothing to compare"
            lines.append(f"  {name}: {said}")
        return "\n".join(lines)

    def _known(self, measure: str) -> None:
        if measure not in self.measures:
            raise InputError(f"measure {measure!r} is not in both tables; these are: {', '.join(self.measures)}")


def compare(left: HeadTable, right: HeadTable, *, different_models: bool, different_measures: bool) -> Comparison:
    """See :meth:`HeadTable.compare`."""
    if not isinstance(right, type(left)):
        raise InputError(f"a table can only be compared with a HeadTable, not with {type(right).__name__}")
    if not different_models:
        hint = "; pass different_models=True to compare the heads that both have"
        same_weights(left, right, "compare", hint)
        same_layout(left.layout, right.layout, "compare", hint)
    if different_measures:
        same_definitions(left, right, "compare")
    else:
        same_measures(left, right, "compare", "; pass different_measures=True to compare the measures that both have")
    common = [head for head in left.heads if head in right]
    if not common:
        raise InputError("cannot compare: the tables have no head in common (same stack, kind, module, call and index)")
    measures = {name: info for name, info in left.measures.items() if name in right.measures}
    if not measures:
        raise InputError("cannot compare: the tables have no measure in common")
    return Comparison(
        left=left.select(heads=common),
        right=right._take(np.array([right._at[head] for head in common], np.int64)),
        measures=measures,
        only_left=tuple(head for head in left.heads if head not in right),
        only_right=tuple(head for head in right.heads if head not in left),
        measures_only_left=tuple(name for name in left.measures if name not in right.measures),
        measures_only_right=tuple(name for name in right.measures if name not in left.measures),
    )

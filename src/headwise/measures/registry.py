"""The measures that have a name, and what a caller's list of names and instances means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from headwise.errors import InputError
from headwise.measures.measure import Measure, PooledMeasure, RowMeasure, WeightMeasure
from headwise.measures.pattern import PATTERN
from headwise.measures.rank import SCORE_RANKS, WEIGHT_RANKS
from headwise.measures.replaceable import REPLACEABLE
from headwise.measures.spread import LogitSpread

__all__ = ["GROUPS", "MEASURES", "Asked", "resolve"]

#: A name of a measure or of a group, an instance, or several of these; None is the group ``"pattern"``.
Asked: TypeAlias = str | Measure | Iterable[str | Measure] | None

#: Measures that are asked for together by one name.
GROUPS: Final[Mapping[str, tuple[Measure, ...]]] = MappingProxyType(
    {
        "pattern": PATTERN,
        "rank": (*WEIGHT_RANKS, *SCORE_RANKS),
        "replaceable": REPLACEABLE,
        "spread": (LogitSpread(),),
    }
)

#: Every measure with a name of its own, in the order of the reference page.
MEASURES: Final[Mapping[str, Measure]] = MappingProxyType(
    {measure.name: measure for group in GROUPS.values() for measure in group}
)


def resolve(asked: Asked = None) -> tuple[Measure, ...]:
    """The measures that a caller means, each once.

    Args:
        asked: names of measures, names of groups (``"pattern"``, ...), or instances; None for the default.

    Raises:
        InputError: an unknown name (with the nearest one), something that is no measure, or two different measures
            of one name.

    Example:
        >>> [measure.name for measure in resolve(["entropy", "max_weight"])]
        ['entropy', 'max_weight']
    """
    listed: Sequence[object] = _listed("pattern" if asked is None else asked)
    found: dict[str, Measure] = {}
    for one in listed:
        for measure in _meant(one):
            if found.setdefault(measure.name, measure) != measure:
                raise InputError(f"measures holds two different measures named {measure.name!r}; rename one")
    if not found:
        raise InputError("measures is empty; name at least one, or leave it out for the default")
    return tuple(found.values())


def _listed(asked: object) -> list[object]:
    if isinstance(asked, str | Measure):
        return [asked]
    if isinstance(asked, Iterable):
        return list(asked)
    raise InputError(f"measures must be names or measures, and is a {type(asked).__name__}")


def _meant(one: object) -> tuple[Measure, ...]:
    if isinstance(one, str):
        if one in GROUPS:
            return GROUPS[one]
        if one in MEASURES:
            return (MEASURES[one],)
        known = [*GROUPS, *MEASURES]
        near = difflib.get_close_matches(one, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise InputError(f"measures: there is no measure {one!r}; {hint}")
    if isinstance(one, type) and issubclass(one, Measure):
        raise InputError(f"measures holds the class {one.__name__}; give an instance, {one.__name__}()")
    if not isinstance(one, RowMeasure | PooledMeasure | WeightMeasure):
        raise InputError(
            f"measures holds a {type(one).__name__}; give names, or instances of RowMeasure, PooledMeasure "
            "or WeightMeasure"
        )
    one.info  # noqa: B018  (refuses a name or a range that a table cannot have)
    return (one,)

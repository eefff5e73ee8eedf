"""Looks on at the attention calls of a model and collects measures for every head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from headwise.data import Batch
from headwise.errors import MeasureError
from headwise.heads import RowClass
from headwise.kernels import Problem, Wanted
from headwise.layout import Site
from headwise.measures.measure import HeadValues, Look, Measure, PooledMeasure, RowMeasure, Sums, WeightMeasure
from headwise.measures.moments import SiteMoments
from headwise.measures.pattern import PATTERN, WeightOn
from headwise.measures.weights import HeadWeights
from headwise.models import AttentionCall
from headwise.trace import PADDING, SPECIAL, TOKEN, row_kinds

__all__ = ["MeasureObserver", "PatternObserver"]

_KINDS: Final[tuple[tuple[RowClass, int], ...]] = (("token", TOKEN), ("special", SPECIAL))
_NEVER_SEEN: Final = "no row may see this key"
_NO_ROWS: Final = "no row has a value here"


class MeasureObserver:
    """Collects measures for every head that computes attention while it looks on.

    Use it with :func:`headwise.trace.run` and :func:`headwise.measures.table_of`, or through :func:`headwise.scan`.

    Args:
        measures: which ones; the ten of :data:`~headwise.measures.PATTERN` by default.
    """

    def __init__(self, measures: Sequence[Measure] = PATTERN) -> None:
        self.measures = tuple(measures)
        self.sites: dict[Site, SiteMoments] = {}
        self.absent: dict[str, dict[Site, str]] = {measure.name: {} for measure in measures}
        self._rows = [measure for measure in measures if isinstance(measure, RowMeasure)]
        self._pooled = [measure for measure in measures if isinstance(measure, PooledMeasure)]
        self._weights: dict[str, HeadWeights] = {}
        self._states: dict[Site, list[tuple[Sums[Any], Any]]] = {}
        self._asked: dict[str, tuple[Tensor, slice] | None] = {}

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted:  # noqa: ARG002
        """What the measures need of a call, joined into one."""
        wishes: list[Wanted] = []
        self._asked, start = {}, 0
        for measure in self._rows:
            reason = measure.applies(site)
            if reason is not None:
                self.absent[measure.name][site] = reason
                continue
            wish = measure.wants(site, problem)
            part = None
            if wish.pairs is not None:
                part = (wish.pairs, slice(start, start + wish.pairs.shape[0]))
                start += wish.pairs.shape[0]
            self._asked[measure.name] = part
            wishes.append(wish)
        return _joined(wishes)

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Fold one call's rows into the moments of its heads."""
        weights = self._weights.setdefault(call.block.module, HeadWeights(call.module, call.block))
        kinds = row_kinds(call.site, call.problem, batch)
        look = Look(call, kinds, batch, weights)
        self._see_rows(look)
        for measure in self._pooled:
            reason = measure.applies(call.site)
            if reason is not None:
                self.absent[measure.name][call.site] = reason
        self._add(look)

    def _see_rows(self, look: Look) -> None:
        call, values = look.call, {}
        for measure in self._rows:
            if measure.name not in self._asked:
                continue
            value = measure(self._with_pairs(look, self._asked[measure.name]))
            if isinstance(value, str):
                self.absent[measure.name][call.site] = value
            else:
                values[measure.name] = _checked(measure, value, call)
        heads, names = call.problem.q.shape[1], tuple(measure.name for measure in self.measures)
        moments = self.sites.setdefault(call.site, SiteMoments(heads, names))
        rows = call.answer.rows
        sees = torch.ones_like(look.kinds, dtype=torch.bool)[:, None] if rows is None else rows.visible > 0
        sees = sees.expand(call.z.shape[:3])
        for row_class, kind in _KINDS:
            moments.add(row_class, values, sees & (look.kinds == kind)[:, None, :])

    def _with_pairs(self, look: Look, part: tuple[Tensor, slice] | None) -> Look:
        if part is None:
            return look
        rows = look.call.answer.rows
        assert rows is not None
        assert rows.pairs is not None
        return Look(look.call, look.kinds, look.batch, look.weights, part[0], rows.pairs[part[1]])

    def _add(self, look: Look) -> None:
        """Add the call to the sums of the pooled measures, each kind of sums once."""
        if not bool((look.kinds != PADDING).any()):
            return
        states = self._states.setdefault(look.site, [])
        done: list[Sums[Any]] = []
        for measure in self._pooled:
            if look.site in self.absent[measure.name]:
                continue
            known = next((at for at, (sums, _) in enumerate(states) if sums == measure.sums), None)
            if any(sums == measure.sums for sums in done):
                continue
            done.append(measure.sums)
            found = measure.sums.of(look)
            if isinstance(found, str):
                for other in self._pooled:
                    if other.sums == measure.sums:
                        self.absent[other.name][look.site] = found
            elif known is None:
                states.append((measure.sums, found))
            else:
                states[known] = (measure.sums, measure.sums.join(states[known][1], found))

    def finish(self) -> dict[str, dict[Site, str]]:
        """Compute what is a number per head, and say why a measure has no value at a site; it may be called again."""
        absent = {name: dict(reasons) for name, reasons in self.absent.items()}
        self._prepare()
        for site, moments in self.sites.items():
            for measure in self.measures:
                reason = absent[measure.name].get(site) or self._lacking(measure, site, moments)
                if reason is not None:
                    absent[measure.name][site] = reason
        return absent

    def _prepare(self) -> None:
        for measure in self.measures:
            if isinstance(measure, WeightMeasure):
                measure.prepare(list(self._weights.values()))
            elif isinstance(measure, PooledMeasure):
                every = (pair for states in self._states.values() for pair in states)
                measure.prepare([state for sums, state in every if sums == measure.sums])

    def _lacking(self, measure: Measure, site: Site, moments: SiteMoments) -> str | None:
        if isinstance(measure, RowMeasure):
            if moments.any_rows(measure.name):
                return None
            return _NEVER_SEEN if isinstance(measure, WeightOn) else _NO_ROWS
        value = self._of_heads(measure, site)
        if isinstance(value, str):
            return value
        moments.set(measure.name, value)
        return None

    def _of_heads(self, measure: Measure, site: Site) -> HeadValues:
        reason = measure.applies(site)
        if reason is not None:
            return reason
        if isinstance(measure, WeightMeasure):
            return measure(self._weights[site.block])
        assert isinstance(measure, PooledMeasure)
        state = next((state for sums, state in self._states.get(site, []) if sums == measure.sums), None)
        return _NO_ROWS if state is None else measure(state)


#: Collects the ten pattern measures: ``PatternObserver()``.
PatternObserver: Callable[[], MeasureObserver] = MeasureObserver


def _joined(wishes: Sequence[Wanted]) -> Wanted:
    pairs = [wish.pairs for wish in wishes if wish.pairs is not None]
    batch = max((one.shape[1] for one in pairs), default=1)
    return Wanted(
        rows=any(wish.rows for wish in wishes),
        distance=any(wish.distance for wish in wishes),
        pairs=torch.cat([one.expand(-1, batch, -1) for one in pairs]) if pairs else None,
        weights=any(wish.weights for wish in wishes),
    )


def _checked(
    measure: RowMeasure, value: Tensor | tuple[Tensor, Tensor], call: AttentionCall
) -> tuple[Tensor, Tensor | None]:
    """A measure's value and the rows that have one, refused unless it is one number per row and head."""
    number, has = value if isinstance(value, tuple) else (value, None)
    expected = tuple(call.z.shape[:3])
    if not isinstance(number, Tensor) or tuple(number.shape) != expected:
        said = tuple(number.shape) if isinstance(number, Tensor) else type(number).__name__
        raise MeasureError(
            f"measure {measure.name!r} gave {said} at {call.site.key}; a row measure gives one number per batch entry, "
            f"head and query row, {expected}"
        )
    if has is not None and has.dtype != torch.bool:
        raise MeasureError(
            f"measure {measure.name!r}: which rows have a value is said by a bool tensor, not {has.dtype}"
        )
    return number, has

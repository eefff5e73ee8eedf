"""What is tried: a measure of a scan, or a function that gives a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.data import PADDING, batches
from headwise.errors import MeasureError
from headwise.heads import HeadTable, MeasureInfo
from headwise.kernels import Problem, Wanted
from headwise.layout import Site
from headwise.measures.conformance.comparing import CLOSE
from headwise.measures.measure import (
    HeadValues,
    Look,
    Measure,
    PooledMeasure,
    RowMeasure,
    RowValues,
    Sums,
    WeightMeasure,
)
from headwise.measures.observing import MeasureObserver
from headwise.measures.table import table_of
from headwise.measures.weights import HeadWeights
from headwise.models import Model
from headwise.trace import run

__all__ = ["Function", "Subject", "Tables", "Watched", "subject_of"]

#: ``function(model, inputs, batch_size=...) -> HeadTable``.
Tables = Callable[..., HeadTable]


class Subject:
    """Something that makes a table of a model and data."""

    name: str
    #: how far numbers that should be the same may lie apart, relative to the measure's largest value over heads
    close: float = CLOSE

    def table(self, model: Model, inputs: Sequence[Any], *, batch_size: int = 8, seed: int = 0) -> HeadTable:
        """The table; global random numbers begin at ``seed``."""
        raise NotImplementedError


class Function(Subject):
    """A function that makes the table by itself, such as an importance."""

    def __init__(self, function: Tables) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def table(self, model: Model, inputs: Sequence[Any], *, batch_size: int = 8, seed: int = 0) -> HeadTable:
        """What the function gives."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = self._function(model, list(inputs), batch_size=batch_size)
        if not isinstance(found, HeadTable):
            raise MeasureError(f"{self.name} gave a {type(found).__name__}, not a HeadTable")
        return found


class Watched(Subject):
    """A measure of a scan, whose every value is looked at.

    Attributes:
        foreign: values are computed while new tensors are made on the meta device by default, so that a tensor made
            without saying where meets the others as on an accelerator.
        seen: what was wrong with single values.
    """

    def __init__(self, measure: Measure, foreign: bool = False) -> None:
        self.name, self.measure, self.foreign = measure.name, measure, foreign
        self.seen: list[str] = []

    def table(self, model: Model, inputs: Sequence[Any], *, batch_size: int = 8, seed: int = 0) -> HeadTable:
        """The table of a traced run."""
        observer = MeasureObserver((_inside(self),))
        data = batches(model, list(inputs), batch_size=batch_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            run(model, data, [observer])
            parts = [str(hash(tuple(map(str, inputs))))]
            return table_of(model.layout, observer, model=model.name, parts=parts)

    def check(self, info: MeasureInfo, value: Tensor, has: Tensor, where: str) -> None:
        """Note values out of range, NaN, or on another device."""
        if value.device.type == "meta":
            self.seen.append(f"{where}: the value is on the meta device: a tensor was made without device=")
            return
        values = value.detach()[has.expand_as(value)]
        low, high = -torch.inf if info.low is None else info.low, torch.inf if info.high is None else info.high
        slack = 1e-6 * max(1.0, abs(low) if info.low is not None else 0, abs(high) if info.high is not None else 0)
        if not bool(torch.isfinite(values).all()):
            self.seen.append(f"{where}: a value is {float(values[~torch.isfinite(values)][0])}")
        elif len(values) and (float(values.min()) < low - slack or float(values.max()) > high + slack):
            self.seen.append(
                f"{where}: values from {float(values.min()):.6g} to {float(values.max()):.6g}, stated is {info.low} to "
                f"{info.high}"
            )


def subject_of(measure: Measure | Tables, close: float = CLOSE) -> Subject:
    """The subject of a measure or a function."""
    subject = Watched(measure) if isinstance(measure, Measure) else Function(measure)
    subject.close = close
    return subject


def _inside(subject: Watched) -> Measure:
    measure = subject.measure
    described: dict[str, Any] = {
        "name": measure.name,
        "unit": measure.unit,
        "low": measure.low,
        "high": measure.high,
        "better": measure.better,
        "description": measure.description,
        "source": measure.source,
    }
    if isinstance(measure, RowMeasure):
        return _Rows(**described, inner=measure, subject=subject)
    if isinstance(measure, PooledMeasure):
        sums = _Sums(measure.sums, subject.foreign)
        return _Pooled(**described, inner=measure, subject=subject, sums=sums)
    assert isinstance(measure, WeightMeasure)
    return _Weights(**described, inner=measure, subject=subject)


def _abroad(foreign: bool) -> Any:
    return torch.device("meta") if foreign else torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _Rows(RowMeasure):
    inner: RowMeasure
    subject: Watched = field(compare=False)

    def applies(self, site: Site) -> str | None:
        return self.inner.applies(site)

    def wants(self, site: Site, problem: Problem) -> Wanted:
        with _abroad(self.subject.foreign):
            return self.inner.wants(site, problem)

    def __call__(self, look: Look) -> RowValues:
        with _abroad(self.subject.foreign):
            found = self.inner(look)
        if isinstance(found, str):
            return found
        value, has = found if isinstance(found, tuple) else (found, torch.ones(1, 1, 1, dtype=torch.bool))
        if value.shape == look.call.z.shape[:3] and has.device.type != "meta":
            rows = look.call.answer.rows
            sees = rows.visible > 0 if rows is not None else torch.ones(1, 1, 1, dtype=torch.bool)
            counted = has.to(value.device) & (look.kinds != PADDING)[:, None, :] & sees
            self.subject.check(self.info, value, counted, str(look.site.key))
        if value.device.type == "meta" or has.device.type == "meta":
            self.subject.check(self.info, torch.empty(0, device="meta"), has, str(look.site.key))
            return torch.zeros(look.call.z.shape[:3])
        return found


@dataclass(frozen=True)
class _Sums(Sums[Any]):
    inner: Sums[Any]
    foreign: bool

    def of(self, look: Look) -> Any:
        with _abroad(self.foreign):
            return self.inner.of(look)

    def join(self, left: Any, right: Any) -> Any:
        return self.inner.join(left, right)


@dataclass(frozen=True, kw_only=True)
class _Pooled(PooledMeasure):
    inner: PooledMeasure
    subject: Watched = field(compare=False)

    def applies(self, site: Site) -> str | None:
        return self.inner.applies(site)

    def __call__(self, state: Any) -> HeadValues:
        found = self.inner(state)
        if not isinstance(found, str):
            self.subject.check(self.info, found, ~torch.isnan(found), self.name)
        return found


@dataclass(frozen=True, kw_only=True)
class _Weights(WeightMeasure):
    inner: WeightMeasure
    subject: Watched = field(compare=False)

    def applies(self, site: Site) -> str | None:
        return self.inner.applies(site)

    def __call__(self, weights: HeadWeights) -> HeadValues:
        found = self.inner(weights)
        if not isinstance(found, str):
            self.subject.check(self.info, found, ~torch.isnan(found), weights.block.module)
        return found

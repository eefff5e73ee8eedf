"""What every verb that runs a model over data does first: open the model, open the data, look through it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from headwise.artifacts import run_document
from headwise.data import Batch, Batches, batches
from headwise.errors import InputError
from headwise.models import Model, as_model, load
from headwise.verbs.facts import BackendLog, facts_of
from headwise.verbs.forecast import Bar, Forecast
from headwise.verbs.sources import Survey, look_through, source_of

__all__ = ["Prepared", "Source", "opened", "prepare"]

_LOADING = frozenset(signature(load).parameters) - {"path_or_id"}


@dataclass(frozen=True)
class Source:
    """Where passages come from and how they are cut; the options of :func:`headwise.scan` of the same names."""

    texts: Any = None
    inputs: Any = None
    field: str | None = None
    target_field: str | None = None
    window: int | None = None
    max_length: int | None = None
    limit: int | None = None
    batch_size: int = 8


@dataclass(frozen=True)
class Prepared:
    """A model and data that were found to go together.

    Attributes:
        model: with an example of the data.
        data: batches, as often as wanted.
        survey: what a look through the data found.
        asked: the arguments, as ``run.json`` records them.
        shown: shows progress and says what the run will need.
        log: which backends ran.
    """

    model: Model
    data: Batches
    survey: Survey
    asked: dict[str, Any]
    shown: Forecast
    log: BackendLog = field(default_factory=BackendLog)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Model and data, for tables: ``model``, ``weight_hash`` and ``parts``."""
        return {
            "model": self.model.name,
            "weight_hash": self.model.source.weight_hash,
            "parts": [self.survey.digest],
        }

    def first(self) -> Batch:
        """The first batch."""
        return next(iter(self.data))

    def document(self, *, seed: int, seconds: float, notes: Sequence[str] = (), **asked: Any) -> dict[str, Any]:
        """``run.json`` of a verb with these further arguments and notes."""
        found = facts_of(self.model, self.survey.facts, self.log, self.shown.warnings)
        found["notes"] = [*found["notes"], *notes]
        return run_document(**found, arguments={**self.asked, **asked}, seed=seed, seconds=seconds)


def prepare(
    model: str | Path | nn.Module | Model,
    source: Source,
    loading: Mapping[str, Any],
    *,
    progress: Bar | None = None,
    notice: Callable[[str], None] | None = None,
) -> Prepared:
    """Open model and data and look through the data once.

    Raises:
        InputError: an argument breaks its rule, or the data cannot be read.
        ModelError: the model cannot be loaded or is not understood.
    """
    passages, asked = source_of(
        source.texts, source.inputs, window=source.window, field=source.field, target_field=source.target_field
    )
    handle = opened(model, loading)
    data = batches(handle, passages, batch_size=source.batch_size, max_length=source.max_length, limit=source.limit)
    survey = look_through(data, progress)
    handle = handle if handle.example is not None else replace(handle, example=survey.example)
    shown = Forecast(handle, survey.facts, source.batch_size, progress, notice)
    asked |= {"batch_size": source.batch_size, "max_length": source.max_length, "limit": source.limit}
    return Prepared(handle, data, survey, asked, shown)


def opened(model: str | Path | nn.Module | Model, loading: Mapping[str, Any]) -> Model:
    """A model by path or id, loaded with these options; or the one in memory.

    Raises:
        InputError: an option that does not exist, or options of loading for a model in memory.
        ModelError: it cannot be loaded.
    """
    unknown = sorted(set(loading) - _LOADING)
    if unknown:
        raise InputError(
            f"{', '.join(unknown)}: there is no such argument; beside those in its signature, this function takes the "
            f"options of headwise.load: {', '.join(sorted(_LOADING))}"
        )
    if isinstance(model, str | Path):
        return load(model, **loading)
    given = {name: value for name, value in loading.items() if value is not None}
    if given:
        raise InputError(
            f"{', '.join(sorted(given))}: options of loading, for a model given by path or id; this model is in "
            "memory: load or move it yourself, or leave the options out"
        )
    return as_model(model)

"""Measure every head of a model on data: the verb behind ``hw.scan`` and ``headwise scan``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.artifacts import check_folder, run_document, write_run
from headwise.data import batches
from headwise.heads import HeadTable
from headwise.measures import Asked, MeasureObserver, resolve, table_of
from headwise.models import Model
from headwise.reports import write_report
from headwise.trace import run
from headwise.verbs.facts import BackendLog, facts_of
from headwise.verbs.forecast import Bar, Forecast
from headwise.verbs.prepared import opened
from headwise.verbs.seeding import check_seed
from headwise.verbs.sources import look_through, source_of

__all__ = ["ScanResult", "scan", "scan_run"]


@dataclass(frozen=True)
class ScanResult:
    """What a scan gave.

    Attributes:
        table: a number per head and measure.
        run: the facts of the run, as in ``run.json`` (docs/format.md).
        folder: the run folder, or None where none was asked for.
    """

    table: HeadTable
    run: dict[str, Any]
    folder: Path | None


def scan(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    **options: Any,
) -> HeadTable:
    """Measure every head of ``model`` on ``texts``; the table of :func:`scan_run`, which lists the options.

    Example:
        >>> import headwise as hw, torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        ...                      num_key_value_heads=2, vocab_size=31)
        >>> table = hw.scan(hw.wrap(LlamaModel(config)), inputs=[{"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}])
        >>> len(table), bool((table["entropy"] >= 0).all())
        (8, True)
    """
    return scan_run(model, texts, **options).table


def scan_run(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    *,
    inputs: Any = None,
    measures: Asked = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    field: str | None = None,
    target_field: str | None = None,
    window: int | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    backend: str | None = None,
    progress: Bar | None = None,
    notice: Callable[[str], None] | None = None,
    **loading: Any,
) -> ScanResult:
    """Measure every head of every attention layer of ``model`` on data, and write a run folder if asked.

    No matrix of queries times keys is built that the model does not build itself. The model runs in eval mode, without
    gradients and without its output head where that can be left out, and is as it was afterwards.

    Args:
        model: a folder, the id of a model in the local cache, a module, or what :func:`headwise.load` gave.
        texts: a file or several (.txt, .jsonl, .csv, .parquet), strings, or an iterable of strings.
        inputs: instead of texts, ready inputs: a .jsonl or .safetensors file, or an iterable of mappings from
            the model's input names to tensors.
        measures: names of measures or of groups (:data:`headwise.measures.GROUPS`), or instances; the ten of the group
            ``"pattern"`` by default.
        output: folder for run.json, heads.json and report.html; None writes nothing.
        overwrite: replace a finished run in ``output``.
        field, target_field: column of the text, and of the decoder's text.
        window: cut long text into windows of so many tokens.
        max_length: cut longer passages to so many tokens; what was cut is counted.
        limit: read only the first so many passages.
        batch_size: passages in a forward pass; changes no number.
        seed: recorded, and set while the model runs; the measures draw nothing at random.
        backend: force one attention backend instead of the best that can do each call.
        progress: shows progress, called as ``progress(done, total, stage)``.
        notice: takes sentences for people: what the run will need and how long it will take.
        **loading: for a model given by path or id, the options of :func:`headwise.load`.

    Returns:
        The table, the facts of the run, and the folder.

    Raises:
        InputError: an argument breaks its rule, or the data cannot be read (``DataError``).
        ModelError: the model cannot be loaded or is not understood (``UnsupportedError``).
        RunError: ``output`` cannot be written, or holds a finished run.
    """
    started = time.monotonic()
    check_seed(seed)
    taken = resolve(measures)
    if output is not None:
        check_folder(output, overwrite=overwrite)
    source, asked = source_of(texts, inputs, window=window, field=field, target_field=target_field)
    handle = opened(model, loading)
    data = batches(handle, source, batch_size=batch_size, max_length=max_length, limit=limit)
    survey = look_through(data, progress)
    handle = handle if handle.example is not None else replace(handle, example=survey.example)
    shown = Forecast(handle, survey.facts, batch_size, progress, notice)
    observer, log = MeasureObserver(taken), BackendLog()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        run(handle, data, [observer, log], backend=backend, progress=shown)
    if measures is not None:
        asked["measures"] = [measure.name for measure in taken]
    asked |= {"batch_size": batch_size, "max_length": max_length, "limit": limit, "backend": backend}
    weights = handle.source.weight_hash
    table = table_of(handle.layout, observer, model=handle.name, weight_hash=weights, parts=[survey.digest])
    document = run_document(
        **facts_of(handle, data.facts, log, shown.warnings, weights),
        arguments=asked,
        seed=seed,
        seconds=time.monotonic() - started,
    )
    folder = None
    if output is not None:
        folder = write_run(output, document, table, report=write_report, overwrite=overwrite)
    return ScanResult(table, document, folder)

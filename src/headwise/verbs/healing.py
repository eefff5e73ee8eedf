"""Healing as a verb does it: the calibration text in batches, the notes, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from headwise.errors import InputError
from headwise.models import Model
from headwise.surgery import Healing, heal
from headwise.verbs.forecast import Bar
from headwise.verbs.prepared import Source, prepare

__all__ = ["healed"]


def healed(
    small: Model,
    original: Model,
    texts: Any,
    inputs: Any,
    how: Healing,
    *,
    reading: Mapping[str, Any],
    progress: Bar | None = None,
    notice: Callable[[str], None] | None = None,
) -> Model:
    """A pruned model, trained towards its original on the text; the record says so.

    Raises:
        InputError: there is no text.
        MeasureError: the loss is not finite.
        UnsupportedError: accelerate is not installed.
    """
    if texts is None and inputs is None:
        raise InputError("healing needs text to learn from: give texts (--text FILE) or inputs")
    assert small.surgery is not None
    bar = None if progress is None else (lambda done: progress(done, how.steps, "healing"))
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        ready = prepare(original, Source(texts, inputs, **reading), {}, notice=notice)
        batches = [dict(batch.inputs) for batch in ready.data]
        said = heal(small.module, original.module, batches, how, data=ready.survey.digest, shown=bar)
    if notice is not None and said["last"] > said["first"]:
        notice(
            f"warning: healing made it worse ({said['loss']} {said['first']:.4g} before, {said['last']:.4g} after); "
            "take a lower rate (--heal-rate), more steps, or none"
        )
    record = replace(small.surgery, repair={**small.surgery.repair, "heal": said})
    return replace(small, surgery=record)

"""How long the attention of each layer takes, measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from headwise.data import Batch
from headwise.models import Model
from headwise.surgery.watching import place_of
from headwise.trace import evaluating

__all__ = ["layer_seconds"]


def layer_seconds(model: Model, batches: Sequence[Batch], repeats: int = 3) -> tuple[dict[str, float], float]:
    """Seconds of the attention of every block in one pass over ``batches``, and of the whole pass: medians.

    The place of a block is the smallest module that holds its attention and its output projection.
    """
    blocks = {path: place_of(block) for path, block in model.layout.blocks.items() if block.o_path is not None}
    found: dict[str, list[float]] = {path: [] for path in blocks}
    wholes = []
    for repeat in range(repeats + 1):
        spent = dict.fromkeys(blocks, 0.0)
        whole = _pass(model, batches, blocks, spent)
        if repeat:  # the first pass warms up
            wholes.append(whole)
            for path, value in spent.items():
                found[path].append(value)
    return {path: median(values) for path, values in found.items()}, median(wholes)


def _pass(model: Model, batches: Sequence[Batch], blocks: dict[str, str], spent: dict[str, float]) -> float:
    started: dict[str, float] = {}
    handles = []
    for path, place in blocks.items():
        module = model.module.get_submodule(place)

        def before(_module: Any, _args: Any, path: str = path) -> None:
            started[path] = _now(model)

        def after(_module: Any, _args: Any, _output: Any, path: str = path) -> None:
            spent[path] += _now(model) - started[path]

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        with evaluating(model.module), torch.no_grad():
            begin = _now(model)
            for batch in batches:
                model.module(**{name: value.to(model.device) for name, value in batch.inputs.items()})
            return _now(model) - begin
    finally:
        for handle in handles:
            handle.remove()


def _now(model: Model) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()

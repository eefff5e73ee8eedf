"""The blocks of a model as plans know them: numbers, output projections, costs of sets of heads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.layout import Block, HeadLayout, Projection
from headwise.measures.covariance import Statistics
from headwise.models import Model, output_weight
from headwise.models.restore import unchanged
from headwise.models.switches import lacks_bias, shapes_of, switch_for
from headwise.plans import RIDGE, BlockShape, LayerCost, RunningMeanCost, units_of
from headwise.plans.layer_cost import Repair
from headwise.surgery.averaging import Carriers, uneven_scores
from headwise.surgery.cutting import planned_cuts
from headwise.surgery.proof import first_that_runs
from headwise.surgery.repair import moments_of
from headwise.surgery.trial import tried

__all__ = ["block_shapes", "cuttable", "layer_costs", "output_weights"]


def block_shapes(
    model: Model, seconds: Mapping[str, float] | None = None, *, intercepts: bool = False, uniform: bool = False
) -> list[BlockShape]:
    """Every block of a model in numbers; ``seconds`` of each where they were measured.

    ``intercepts``: the repair gives a bias to output projections that have none. ``uniform``: the counts are to be
    those of a stock checkpoint, where other biases come with it, all of them zero.
    """
    layout = model.layout
    shapes = [
        _shape(model, layout, block, (seconds or {}).get(path), intercepts) for path, block in layout.blocks.items()
    ]
    return _with_zeros(model, shapes) if intercepts and uniform else shapes


def _with_zeros(model: Model, shapes: list[BlockShape]) -> list[BlockShape]:
    """The biases of zero that come with the intercepts counted, too, as if they had been there and went with heads."""
    root, blocks = model.module, model.layout.blocks
    wanted = {f"{one.o.parameter}.bias": (_width(root, one.o),) for one in blocks.values() if one.o}
    wanted = {name: shape for name, shape in wanted.items() if lacks_bias(root, name)}
    switch = switch_for(root, {**shapes_of(root), **wanted}, model.config) if wanted and model.config else None
    if switch is None:
        return shapes
    left, found = dict(switch.zeros), []
    for shape in shapes:
        block = blocks[shape.block]
        q, k, v = (one is not None and f"{one.parameter}.bias" in switch.zeros for one in (block.q, block.k, block.v))
        added = sum(left.pop(name, 0) for name in list(left) if name.startswith(f"{shape.block}."))
        rows, kv_rows = q * block.d_k, k * block.d_k + v * block.d_v
        found.append(
            replace(
                shape,
                per_head=shape.per_head + rows,
                per_kv=shape.per_kv + kv_rows,
                intercept=shape.intercept + added,
            )
        )
    found[0] = replace(found[0], intercept=found[0].intercept + sum(left.values()))  # of other layers, once
    return found


def _shape(model: Model, layout: HeadLayout, block: Block, seconds: float | None, intercepts: bool) -> BlockShape:
    root = model.module
    width = _width(root, block.o) if block.o else 0
    per_head = _rows(root, block.q, block.d_k) + _rows(root, block.gate, block.d_v) + block.d_v * width
    per_head += _beside(root, block)
    added = width if intercepts and block.o and not _has_bias(root, block.o) else 0
    per_kv = _rows(root, block.k, block.d_k) + _rows(root, block.v, block.d_v)
    cached = sum(site.block == block.module and site.key.stack == "decoder" for site in layout.sites)
    if not hasattr(model.config, "use_cache") or block.k is None or block.v is None or "k" in dict(block.partial):
        cached = 0  # none, or a latent of all heads, which stays
    bytes_per_kv = cached * (block.d_k + block.d_v) * model.dtype.itemsize
    return BlockShape(block.module, block.kv_map, per_head, per_kv, added, float(bytes_per_kv), seconds)


def _beside(root: nn.Module, block: Block) -> int:
    """Parameters of one head that its module holds beside the projections: a sink, a scale."""
    own = root.get_submodule(block.module).parameters(recurse=False)
    return sum(value.ndim == 1 and value.shape[0] == block.query_heads > 1 for value in own)


def _rows(root: nn.Module, projection: Projection | None, width: int) -> int:
    """Parameters of one head's rows of a projection."""
    if projection is None:
        return 0
    owner: Any = root.get_submodule(projection.parameter)
    reads = owner.weight.shape[0 if projection.transposed else 1]
    return (projection.width or width) * (int(reads) + _has_bias(root, projection))


def _has_bias(root: nn.Module, projection: Projection) -> bool:
    return getattr(root.get_submodule(projection.parameter), "bias", None) is not None


def _width(root: nn.Module, projection: Projection) -> int:
    owner: Any = root.get_submodule(projection.parameter)
    return int(owner.weight.shape[1 if projection.transposed else 0])


def cuttable(
    model: Model, unit: str, *, running: bool = False, uniform: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Blocks from which a unit can be cut out (``running``: replaced by a running mean), and for the others why not.

    ``uniform``: every key-value head is to lose the same number of its query heads, so one of each is what is tried.
    """
    units_tried: dict[str, tuple[int, ...]] = {}
    reasons: dict[str, str] = {}
    carriers: dict[str, Carriers] = {}
    for shape in block_shapes(model):
        block = model.layout.blocks[shape.block]
        units = units_of(shape, "group" if unit == "group" else "head")
        if not units:  # all its heads have gone before
            continue
        first = _first_of_each(shape) if uniform and unit != "group" else units[0].heads
        try:
            gone = {shape.block: tuple(range(block.query_heads)) if running else first}
            (planned,) = planned_cuts(model.module, {shape.block: block}, gone, gone if running else None)
        except UnsupportedError as error:
            reasons[shape.block] = str(error)
        else:
            units_tried[shape.block] = first
            carriers[shape.block] = planned.carriers
    if running and units_tried:
        with unchanged(model.module):
            inputs, _ = first_that_runs(model, None)
        reasons |= uneven_scores(model, model.layout, carriers, inputs)
    elif not running:
        reasons |= tried(model, units_tried)
    return [path for path in units_tried if path not in reasons], reasons


def _first_of_each(shape: BlockShape) -> tuple[int, ...]:
    """The first query head of every key-value head that several share; the first of all where none is shared."""
    firsts = tuple(group.heads[0] for group in units_of(shape, "group"))
    return firsts if len(firsts) < shape.query_heads else firsts[:1]


def output_weights(model: Model, blocks: Collection[str]) -> dict[str, npt.NDArray[np.float64]]:
    """W_O of each block (H, d_v, d_model)."""
    return {
        path: output_weight(model.module, model.layout.blocks[path]).detach().double().cpu().numpy() for path in blocks
    }


def layer_costs(
    model: Model,
    statistics: Statistics,
    blocks: Collection[str],
    *,
    repair: Repair = "least_squares",
    ridge: float = RIDGE,
    running: bool = False,
) -> tuple[dict[str, LayerCost], list[str]]:
    """What sets of heads cost, by block, and what the reader should know about it.

    ``running``: replaced by running means, which the statistics must hold.

    Raises:
        InputError: the statistics are of other heads.
        MeasureError: they hold no rows, or values that are not finite.
    """
    weights = output_weights(model, blocks)
    energies = {path: _energy(model.layout, path, statistics) for path in blocks}
    known = [value for value in energies.values() if value]
    notes = []
    if len(known) < len(energies):
        missing = next(path for path, value in energies.items() if not value)
        notes.append(
            f"the residual stream at the input of {len(energies) - len(known)} layers was not seen, the first is "
            f"{missing}; the mean of the other layers' energy stands for theirs"
        )
    usual = math.exp(sum(map(math.log, known)) / len(known)) if known else 1.0
    found: dict[str, LayerCost] = {}
    for path in blocks:
        block = model.layout.blocks[path]
        moments = moments_of(model.layout, block, statistics, means=running)  # type: ignore[arg-type]
        weight = weights[path].reshape(-1, weights[path].shape[2])
        how: dict[str, Any] = {
            "energy": energies[path] or usual, "repair": repair, "mean": moments.mean.cpu().numpy(), "ridge": ridge,
            "name": path,
        }  # fmt: skip
        covariance = moments.covariance.cpu().numpy()
        if running:
            found[path] = RunningMeanCost(covariance, weight, block.kv_map, **how)
        else:
            found[path] = LayerCost(covariance, weight, block.query_heads, **how)
    return found, notes


def _energy(layout: HeadLayout, path: str, statistics: Statistics) -> float | None:
    total, rows = 0.0, 0
    for site in layout.sites:
        if site.block != path:
            continue
        if site.key not in statistics.sites:
            raise InputError(f"the statistics have no site {site.key}; take statistics of this model")
        one = statistics[site.key]
        if one.input_energy is None:
            return None
        total, rows = total + one.input_energy * one.z.rows, rows + one.z.rows
    return total / rows if rows and total > 0 else None

"""Trying a cut before a plan is made: whether the code of a kind of attention module runs without some of its heads."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.models.handle import Model
from headwise.surgery.cutting import cut_block, planned_cuts
from headwise.surgery.proof import bound_of, for_cut, truth_of

__all__ = ["tried"]


def tried(model: Model, units: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Why heads cannot be cut out of blocks, as a trial shows it: one of each kind of module and numbers of heads.

    The trial runs on the model's small example and on a copy that shares its weights. Without an example that the model
    runs on, or where it does not reach a block, nothing is said: :func:`prune` decides.

    Args:
        model: the model.
        units: for each block, by path, heads that may go; worked out before (:func:`planned_cuts`).

    Returns:
        For each block that cannot be cut the reason.
    """
    if not units:
        return {}
    layout = model.layout
    kinds: dict[tuple[object, ...], list[str]] = {}
    for path in units:
        block = layout.blocks[path]
        numbers = (block.query_heads, block.kv_heads, block.d_k, block.d_v)
        kinds.setdefault((type(model.module.get_submodule(path)), *numbers), []).append(path)
    firsts = {paths[0]: paths for paths in kinds.values()}
    blocks = {path: layout.blocks[path] for path in firsts}
    heads = {path: units[path] for path in firsts}
    cuts = planned_cuts(model.module, blocks, heads)
    try:
        truth = truth_of(model, blocks, heads, None)
        truth = for_cut(truth, layout, model.module, {cut.block.module: cut.kept for cut in cuts})
    except (InputError, UnsupportedError):
        return {}
    small = _sharing(model.module)
    found: dict[str, str] = {}
    for cut in cuts:
        try:
            cut_block(small, cut, truth, bound_of(model.dtype))
        except UnsupportedError as refusal:
            found |= dict.fromkeys(firsts[cut.block.module], str(refusal))
    return found


def _sharing(module: nn.Module) -> nn.Module:
    """A copy of ``module`` that shares its parameters and buffers."""
    known = {id(value): value for value in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, known)

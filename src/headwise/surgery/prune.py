"""Pruning: heads out of a copy of a model, proved, and what is left repaired."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from headwise.errors import InputError
from headwise.layout import Block, HeadLayout
from headwise.models.cut_modules import install
from headwise.models.handle import Model
from headwise.models.layouts import forget, output_weight
from headwise.models.loader import as_model
from headwise.models.restore import ordinary
from headwise.models.source import Source, weight_hash
from headwise.models.stock import settle, switch_of
from headwise.models.surgery_record import BlockChange, Proof, SurgeryRecord
from headwise.surgery.averaging import refuse_uneven_scores
from headwise.surgery.cutting import BlockCut, cut_block, planned_cuts
from headwise.surgery.proof import Truth, bound_of, for_cut, largest_difference, outputs_of, prove, truth_of
from headwise.surgery.repair import REFITS, RIDGE, check_constants, check_repair, constants, moments_of, repair
from headwise.surgery.request import Request, request_of

__all__ = ["prune"]


def prune(
    model: nn.Module | Model,
    plan: Any,
    *,
    repair: str = "least_squares",
    statistics: Any | None = None,
    ridge: float = RIDGE,
    example: Mapping[str, Any] | None = None,
) -> Model:
    """Cut heads out of a copy of ``model``, prove that removed equals gated, and repair what is left.

    The original is untouched. Everything is worked out before anything is cut; a plan of which any part cannot be
    done is
    refused as a whole.

    Args:
        model: the model.
        plan: a :class:`~headwise.plans.HeadPlan`, or ``{block: [heads]}``; see :func:`request_of`.
        repair: ``"least_squares"``, ``"least_squares_no_bias"``, ``"bias"`` or ``"none"``.
        statistics: means and covariances of the head outputs of this very model (:func:`headwise.verbs.statistics`);
            needed
            for every repair but ``"none"``, and for heads that are replaced by a constant.
        ridge: of least squares: pull towards the weights that are there, as a part of the mean variance.
        example: keyword arguments of a forward pass for the proof; default the model's example, or one made for it.

    Returns:
        The pruned model; ``.surgery`` is the :class:`~headwise.models.SurgeryRecord`, ``.save(folder)`` saves it.

    Raises:
        InputError: a plan for another model, unknown blocks or heads, no statistics for a repair.
        UnsupportedError: heads that cannot be cut out exactly; the block and the reason are named.
        MeasureError: statistics without rows, or not finite.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=31))
        >>> small = prune(gpt2, {"transformer.h.0": [1, 3]}, repair="none")
        >>> small.module.transformer.h[0].attn.num_heads, gpt2.transformer.h[0].attn.num_heads
        (2, 4)
    """
    handle = as_model(model)
    check_repair(repair, ridge)
    with ordinary(handle.module):
        return _pruned(handle, plan, repair, statistics, ridge, example)


def _pruned(
    handle: Model, plan: Any, repair: str, statistics: Any | None, ridge: float, example: Mapping[str, Any] | None
) -> Model:
    layout = handle.layout
    hashed = handle.source.weight_hash
    request = request_of(layout, plan, hashed, handle.name)
    _check_statistics(request, repair, statistics, hashed)
    blocks = {path: layout.blocks[path] for path in request.removed}
    cuts = planned_cuts(handle.module, blocks, request.removed, request.running)
    moments = {}
    if statistics is not None and (repair != "none" or request.constant):
        joint = request.running if repair != "none" else {}
        moments = {path: moments_of(layout, one, statistics, means=path in joint) for path, one in blocks.items()}
    whole = {path: output_weight(handle.module, block).flatten(0, 1).detach() for path, block in blocks.items()}
    truth = truth_of(handle, blocks, request.removed, example, request.running)
    refuse_uneven_scores(handle, layout, {cut.block.module: cut.carriers for cut in cuts}, truth.inputs)
    truth = for_cut(truth, layout, handle.module, {cut.block.module: cut.kept for cut in cuts})
    bound = bound_of(handle.dtype, means=bool(request.running))
    small, proof = _cut(handle, cuts, truth, bound)
    repaired = _repair(small, cuts, request, whole, moments, repair, ridge)
    repaired |= _turned(small, truth, bound)
    settle(small)
    forget(small)
    changes = tuple(_change(layout, cut, request, handle.module, small) for cut in cuts)
    record = SurgeryRecord(
        model=handle.name,
        weight_hash=hashed,
        blocks=changes,
        proof=proof,
        repair=repaired,
        parameters=(_parameters(handle.module), _parameters(small)),
        bytes=(_bytes(handle.module), _bytes(small)),
        earlier=_earlier(handle),
        plan=request.facts,
    )
    return _handle(handle, small, record)


def _check_statistics(request: Request, repair: str, statistics: Any, hashed: str) -> None:
    if request.constant:
        check_constants(repair)
    if statistics is None:
        if repair != "none" and len(request):
            raise InputError(
                f"repair={repair!r} needs statistics of the model's head outputs: give statistics= (or text to take "
                "them "
                "from), or repair='none'"
            )
        if request.constant:
            raise InputError(
                "heads that are replaced by a constant leave their mean output, which is taken from text: give texts "
                "(--text FILE) or statistics= (--statistics FILE), or take a plan with the replacement 'nothing'"
            )
        return
    theirs = getattr(statistics, "weight_hash", None)
    if theirs is not None and theirs != hashed:
        raise InputError(
            f"the statistics are of the weights {theirs[:12]}..., and the model has {hashed[:12]}...; take statistics "
            "of "
            "this model"
        )


def _cut(handle: Model, cuts: list[BlockCut], truth: Truth, bound: float) -> tuple[nn.Module, Proof]:
    small = copy.deepcopy(handle.module)
    for cut in cuts:
        install(small.get_submodule(cut.block.module), cut_block(small, cut, truth, bound))
    return small, prove(small, {cut.block.module: cut.block for cut in cuts}, truth, bound)


def _repair(
    small: nn.Module,
    cuts: list[BlockCut],
    request: Request,
    whole: Mapping[str, Tensor],
    moments: Mapping[str, Any],
    method: str,
    ridge: float,
) -> dict[str, Any]:
    layers = []
    for cut in cuts:
        path = cut.block.module
        if method != "none":
            found = repair(small, cut.block, cut.kept, whole[path], moments[path], method, ridge, cut.carriers)
            layers.append(asdict(found))
        elif path in request.constant:
            constants(small, cut.block, request.constant[path], whole[path], moments[path])
    constant = {"constants": sum(map(len, request.constant.values()))} if request.constant else {}
    return {"method": method, "ridge": ridge if method in REFITS else None, "layers": layers, **constant}


def _turned(small: nn.Module, truth: Truth, bound: float) -> dict[str, Any]:
    """Give the intercepts of the repair a place in the config, where it has one, and say what was turned for that."""
    switch = switch_of(small)
    if switch is None:
        return {}
    before = outputs_of(small, truth)
    switch.put(small)
    difference, largest = largest_difference(before, outputs_of(small, truth))
    if not difference <= bound * largest:
        switch.take_back(small)
        return {}
    return {"config": dict(switch.values)}


def _change(layout: HeadLayout, cut: BlockCut, request: Request, before: nn.Module, after: nn.Module) -> BlockChange:
    block: Block = cut.block
    sites = tuple(str(site.key) for site in layout.sites if site.block == block.module)
    paths = dict.fromkeys(one.path for one in (*cut.slices, *cut.beside))
    gone = sum(_size(before, path) - _size(after, path) for path in paths)
    return BlockChange(
        module=block.module,
        sites=sites,
        removed=tuple(head for head in request.removed[block.module] if head not in cut.carriers),
        query_heads=(block.query_heads, len(cut.kept.heads)),
        kv_heads=(block.kv_heads, len(cut.kept.kv)),
        kv_map=cut.kept.kv_map,
        even=cut.kept.even,
        parameters=gone,
        means=tuple(cut.carriers.values()),
    )


def _size(root: nn.Module, path: str) -> int:
    owner, _, name = path.rpartition(".")
    value = getattr(root.get_submodule(owner), name)
    return value.numel() if isinstance(value, nn.Parameter) else 0


def _parameters(root: nn.Module) -> int:
    return sum(value.numel() for value in root.parameters())


def _bytes(root: nn.Module) -> int:
    storages = {
        (value.device, value.untyped_storage().data_ptr() or -at): value.untyped_storage().nbytes()
        for at, value in enumerate((*root.parameters(), *root.buffers()), start=1)
    }
    return sum(storages.values())


def _earlier(handle: Model) -> tuple[Mapping[str, Any], ...]:
    last = handle.surgery
    if last is None:
        return ()
    document = last.to_document()
    return (*last.earlier, {name: value for name, value in document.items() if name != "earlier"})


def _handle(before: Model, small: nn.Module, record: SurgeryRecord) -> Model:
    source = Source(before.source.name, None, before.source.revision, "memory", lambda: weight_hash(small))
    return replace(before, module=small, source=source, surgery=record)

"""Verify: is this model that one without certain heads, and otherwise the same?"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError, ModelError
from headwise.layout import Block
from headwise.models.cut_modules import cut_of
from headwise.models.handle import Model
from headwise.models.loader import as_model
from headwise.models.surgery_record import Proof
from headwise.surgery.cutting import BlockCut, planned_cuts
from headwise.surgery.proof import bound_of, for_cut, prove, truth_of

__all__ = ["Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """What was found when a pruned model was compared with its original.

    Attributes:
        removed: for each block, the heads of the original that the pruned model lacks.
        proof: layers and whole model on the same input. Where W_O was repaired, the truth is the original with the
            repaired W_O and intercept in the places of the heads that are left.
        repaired: output projections whose weights are not the original's.
        unchanged: how many other weights are the original's bit for bit, all that were not cut.
        recorded: whether the pruned model's record names the weights of this original.
    """

    removed: dict[str, tuple[int, ...]]
    proof: Proof
    repaired: tuple[str, ...]
    unchanged: int
    recorded: bool

    def to_document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def verify(
    original: nn.Module | Model | Any, pruned: nn.Module | Model | Any, *, example: Mapping[str, Any] | None = None
) -> Verification:
    """Prove again that ``pruned`` is ``original`` without certain heads.

    Every weight that is left must be the original's bit for bit, but for repaired output projections; and every layer
    must give what the original's gives with those heads gated, on the same input.

    Args:
        original, pruned: models, or paths to them.
        example: keyword arguments of a forward pass; default the model's example, or one made for it.

    Raises:
        InputError: the two are not of one class, or ``pruned`` has heads that ``original`` lacks.
        ModelError: a weight or a layer differs; which one and by how much.
    """
    before, after = as_model(original), as_model(pruned)
    if type(before.module) is not type(after.module):
        raise InputError(
            f"ORIGINAL is a {type(before.module).__name__} and PRUNED a {type(after.module).__name__}; they are not of "
            "one model"
        )
    removed = dict(_removed(before.module, after.module))
    layout = before.layout
    unknown = [path for path in removed if path not in layout.blocks]
    if unknown:
        raise InputError(f"PRUNED was cut in {unknown[0]}, where ORIGINAL has no attention that headwise found")
    blocks = {path: layout.blocks[path] for path in removed}
    cuts = planned_cuts(before.module, blocks, removed)
    repaired, unchanged = _weights(before.module, after.module, cuts)
    truth_model = _transplanted(before, after.module, cuts) if repaired else before
    truth = truth_of(truth_model, blocks, removed, example)
    truth = for_cut(truth, layout, before.module, {cut.block.module: cut.kept for cut in cuts})
    try:
        proof = prove(after.module, blocks, truth, bound_of(after.dtype))
    except ModelError as error:
        raise ModelError(f"PRUNED is not ORIGINAL without these heads: {error}") from None
    recorded = after.surgery is not None and after.surgery.weight_hash == before.source.weight_hash
    return Verification(removed, proof, repaired, unchanged, recorded)


def _removed(before: nn.Module, after: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, part in after.named_modules():
        now = cut_of(part)
        if now is None:
            continue
        then = cut_of(before.get_submodule(path))
        had = tuple(range(now.original)) if then is None else then.heads
        if not set(now.heads) <= set(had):
            raise InputError(f"{path}: PRUNED has the heads {list(now.heads)}, and ORIGINAL {list(had)}")
        gone = tuple(at for at, head in enumerate(had) if head not in now.heads)
        if gone:
            yield path, gone


def _weights(before: nn.Module, after: nn.Module, cuts: list[BlockCut]) -> tuple[tuple[str, ...], int]:
    """Output projections that differ, and the number of weights that are the same; refuses every other difference."""
    ours, theirs = after.state_dict(), before.state_dict()
    outputs = {cut.block.o_path: cut for cut in cuts}
    slices: dict[str, list[Any]] = {}
    for cut in cuts:
        for one in (*cut.slices, *cut.extras, *cut.rows):
            slices.setdefault(one.path, []).append(one)
    repaired: dict[str, None] = {}
    same = 0
    for name in dict.fromkeys((*theirs, *ours)):
        owner = name.rpartition(".")[0]
        if _equal(ours.get(name), theirs.get(name), slices.get(name, [])):
            same += 1
        elif owner in outputs:
            repaired[owner] = None
        else:
            raise ModelError(f"{name} is not the original's: PRUNED is ORIGINAL changed in more than its heads")
    return tuple(repaired), same


def _equal(ours: Tensor | None, theirs: Tensor | None, slices: list[Any]) -> bool:
    if ours is None or theirs is None:
        return False
    if ours.shape == theirs.shape and torch.equal(ours, theirs):
        return True
    for one in slices:
        theirs = theirs.index_select(one.axis, torch.tensor(one.keep, dtype=torch.long, device=theirs.device))
    return ours.shape == theirs.shape and torch.equal(ours, theirs)


def _transplanted(before: Model, after: nn.Module, cuts: list[BlockCut]) -> Model:
    """The original with the pruned model's output projections in the places of the heads that are left."""
    module = copy.deepcopy(before.module)
    for cut in cuts:
        _transplant(module, after, cut.block, cut)
    return replace(before, module=module)


def _transplant(module: nn.Module, after: nn.Module, block: Block, cut: BlockCut) -> None:
    assert block.o is not None
    mine: Any = module.get_submodule(block.o.parameter)
    theirs: Any = after.get_submodule(block.o.parameter)
    columns = next(one for one in cut.slices if one.path == f"{block.o.parameter}.weight")
    index = torch.tensor(columns.keep, dtype=torch.long, device=mine.weight.device)
    with torch.no_grad():
        mine.weight.index_copy_(columns.axis, index, theirs.weight.to(mine.weight))
        if theirs.bias is not None:
            mine.bias = nn.Parameter(theirs.bias.detach().clone())

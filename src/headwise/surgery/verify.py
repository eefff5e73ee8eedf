"""Verify: is this model that one without certain heads, and otherwise the same?"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, ModelError
from headwise.models.cut_modules import cut_of
from headwise.models.discovery import MODEL_FAILURES
from headwise.models.handle import Model
from headwise.models.loader import as_model
from headwise.models.stock import COUNTS
from headwise.models.surgery_record import Proof
from headwise.models.switches import lacks_bias
from headwise.surgery.averaging import lay_means
from headwise.surgery.cutting import BlockCut, planned_cuts
from headwise.surgery.proof import bound_of, for_cut, prove, truth_of

__all__ = ["Verification", "verify"]

#: What a config may say otherwise: counts of heads, and what tells nothing of the function.
_OWN: Final = (
    *COUNTS,
    *("head_dim", "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
)


@dataclass(frozen=True)
class Verification:
    """What was found when a pruned model was compared with its original.

    Attributes:
        removed: for each block, the heads of the original that the pruned model lacks.
        means: for each block the heads of the original that put out a running mean in the pruned model, each with the
            heads that it stands for.
        proof: layers and whole model on the same input. Where W_O was repaired, the truth is the original with the
            repaired W_O and intercept in the places of the heads that are left.
        repaired: output projections whose weights are not the original's.
        unchanged: how many other weights are the original's bit for bit, all that were not cut.
        recorded: whether the pruned model's record names the weights of this original.
        healed: how many other weights were trained after the cut, as the record says; they are taken over into the
            truth like the repaired ones. 0 for a model that was not healed: there every other weight must be the same.
    """

    removed: dict[str, tuple[int, ...]]
    proof: Proof
    repaired: tuple[str, ...]
    unchanged: int
    recorded: bool
    healed: int = 0
    means: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        heads = sum(map(len, self.removed.values()))
        return (
            f"Verification({heads} heads of {len(self.removed)} blocks are gone, {len(self.proof.layers)} layer calls "
            f"proved, {len(self.repaired)} projections repaired, {self.healed} weights healed, {self.unchanged} the "
            f"same bit for bit, recorded: {self.recorded})"
        )

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
        ModelError: a weight, a value of the config or a layer differs; which one and by how much.
    """
    before, after = as_model(original), as_model(pruned)
    if type(before.module) is not type(after.module):
        raise InputError(
            f"ORIGINAL is a {type(before.module).__name__} and PRUNED a {type(after.module).__name__}; they are not of "
            "one model"
        )
    removed = dict(_removed(before.module, after.module))
    repairs = _repairs(after)
    _check_config(before.config, after.config, repairs)
    layout = before.layout
    unknown = [path for path in removed if path not in layout.blocks]
    if unknown:
        raise InputError(f"PRUNED was cut in {unknown[0]}, where ORIGINAL has no attention that headwise found")
    means = dict(_means(before.module, after.module))
    blocks = {path: block for path, block in layout.blocks.items() if path in removed or path in means}
    running = {path: tuple(sorted(sum(found, ()))) for path, found in means.items()}
    gone = {path: tuple(sorted({*removed.get(path, ()), *running.get(path, ())})) for path in blocks}
    cuts = planned_cuts(before.module, blocks, gone, running)
    trained = any(one.get("heal") for one in repairs)
    changed, unchanged = _weights(_averaging(before.module, cuts), after.module, cuts, trained=trained)
    outputs = {cut.block.o_path for cut in cuts}
    repaired = tuple(dict.fromkeys(owner for name in changed if (owner := name.rpartition(".")[0]) in outputs))
    if after.surgery is not None and not trained:
        _check_repaired(cuts, changed, repairs)
    healed = sum(name.rpartition(".")[0] not in outputs for name in changed)
    truth_model = _transplanted(before, after.module, cuts, changed) if changed else before
    truth = truth_of(truth_model, blocks, gone, example, _standing(cuts, running, changed))
    truth = for_cut(truth, layout, before.module, {cut.block.module: cut.kept for cut in cuts})
    try:
        proof = prove(after.module, blocks, truth, bound_of(after.dtype, means=any(cut.carriers for cut in cuts)))
    except ModelError as error:
        raise ModelError(f"PRUNED is not ORIGINAL without these heads: {error}") from None
    recorded = before.source.weight_hash in _originals(after)
    return Verification(removed, proof, repaired, unchanged, recorded, healed, means)


def _check_config(before: Any, after: Any, repairs: list[Mapping[str, Any]]) -> None:
    """Refuse another config: what it says beside counts of heads may change the output by less than noise.

    A repair may have turned what gives its intercept a place; the record says so.

    Raises:
        ModelError: a value differs; it is named.
    """
    if not (hasattr(before, "to_dict") and hasattr(after, "to_dict")):
        return
    turned = {name: value for one in repairs for name, value in one.get("config", {}).items() if "bias" in name}
    ours, theirs = dict(_values(_settled(after))), dict(_values(_settled(before)))
    for name in dict.fromkeys((*theirs, *ours)):
        if name in turned and ours.get(name) is turned[name]:
            continue
        if ours.get(name) != theirs.get(name) and name.rpartition(".")[2] not in _OWN:
            raise ModelError(
                f"the config says {name} = {ours.get(name)!r} in PRUNED and {theirs.get(name)!r} in ORIGINAL: PRUNED "
                "is ORIGINAL changed in more than its heads"
            )


def _settled(config: Any) -> Mapping[str, Any]:
    """A config's values as they are after saving and loading."""
    with contextlib.suppress(*MODEL_FAILURES):  # of classes that do not read what they write
        config = type(config).from_dict(config.to_dict())
    settled: Mapping[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return settled


def _values(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _removed(before: nn.Module, after: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, part in after.named_modules():
        now = cut_of(part)
        if now is None:
            continue
        try:
            then = cut_of(before.get_submodule(path))
        except AttributeError:
            raise InputError(
                f"PRUNED was cut in {path}, which ORIGINAL does not have; they are not of one model"
            ) from None
        had = tuple(range(now.original)) if then is None else then.heads
        if not set(now.heads) <= set(had):
            raise InputError(f"{path}: PRUNED has the heads {list(now.heads)}, and ORIGINAL {list(had)}")
        gone = tuple(at for at, head in enumerate(had) if head not in now.heads)
        if gone:
            yield path, gone


def _means(before: nn.Module, after: nn.Module) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """What puts out running means in ``after`` and did not in ``before``, by the numbers of the heads in ``before``."""
    for path, part in after.named_modules():
        now = cut_of(part)
        if now is None or not now.means:
            continue
        then = cut_of(before.get_submodule(path))
        had = tuple(range(now.original)) if then is None else then.heads
        known = set() if then is None else {one[0] for one in then.means}
        entries = [tuple(had.index(head) for head in one if head in had) for one in now.means]
        found = tuple(one for one in entries if len(one) > 1 or had[one[0]] not in known)
        if found:
            yield path, found


def _averaging(before: nn.Module, cuts: list[BlockCut]) -> nn.Module:
    """The original, or a copy of it in which carriers have a query of zero and the W_O of all that they stand for."""
    if not any(cut.carriers for cut in cuts):
        return before
    module = copy.deepcopy(before)
    for cut in cuts:
        lay_means(module, cut.block, cut.carriers)
    return module


def _standing(
    cuts: list[BlockCut], running: Mapping[str, tuple[int, ...]], changed: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Whose outputs are running means in the truth: all of ``running``; of a repaired W_O the carriers alone."""
    repaired = {cut.block.module: f"{cut.block.o_path}.weight" in changed for cut in cuts}
    return {
        cut.block.module: tuple(cut.carriers) if repaired[cut.block.module] else running[cut.block.module]
        for cut in cuts
        if cut.carriers
    }


def _repairs(model: Model) -> list[Mapping[str, Any]]:
    """What each of a model's surgeries says of its repair, the last one first."""
    record = model.surgery
    return [] if record is None else [record.repair, *(one.get("repair", {}) for one in record.earlier)]


def _originals(model: Model) -> set[str]:
    """Hashes of the weights before each of a model's surgeries."""
    record = model.surgery
    earlier = () if record is None else (one.get("weight_hash", "") for one in record.earlier)
    return set() if record is None else {record.weight_hash, *earlier}


def _check_repaired(cuts: list[BlockCut], changed: tuple[str, ...], repairs: list[Mapping[str, Any]]) -> None:
    """Refuse an output projection that is neither the original's nor a repair's, as far as the record says.

    Raises:
        ModelError: it is named.
    """
    known = {layer["module"] for one in repairs for layer in one.get("layers", ())}
    for cut in cuts:
        name = f"{cut.block.o_path}.weight"
        if name in changed and not known & {cut.block.o_path, cut.block.o.parameter if cut.block.o else None}:
            raise ModelError(f"{name} is not the original's, and the record of PRUNED says nothing of a repair of it")


def _slices(cuts: list[BlockCut]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for cut in cuts:
        for one in (*cut.slices, *cut.beside):
            found.setdefault(one.path, []).append(one)
    return found


def _weights(
    before: nn.Module, after: nn.Module, cuts: list[BlockCut], *, trained: bool
) -> tuple[tuple[str, ...], int]:
    """Weights that differ, and the number of those that are the same.

    Raises:
        ModelError: one differs that is not of an output projection, and the model was not trained.
    """
    ours, theirs = after.state_dict(), before.state_dict()
    outputs = {cut.block.o_path for cut in cuts}
    slices = _slices(cuts)
    summed = {f"{cut.block.o_path}.weight" for cut in cuts if any(len(one) > 1 for one in cut.carriers.values())}
    changed: list[str] = []
    same = 0
    for name in dict.fromkeys((*theirs, *ours)):
        new = name not in theirs and lacks_bias(before, name)
        if _equal(ours.get(name), theirs.get(name), slices.get(name, []), summed=name in summed):
            same += 1
        elif name.rpartition(".")[0] in outputs or (trained and name in ours and (name in theirs or new)):
            changed.append(name)
        elif new and not bool(ours[name].any()):
            continue  # zero: it came beside one that the repair needs
        else:
            raise ModelError(_differs(name, ours.get(name), theirs.get(name)))
    return tuple(changed), same


def _differs(name: str, ours: Tensor | None, theirs: Tensor | None) -> str:
    """What to say of a weight that is not the original's: most often it was loaded in another dtype."""
    if ours is None or theirs is None or ours.dtype == theirs.dtype:
        return (
            f"{name} is not the original's: PRUNED is ORIGINAL changed in more than its heads; was it trained after "
            "the cut? Then only the folder that was saved before can be verified"
        )
    new, old = (str(one.dtype).removeprefix("torch.") for one in (ours, theirs))
    return (
        f"{name} is {new} in PRUNED and {old} in ORIGINAL, so no bit can be compared; load ORIGINAL as it was for the "
        f"cut (--dtype {new}; headwise.load(..., dtype={new!r}))"
    )


def _equal(ours: Tensor | None, theirs: Tensor | None, slices: list[Any], *, summed: bool) -> bool:
    """Whether two weights are the same bit for bit; ``summed``: but for the rounding of sums made in several steps."""
    if ours is None or theirs is None:
        return False
    if ours.shape == theirs.shape and torch.equal(ours, theirs):
        return True
    for one in slices:
        theirs = theirs.index_select(one.axis, torch.tensor(one.keep, dtype=torch.long, device=theirs.device))
    if ours.shape != theirs.shape or not summed or not ours.is_floating_point():
        return ours.shape == theirs.shape and torch.equal(ours, theirs)
    most = 4 * torch.finfo(ours.dtype).eps * float(theirs.abs().max()) if theirs.numel() else 0.0
    return bool(((ours - theirs).abs() <= most).all())


def _transplanted(before: Model, after: nn.Module, cuts: list[BlockCut], changed: tuple[str, ...]) -> Model:
    """The original with the pruned model's changed weights in the places of what is left."""
    module = copy.deepcopy(before.module)
    slices = _slices(cuts)
    for name in changed:
        path, _, last = name.rpartition(".")
        owner: Any = module.get_submodule(path)
        theirs = getattr(after.get_submodule(path), last)
        mine = getattr(owner, last)
        if mine is None:  # an intercept that the repair added, or what came with it and was trained
            rows = [one for one in slices.get(f"{path}.weight", ()) if one.axis == int(hasattr(owner, "nf"))]
            setattr(owner, last, nn.Parameter(_widened(theirs.detach(), owner, rows)))
            continue
        with torch.no_grad():
            if mine.shape == theirs.shape:
                mine.copy_(theirs)
                continue
            cut = next((one for one in slices.get(name, ()) if len(one.keep) == theirs.shape[one.axis]), None)
            if cut is None:
                raise ModelError(f"{name} has the shape {tuple(theirs.shape)}, which no cut of ORIGINAL's gives")
            index = torch.tensor(cut.keep, dtype=torch.long, device=mine.device)
            mine.index_copy_(cut.axis, index, theirs.to(mine))
    return replace(before, module=module)


def _widened(bias: Tensor, owner: Any, rows: list[Any]) -> Tensor:
    """A bias of the rows that are left as one of all rows of an uncut layer, zero in the others."""
    cut = next((one for one in rows if len(one.keep) == bias.shape[0]), None)
    if cut is None:
        return bias.clone()
    whole = bias.new_zeros(owner.weight.shape[cut.axis])
    whole[torch.tensor(cut.keep, dtype=torch.long, device=bias.device)] = bias
    return whole

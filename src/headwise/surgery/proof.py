"""The proof: a layer without heads equals the same layer with those heads gated, on the same input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.layout import Block, HeadLayout
from headwise.models.discovery import MODEL_FAILURES
from headwise.models.examples import candidates
from headwise.models.handle import Model
from headwise.models.probe import run_model, tensors_of
from headwise.models.restore import eager, unchanged
from headwise.models.surgery_record import LayerProof, Proof
from headwise.surgery.averaging import averaged
from headwise.surgery.caches import copied, holds_cache, narrowed, narrowings_of
from headwise.surgery.keeping import Kept
from headwise.surgery.watching import Calls, gated_run, replaced_inputs

__all__ = [
    "BOUND",
    "Truth",
    "bound_of",
    "first_that_runs",
    "for_cut",
    "largest_difference",
    "outputs_of",
    "prove",
    "truth_of",
]

#: Difference that float32 may make in one layer, as a part of its largest output.
BOUND: Final = 1e-5
_BOUNDS: Final = {torch.float64: 1e-12, torch.float32: BOUND, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: What a softmax in float32 may differ by from the plain mean of what is seen.
_SOFTMAX: Final = 1e-6
#: Float noise that one layer's difference may grow to through a whole model, as a part of its largest output.
_GROWN: Final = 1e3


@dataclass
class Truth:
    """The original with heads gated, on one input.

    Attributes:
        inputs: the input.
        calls: what entered and left each layer that is to be cut.
        outputs: the model's outputs.
        noise: how far its eager attention is from the one it is set to; None where there is only one, or where the
            two are not of one shape or not finite in the same places.
    """

    inputs: dict[str, Any]
    calls: Calls
    outputs: list[Tensor]
    noise: float | None


def bound_of(dtype: torch.dtype, *, means: bool = False) -> float:
    """What the proof allows in one layer, as a part of its largest output.

    ``means``: running means stand in heads' places. They are computed in another way than by the softmax of the
    model, which eager attention takes in float32 also in a model in float64.
    """
    bound = _BOUNDS.get(dtype, BOUND)
    return max(bound, _SOFTMAX) if means else bound


def truth_of(
    model: Model,
    blocks: Mapping[str, Block],
    removed: Mapping[str, tuple[int, ...]],
    example: Mapping[str, Any] | None,
    running: Mapping[str, tuple[int, ...]] | None = None,
) -> Truth:
    """Run the original once with the heads gated (and once under eager attention).

    Args:
        model: the original.
        blocks: what is cut, by path.
        removed: the heads of each that go.
        example: keyword arguments of a forward pass; None: the model's, or one made for it.
        running: those of them in whose place the mean of the visible values stands.

    Raises:
        InputError: no input to run it on.
        UnsupportedError: one of the layers was not reached by it.
    """
    root, means = model.module, running or {}
    layout = model.layout
    zeroed = {path: tuple(head for head in heads if head not in means.get(path, ())) for path, heads in removed.items()}
    calls = Calls()
    with unchanged(root):
        inputs, plain = first_that_runs(model, example)
        with averaged(model, layout, means), gated_run(root, blocks, zeroed, calls):
            outputs = tensors_of(run_model(root, copied(inputs)))
        noise = None
        with eager(root) as changed:
            if changed:
                try:
                    found, _ = largest_difference(plain, tensors_of(run_model(root, copied(inputs))))
                    noise = found if math.isfinite(found) else None  # infinite: eager attention is something else here
                except MODEL_FAILURES:
                    noise = None
    silent = [path for path, seen in calls.outputs.items() if not seen]
    if silent:
        raise UnsupportedError(
            f"{silent[0]}: the output projection of its heads did not run on the input of the proof, so nothing could "
            "be proved of it; give an input that reaches it (example= in Python, --inputs FILE on the command line)"
        )
    return Truth(inputs, calls, outputs, noise)


def for_cut(truth: Truth, layout: HeadLayout, root: nn.Module, kept: Mapping[str, Kept]) -> Truth:
    """The truth as a cut model is asked for it: caches in the inputs hold the heads that are left.

    Raises:
        UnsupportedError: there is a cache, and a cut layer does not say which part of it is its own.
    """
    if not holds_cache(truth.inputs):
        return truth
    cross = {site.block for site in layout.sites if site.key.kind == "cross"}
    counts = {path: (layout.blocks[path].kv_heads, one.kv) for path, one in kept.items()}
    found = narrowings_of(root, counts, cross)
    inputs = {path: narrowed(seen, found) for path, seen in truth.calls.inputs.items()}
    calls = Calls(inputs, truth.calls.outputs, truth.calls.headed)
    return Truth(narrowed(truth.inputs, found), calls, truth.outputs, truth.noise)


def first_that_runs(model: Model, example: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[Tensor]]:
    """The example, or the model's, or the first made for it that it runs on; and what it puts out.

    Raises:
        InputError: there is none.
    """
    given = example if example is not None else model.example
    tries = [dict(given)] if given is not None else candidates(model.module)
    failures: list[Exception] = []
    for inputs in tries:
        try:
            return inputs, tensors_of(run_model(model.module, copied(inputs)))
        except MODEL_FAILURES as failure:
            failures.append(failure)
    raise InputError(
        f"{type(model.module).__name__} does not run on the input of the proof: {failures[0]}; give the "
        "keyword arguments of a small forward pass (example= in Python, --inputs FILE on the command line)"
    )


def prove(root: nn.Module, blocks: Mapping[str, Block], truth: Truth, bound: float) -> Proof:
    """Run the cut model on the original's inputs of every layer, and once by itself.

    Raises:
        UnsupportedError: a layer differs, or the model as a whole does by more than noise.
    """
    calls, again = Calls(), Calls()
    try:
        with unchanged(root):
            with replaced_inputs(root, blocks, truth.calls, calls):
                run_model(root, copied(truth.inputs))
            with replaced_inputs(root, blocks, None, again):
                outputs = tensors_of(run_model(root, copied(truth.inputs)))
    except MODEL_FAILURES as failure:
        raise UnsupportedError(
            f"the model does not run without these heads ({type(failure).__name__}: {failure}); something outside the "
            "attention modules counts on them"
        ) from failure
    layers = tuple(one for path, block in blocks.items() for one in layer_proofs(block, truth.calls, calls, path))
    for one in layers:
        if not one.difference <= bound * one.largest + _floor(one.largest):
            raise UnsupportedError(_differs(one, bound))
    difference, largest = largest_difference(truth.outputs, outputs)
    allowed = max(_GROWN * bound * largest, 10 * (truth.noise or 0.0))
    if not difference <= allowed + _floor(largest):
        raise UnsupportedError(
            f"every layer is right without these heads, and the model as a whole differs by {difference:.2g} where "
            "values "
            f"reach {largest:.2g}; something outside the layers reads their keys or values"
        )
    same = len(outputs) == len(truth.outputs) and all(map(_same, outputs, truth.outputs))
    return Proof(layers, bound, difference, largest, truth.noise, same)


def outputs_of(root: nn.Module, truth: Truth) -> list[Tensor]:
    """What a cut model gives on the input of the proof."""
    with unchanged(root):
        return tensors_of(run_model(root, copied(truth.inputs)))


def layer_proofs(block: Block, truth: Calls, calls: Calls, path: str) -> list[LayerProof]:
    """Compare every call of one block's output projection.

    Raises:
        UnsupportedError: another number of calls.
    """
    expected, found = truth.outputs[path], calls.outputs[path]
    if len(expected) != len(found):
        raise UnsupportedError(f"{path}: {len(expected)} calls with the heads gated, {len(found)} without them")
    return [
        LayerProof(path, block.o_path or "", at, *largest_difference([left], [right]))
        for at, (left, right) in enumerate(zip(expected, found, strict=True))
    ]


def _differs(one: LayerProof, bound: float) -> str:
    return (
        f"{one.module}: without the heads its output differs by {one.difference:.2g} from the gated one where values "
        "reach "
        f"{one.largest:.2g} (allowed: {bound:g} of that); its code does not treat each head alone"
    )


def largest_difference(expected: list[Tensor], found: list[Tensor]) -> tuple[float, float]:
    """Largest absolute difference and largest absolute expected value; infinite where shapes or finiteness differ."""
    worst, largest = 0.0, 0.0
    if len(expected) != len(found):
        return float("inf"), 0.0
    for left, right in zip(expected, found, strict=True):
        if left.shape != right.shape:
            return float("inf"), largest
        if not left.is_floating_point() or not left.numel():
            continue
        left, right = left.double(), right.double()
        finite = torch.isfinite(left)
        if not torch.equal(finite, torch.isfinite(right)):
            return float("inf"), largest
        if bool(finite.any()):
            worst = max(worst, float((left - right)[finite].abs().max()))
            largest = max(largest, float(left[finite].abs().max()))
    return worst, largest


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


def _floor(largest: float) -> float:
    return 1e-9 if largest == 0 else 0.0

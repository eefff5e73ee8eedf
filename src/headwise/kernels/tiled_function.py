"""The tiled road as one differentiable function, for autograd, ``torch.func`` and ``vmap``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from headwise.kernels.problem import Problem
from headwise.kernels.tiled_backward import RowGradients, backward
from headwise.kernels.tiled_core import Raw, forward
from headwise.kernels.tiled_op import attend_traced
from headwise.kernels.tiled_spec import OUTPUTS, Spec

__all__ = ["attend_core"]


def attend_core(problem: Problem, *, statistics: bool, distance: bool, pairs: Tensor | None = None) -> Raw:
    """One pass over a problem in its dtype of computation, with plain groups and no sinks; differentiable.

    Gradients flow from z, lse, entropy, distance and peak to q, k, v and the added terms. They cannot
    be differentiated a second time. ``Raw.pairs`` is None where gradients or tracing are in the way: the
    weights then follow from lse.
    """
    visible, rule = problem.visible, problem.rule
    spec = Spec(
        visible.causal,
        visible.window,
        problem.offset,
        visible.predicate,
        problem.scale,
        rule.softcap,
        statistics,
        distance,
    )
    tensors = (problem.q, problem.k, problem.v, rule.bias, rule.additive_mask, visible.key_padding, visible.mask)
    if torch.compiler.is_compiling() or problem.q.is_meta or isinstance(problem.q, FakeTensor):
        return attend_traced(spec, *tensors)
    if not _differentiated(tensors):
        return forward(problem, statistics=statistics, distance=distance, pairs=pairs)
    return spec.raw(*_apply(_Forward, spec, *tensors))


def _differentiated(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether autograd or a transform of ``torch.func`` looks on."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(spec: Spec, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        raw = forward(spec.problem(*tensors), statistics=spec.statistics, distance=spec.distance)
        return tuple(getattr(raw, name) for name in OUTPUTS)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        spec, *tensors = inputs
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output[5:] if x is not None))
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if all(gradient is None for gradient in gradients[:5]):
            return (None,) * 8
        needs = tuple(ctx.needs_input_grad[1:6])
        found = _apply(_Backward, ctx.spec, needs, *saved, *gradients[:5])
        return (None, *found, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], spec: Spec, *tensors: Tensor | None) -> tuple[Any, Any]:
        size = info.batch_size
        batch = _batch_of(tensors[0], in_dims[1])
        folded = [_fold(x, dim, size, batch) for x, dim in zip(tensors, in_dims[1:], strict=True)]
        outputs = _apply(_Forward, _folded_spec(spec, batch), *folded)
        return _unfold(outputs, size), tuple(None if x is None else 0 for x in outputs)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(spec: Spec, needs: tuple[bool, ...], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        raw = spec.raw(*tensors[7:14])
        return backward(spec.problem(*tensors[:7]), raw, RowGradients(*tensors[14:]), needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        del ctx, gradients
        raise NotImplementedError(
            "The tiled backend's gradients cannot be differentiated again; pass backend='eager' for second derivatives."
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], spec: Spec, needs: tuple[bool, ...], *tensors: Tensor | None
    ) -> tuple[Any, Any]:
        size = info.batch_size
        batch = _batch_of(tensors[0], in_dims[2])
        folded = [_fold(x, dim, size, batch) for x, dim in zip(tensors, in_dims[2:], strict=True)]
        for place in (3, 4):  # an added term that all share would get the sum over the mapped axis: give each its own
            term = folded[place]
            if term is not None and needs[place]:
                folded[place] = term.expand(size * batch, *term.shape[1:])
        outputs = list(_apply(_Backward, _folded_spec(spec, batch), needs, *folded))
        unfolded = list(_unfold(outputs, size))
        for place in (3, 4):
            given, found = tensors[place], unfolded[place]
            if given is not None and found is not None:
                rows = given.shape[0] if in_dims[2 + place] is None else given.movedim(in_dims[2 + place], 0).shape[1]
                unfolded[place] = found.sum(1, keepdim=True) if rows == 1 else found
        return tuple(unfolded), tuple(None if x is None else 0 for x in unfolded)


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


def _batch_of(q: Tensor | None, dim: int | None) -> int:
    assert q is not None
    return q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]


def _fold(x: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """A mapped axis, or its absence, folded into the batch axis; what broadcasts over both stays small."""
    if x is None:
        return None
    if dim is None:
        if x.shape[0] == 1 and batch != 1:
            return x
        return x[None].expand(size, *x.shape).flatten(0, 1)
    moved = x.movedim(dim, 0)
    return moved.expand(size, batch, *moved.shape[2:]).flatten(0, 1)


def _unfold(outputs: Any, size: int) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else torch.unflatten(x, 0, (size, -1)) for x in outputs)


def _folded_spec(spec: Spec, batch: int) -> Spec:
    predicate = spec.predicate
    if predicate is None:
        return spec
    return replace(spec, predicate=lambda b, h, i, j: predicate(b % batch, h, i, j))

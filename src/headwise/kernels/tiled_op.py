"""The tiled road as torch operators, so that ``torch.compile`` and ``torch.export`` see one call and no loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.kernels.tiled_backward import RowGradients, backward
from headwise.kernels.tiled_core import Raw, forward
from headwise.kernels.tiled_spec import OUTPUTS, Spec

__all__ = ["attend_traced", "fake_pass", "gradients_of_pass", "remember_pass"]


@torch.library.custom_op("headwise::tiled", mutates_args=())
def _tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    additive_mask: Tensor | None,
    key_padding: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    offset: int,
    scale: float,
    softcap: float | None,
    statistics: bool,
    distance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    spec = Spec(causal, window, offset, None, scale, softcap, statistics, distance)
    problem = spec.problem(q, k, v, bias, additive_mask, key_padding, mask)
    raw = forward(problem, statistics=statistics, distance=distance)
    nothing = raw.lse.new_empty(0)
    found = (getattr(raw, name) for name in OUTPUTS)
    z, lse, entropy, far, peak, top, where = (nothing.clone() if x is None else x for x in found)
    return z, lse, entropy, far, peak, top, where if statistics else where.long()


def fake_pass(*inputs: Any) -> tuple[Tensor, ...]:
    """The shapes of a pass's outputs."""
    q, _, v = inputs[:3]
    statistics, distance = inputs[12:]
    row = q.shape[:3]
    return (
        q.new_empty(*row, v.shape[3]),
        q.new_empty(row),
        q.new_empty(row if statistics else (0,)),
        q.new_empty(row if distance else (0,)),
        q.new_empty(row),
        q.new_empty(row),
        q.new_empty(row if statistics else (0,), dtype=torch.int64),
    )


_tiled.register_fake(fake_pass)


@torch.library.custom_op("headwise::tiled_backward", mutates_args=())
def _tiled_backward(
    tensors: list[Tensor],
    present: list[bool],
    needs: list[bool],
    causal: bool,
    window: int | None,
    offset: int,
    scale: float,
    softcap: float | None,
    statistics: bool,
    distance: bool,
) -> list[Tensor]:
    given = iter(tensors)
    inputs = [next(given) if here else None for here in present]
    spec = Spec(causal, window, offset, None, scale, softcap, statistics, distance)
    found = backward(spec.problem(*inputs[:7]), spec.raw(*inputs[7:14]), RowGradients(*inputs[14:]), tuple(needs))
    return [x for x in found if x is not None]


@_tiled_backward.register_fake
def _(tensors: list[Tensor], present: list[bool], needs: list[bool], *options: Any) -> list[Tensor]:
    del options
    given = iter(tensors)
    inputs = [next(given) if here else None for here in present]
    return [x.new_empty(x.shape) for x, need in zip(inputs[:5], needs, strict=True) if x is not None and need]


def remember_pass(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass needs of a pass's inputs and outputs."""
    ctx.options = inputs[7:]
    ctx.mark_non_differentiable(*output[5:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], *output)


def gradients_of_pass(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    """Gradients of a pass's inputs: of any operator with the inputs and outputs of ``headwise::tiled``."""
    saved, grads = list(ctx.saved_tensors), list(gradients[:5])
    *_, statistics, distance = ctx.options
    if not statistics:
        grads[2] = None
    if not distance:
        grads[3] = None
    if all(gradient is None for gradient in grads):
        return (None,) * 14
    needs = [bool(need) and x is not None for need, x in zip(ctx.needs_input_grad[:5], saved[:5], strict=True)]
    everything = [*saved, *grads]
    present = [x is not None for x in everything]
    found = iter(_tiled_backward([x for x in everything if x is not None], present, needs, *ctx.options))
    return (*(next(found) if need else None for need in needs), *(None,) * 9)


_tiled.register_autograd(gradients_of_pass, setup_context=remember_pass)


def attend_traced(spec: Spec, *tensors: Tensor | None) -> Raw:
    """One pass as one operator; the spec has no predicate."""
    outputs: tuple[Tensor, ...] = _tiled(
        *tensors,
        spec.causal,
        spec.window,
        spec.offset,
        spec.scale,
        spec.softcap,
        spec.statistics,
        spec.distance,
    )
    return spec.raw(*outputs)

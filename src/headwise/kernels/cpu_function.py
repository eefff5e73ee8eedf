"""The native kernel as a torch operator, ``headwise::attention``: fake, autograd, and its place under tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.kernels import native
from headwise.kernels.problem import Problem, ScoreRule, Visible
from headwise.kernels.tiled_backward import RowGradients, backward
from headwise.kernels.tiled_core import Raw

__all__ = ["attend_core"]


def attend_core(problem: Problem, *, statistics: bool, distance: bool) -> Raw:
    """As :func:`headwise.kernels.tiled_function.attend_core`, with the forward pass of the native kernel.

    float32, plain groups, no sinks. Gradients flow from z, lse, entropy and distance to q, k, v and the added
    terms. They cannot be differentiated a second time.
    """
    del statistics  # they cost next to nothing, and the backward pass needs the log-sum-exp
    visible, rule = problem.visible, problem.rule
    z, floats, argmax = _attention(
        problem.q,
        problem.k,
        problem.v,
        rule.bias,
        rule.additive_mask,
        visible.key_padding,
        visible.mask,
        problem.scale,
        rule.softcap,
        visible.causal,
        visible.window,
        problem.offset,
        distance,
    )
    lse, entropy, max_weight = floats[0], floats[1], floats[2]
    max_score = (lse + torch.log(max_weight)).detach()
    return Raw(z, lse, max_score, entropy, argmax, floats[3] if distance else None)


@torch.library.custom_op("headwise::attention", mutates_args=(), device_types="cpu")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    additive_mask: Tensor | None,
    key_padding: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    offset: int,
    distance: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """z (B, H, Q, D_v); lse, entropy, largest weight and, if asked for, distance as one (3 or 4, B, H, Q); argmax."""
    out = native.forward(
        q,
        k,
        v,
        scale,
        softcap,
        (causal, window or 0, offset),
        None,
        True,
        native.Rules(key_padding, mask, tuple(term for term in (bias, additive_mask) if term is not None)),
        native.Extras(distance),
    )
    assert out.floats is not None
    assert out.whole is not None
    return out.z, out.floats, out.whole[0].clone()


@_attention.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries = q.shape[:3]
    z = q.new_empty((batch, heads, queries, v.shape[3]))
    floats = q.new_empty((4 if rest[-1] else 3, batch, heads, queries), dtype=torch.float32)
    return z, floats, q.new_empty((batch, heads, queries), dtype=torch.int64)


@torch.library.custom_op("headwise::attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    additive_mask: Tensor | None,
    key_padding: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    offset: int,
    z: Tensor,
    floats: Tensor,
    dz: Tensor | None,
    dfloats: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of q, k, v, bias and additive mask; an empty tensor for each that is not needed."""
    visible = Visible(causal, window, offset, key_padding, mask)
    problem = Problem(q, k, v, visible, ScoreRule(scale, softcap, bias, None, additive_mask))
    distance = floats[3] if len(floats) > 3 else None
    raw = Raw(z, floats[0], floats[0], floats[1], None, distance)
    rows = (None, None, None) if dfloats is None else (dfloats[0], dfloats[1], dfloats[3] if len(floats) > 3 else None)
    found = backward(problem, raw, RowGradients(dz, *rows), tuple(needs))
    return [q.new_empty(0) if gradient is None else gradient.contiguous() for gradient in found]


@_attention_backward.register_fake
def _(*given: Any) -> list[Tensor]:
    tensors, needs = given[:5], given[-1]
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else given[0].new_empty(0)
        for tensor, need in zip(tensors, needs, strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    z, floats, argmax = output
    ctx.mark_non_differentiable(argmax)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], z, floats)
    ctx.options = inputs[7:12]


@torch.autograd.function.once_differentiable
def _backward(ctx: Any, dz: Tensor | None, dfloats: Tensor | None, dargmax: Tensor | None) -> tuple[Any, ...]:
    del dargmax
    *tensors, z, floats = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    if dz is None and dfloats is None:
        return (None,) * 13
    found = _attention_backward(*tensors, *ctx.options, z, floats, dz, dfloats, needs)
    return (*(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *(None,) * 8)


_attention.register_autograd(_backward, setup_context=_setup)

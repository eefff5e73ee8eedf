"""The native kernel as a torch operator, ``headwise::attention``: what autograd, compile and export see of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.kernels import native
from headwise.kernels.problem import Problem
from headwise.kernels.tiled_core import Raw
from headwise.kernels.tiled_op import fake_pass, gradients_of_pass, remember_pass
from headwise.kernels.tiled_scores import hidden_score
from headwise.kernels.tiled_spec import Spec

__all__ = ["attend_core"]


def attend_core(problem: Problem, *, statistics: bool, distance: bool, pairs: Tensor | None = None) -> Raw:
    """As :func:`headwise.kernels.tiled_function.attend_core`, with the forward pass of the native kernel.

    float32, plain groups, no sinks, no predicate. Gradients flow from z, lse, entropy, distance and peak to q, k,
    v and the added terms, through the tiled backend's backward pass.
    """
    del pairs  # they follow from lse
    visible, rule = problem.visible, problem.rule
    spec = Spec(
        visible.causal,
        visible.window,
        problem.offset,
        None,
        problem.scale,
        rule.softcap,
        statistics,
        distance,
    )
    outputs: tuple[Tensor, ...] = _attention(
        problem.q,
        problem.k,
        problem.v,
        rule.bias,
        rule.additive_mask,
        visible.key_padding,
        visible.mask,
        spec.causal,
        spec.window,
        spec.offset,
        spec.scale,
        spec.softcap,
        spec.statistics,
        spec.distance,
    )
    return spec.raw(*outputs)


@torch.library.custom_op("headwise::attention", mutates_args=(), device_types="cpu")
def _attention(
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
    """z; lse, entropy, distance, log of the largest weight, largest score in units of log 2, argmax: (B, H, Q)."""
    added = tuple(term for term in (bias, additive_mask) if term is not None)
    out = native.forward(
        q,
        k,
        v,
        scale,
        softcap,
        (causal, window or 0, offset),
        None,
        True,
        native.Rules(key_padding, mask, added),
        native.Extras(distance=distance, top=True),
    )
    assert out.floats is not None
    assert out.whole is not None
    lse, entropy, max_weight, *far, top = (part.clone() for part in out.floats.unbind(0))
    nothing = lse.new_empty(0)
    return (
        out.z,
        lse,
        entropy if statistics else nothing,
        far[0] if distance else nothing.clone(),
        max_weight.log_(),
        top.clamp_(min=hidden_score(top.dtype)),  # of a row that saw nothing, as the backward pass has it
        out.whole[0].clone() if statistics else nothing.long(),
    )


@_attention.register_fake
def _fake(*args: Any) -> tuple[Tensor, ...]:
    """As the tiled backend's, but for the order in which z lies in memory."""
    z, *rest = fake_pass(*args)
    return (z.transpose(1, 2).contiguous().transpose(1, 2), *rest)


_attention.register_autograd(gradients_of_pass, setup_context=remember_pass)

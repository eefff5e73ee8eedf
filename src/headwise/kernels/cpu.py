"""The native CPU kernel: one pass over keys and values that also yields every row statistic.

Fused attention in C++ (``native/``): blocks of scores stay in the first-level cache between q k^T, the
online softmax (Milakov & Gimelshein 2018; Dao et al. 2022, "FlashAttention") and the product with v, where
``sum_j p_ij s_ij``, the maximum and its place are gathered on the way. float32, bfloat16 and float16 input,
accumulated in float32. Gradients come from the tiled backend's backward pass, which recomputes the scores.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.kernels import native, sdpa, tiled
from headwise.kernels.cpu_function import attend_core
from headwise.kernels.extras import with_extras, without_distance_bias
from headwise.kernels.problem import Answer, Problem, Rows, Wanted
from headwise.kernels.tracing import known_true

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["about", "attend", "notes", "quick", "readable_now", "received", "refusal", "stands_back"]


def about() -> str:
    """What the backend is, or why it cannot run here."""
    reason = native.why_not()
    if reason is not None:
        return f"the native kernel, not available: {reason}"
    return f"the native kernel ({native.target()}): every score rule and row statistic on CPU in one pass"


def tensors_of(problem: Problem) -> Iterator[Tensor]:
    """Every tensor of the problem."""
    visible, rule = problem.visible, problem.rule
    given = (
        problem.q,
        problem.k,
        problem.v,
        rule.bias,
        rule.additive_mask,
        rule.sinks,
        rule.distance_bias,
        visible.mask,
        visible.key_padding,
    )
    return (tensor for tensor in given if tensor is not None)


def refusal(problem: Problem, wanted: Wanted) -> str | None:
    """Why this backend cannot compute the problem; None when it can."""
    del wanted
    reason = native.why_not()
    if reason is not None:
        return reason
    if problem.q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {problem.q.device}"
    if problem.q.dtype not in native.TYPES:
        return f"it takes float32, bfloat16 and float16, and the tensors are {problem.q.dtype}"
    if problem.visible.predicate is not None:
        return "a predicate is a Python function, which it cannot call"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives are being taken, and it has none"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is at work, and it reads memory"
    return None


def stands_back(problem: Problem, wanted: Wanted) -> str | None:
    """Why another backend is the better choice although this one could do it; None when none is."""
    if not wanted.statistics and _wants_gradients(problem) and sdpa.refusal(problem, wanted) is None:
        return "gradients of plain attention are wanted, and torch's own backward pass is faster than recomputing"
    if (
        problem.q.dtype is torch.bfloat16
        and not wanted.statistics
        and _matrix_units()
        and known_true(problem.q.shape[2] >= _FEWEST_FOR_UNITS)
        and sdpa.refusal(problem, wanted) is None
    ):
        return "torch multiplies bfloat16 on this processor's matrix units (AMX), which this kernel does not use"
    return None


#: Queries from which torch's matrix units pay; fewer read keys and values for one product each.
_FEWEST_FOR_UNITS = 16


@functools.cache
def _matrix_units() -> bool:
    """Whether torch has matrix units for bfloat16 here."""
    return bool(torch.cpu._is_amx_tile_supported())


def notes(problem: Problem) -> tuple[str, ...]:
    """What is copied before the kernel runs, and why."""
    named = (("q", problem.q), ("k", problem.k), ("v", problem.v))
    return tuple(
        f"{name} was copied: the kernel reads any strides but needs the last axis contiguous"
        for name, tensor in named
        if native.readable(tensor) is not tensor
    )


def _wants_gradients(problem: Problem) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(problem))


def readable_now(problem: Problem) -> bool:
    """Whether the kernel may read the tensors' memory here and now: nothing traces, records or wraps them."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or _wants_gradients(problem):
        return False
    return type(problem.q) in _PLAIN and type(problem.k) in _PLAIN and type(problem.v) in _PLAIN


_PLAIN = (Tensor, torch.nn.Parameter)


def quick(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    offset: int | None,
    scale: float | None,
    softcap: float | None,
    rows: bool,
) -> tuple[Tensor, Rows | None] | None:
    """z and the rows of a plain problem, at once; None where :func:`refusal`, the checks or a choice must speak.

    For short calls, which would spend more time on words than on numbers. Whatever is unusual goes the other road.
    """
    if (
        native.why_not() is not None
        or type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or (causal is not True and causal is not False)
        or (window is not None and (type(window) is not int or window < 1))
        or (offset is not None and type(offset) is not int)
        or (scale is not None and type(scale) is not float)
        or (softcap is not None and (type(softcap) is not float or not softcap > 0.0))
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or (not rows and q.dtype is torch.bfloat16)
    ):
        return None
    found = native.plain(q, k, v, scale, softcap or 0.0, (causal, window or 0, offset), rows)
    if found is None:
        return None
    return found[0], Rows(*found[1:]) if rows else None


def attend(problem: Problem, wanted: Wanted) -> Answer:
    """z in q's dtype and rows in float32; ``wanted.weights`` is not its business."""
    if not readable_now(problem):
        return _traced(without_distance_bias(problem), wanted)
    extras = None
    if wanted.distance or wanted.pairs is not None or wanted.pair_lists is not None or wanted.classes is not None:
        if wanted.pairs is not None and wanted.pair_lists is not None:  # the kernel takes one or the other
            return with_extras(attend)(problem, wanted)
        extras = native.Extras(wanted.distance, wanted.pairs, wanted.pair_lists, wanted.classes, wanted.n_classes)
    statistics = wanted.rows or extras is not None
    out = native.forward(
        problem.q,
        problem.k,
        problem.v,
        problem.scale,
        problem.rule.softcap,
        _visible(problem),
        problem.kv_map,
        statistics,
        _rules(problem),
        extras,
    )
    return Answer(out.z, _rows(out, problem, wanted) if statistics else None)


def _visible(problem: Problem) -> tuple[bool, int, int]:
    return problem.visible.causal, problem.visible.window or 0, problem.offset


def _rules(problem: Problem) -> native.Rules | None:
    """The rest of the problem's rules, or None where there are none."""
    visible, rule = problem.visible, problem.rule
    if (
        visible.key_padding is None
        and visible.mask is None
        and rule.bias is None
        and rule.additive_mask is None
        and rule.distance_bias is None
        and rule.sinks is None
    ):
        return None
    return native.Rules(
        visible.key_padding, visible.mask, rule.added, rule.distance_bias, rule.distance_zero, rule.sinks
    )


def _rows(out: native.Output, problem: Problem, wanted: Wanted) -> Rows:
    assert out.floats is not None
    assert out.whole is not None
    lse, entropy, max_weight, *more = out.floats.unbind(0)
    argmax, visible = out.whole.unbind(0)
    if not more and out.pairs is None and out.classes is None:
        return Rows(lse, entropy, max_weight, argmax, visible)
    lists = wanted.pair_lists is not None
    return Rows(
        lse,
        entropy,
        max_weight,
        argmax,
        visible,
        sink=None if problem.rule.sinks is None else more[0],
        distance=more[-1] if wanted.distance else None,
        pairs=None if lists else out.pairs,
        classes=out.classes,
        pair_lists=out.pairs if lists else None,
    )


@with_extras
def _traced(problem: Problem, wanted: Wanted) -> Answer:
    """As a torch operator, which autograd, compile and export can follow; what surrounds the core is torch."""
    return tiled.attend(problem, wanted, core=attend_core)


def received(problem: Problem, lse: Tensor, row_weights: Tensor | None) -> Tensor:
    """Sums of the pattern over the query rows, (B, H, K), from each row's lse."""
    return native.received(
        problem.q,
        problem.k,
        lse,
        problem.scale,
        problem.rule.softcap,
        _visible(problem),
        problem.kv_map,
        _rules(problem) or native.Rules(),
        row_weights,
    )

"""What a problem must satisfy before any backend sees it, with the wording of every refusal."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError
from headwise.kernels.problem import Problem, Wanted
from headwise.kernels.tracing import concrete

__all__ = ["check_problem", "shape_of"]


def shape_of(tensor: Tensor) -> str:
    """A shape for a message: ``(2, 8, 16, 64)``."""
    return "(" + ", ".join(str(size) for size in tensor.shape) + ("," if tensor.ndim == 1 else "") + ")"


def check_problem(problem: Problem, wanted: Wanted) -> None:
    """Raise :class:`~headwise.errors.InputError` or ShapeError where shapes, dtypes, devices or values do not fit."""
    _check_qkv(problem)
    _check_heads(problem)
    _check_visible(problem)
    _check_rule(problem)
    if wanted.pairs is not None:
        _check_pairs(problem, wanted.pairs)
    if wanted.classes is not None:
        _check_classes(problem, wanted.classes, wanted.n_classes)
    if wanted.pair_lists is not None:
        _check_pair_lists(problem, *wanted.pair_lists)


def _check_qkv(problem: Problem) -> None:
    q, k, v = problem.q, problem.k, problem.v
    layouts = {
        "q": (q, "(batch, query heads, queries, d_k)"),
        "k": (k, "(batch, key-value heads, keys, d_k)"),
        "v": (v, "(batch, key-value heads, keys, d_v)"),
    }
    for name, (tensor, layout) in layouts.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name} must be a tensor {layout}; got {type(tensor).__name__}.")
        if tensor.ndim != 4:
            raise ShapeError(
                f"{name} must have four axes {layout}; got {tensor.ndim}: {shape_of(tensor)}."
                " Add the missing axis with unsqueeze, or split the heads with unflatten and transpose."
            )
        if not tensor.dtype.is_floating_point:
            raise ShapeError(f"{name} must be floating point; got {tensor.dtype}. Convert it with {name}.float().")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ShapeError(
                f"q, k and v must share one dtype; q is {q.dtype} and {name} is {tensor.dtype}. Convert one with .to()."
            )
        if tensor.device != q.device:
            raise ShapeError(
                f"q, k and v must be on one device; q is on {q.device} and {name} on {tensor.device}. Move one"
                " with .to()."
            )
        if tensor.shape[0] != q.shape[0]:
            raise ShapeError(
                f"q and {name} must have the same batch size; q has {q.shape[0]} and {name} has {tensor.shape[0]}."
                f" Expand the smaller one: {name}.expand(...)."
            )
    if k.shape[3] != q.shape[3]:
        raise ShapeError(f"q and k must have the same width d_k; q has {q.shape[3]} and k has {k.shape[3]}.")
    if k.shape[1] != v.shape[1]:
        raise ShapeError(
            f"k and v must have the same number of key-value heads; k has {k.shape[1]} and v has {v.shape[1]}."
        )
    if k.shape[2] != v.shape[2]:
        raise ShapeError(f"k and v must have the same number of keys; k has {k.shape[2]} and v has {v.shape[2]}.")
    if q.shape[3] == 0:
        raise ShapeError("q and k must have a width d_k of at least 1; got 0.")


def _check_heads(problem: Problem) -> None:
    heads, groups = problem.q.shape[1], problem.k.shape[1]
    if problem.kv_map is None:
        if groups == 0 or heads % groups:
            raise ShapeError(
                f"The number of query heads must be a multiple of the number of key-value heads; got {heads}"
                " query heads"
                f" and {groups} key-value heads. Head h reads key-value head h // (query heads / key-value heads)."
            )
    elif len(problem.kv_map) != heads:
        raise ShapeError(
            f"kv_map must name a key-value head for each of the {heads} query heads; it has"
            f" {len(problem.kv_map)} entries."
        )
    elif any(not 0 <= g < groups for g in problem.kv_map):
        raise ShapeError(f"kv_map names key-value heads from 0 to {groups - 1}; got {list(problem.kv_map)}.")


def _check_visible(problem: Problem) -> None:
    visible, q, k = problem.visible, problem.q, problem.k
    window = visible.window
    if window is not None and (isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)) or window < 1):
        raise InputError(
            "window must be a whole number of keys, at least 1 (with causal: the query itself and window -"
            " 1 earlier keys);"
            f" got {window!r}. Use None for no window."
        )
    if visible.key_padding is not None:
        check_bool("key_padding", visible.key_padding, q)
        if visible.key_padding.shape != (q.shape[0], k.shape[2]):
            raise ShapeError(
                f"key_padding must be (batch, keys) = ({q.shape[0]}, {k.shape[2]}), True = a real key; got"
                f" {shape_of(visible.key_padding)}."
            )
    if visible.mask is not None:
        check_bool("mask", visible.mask, q)
        check_broadcast("mask", visible.mask, problem)


def _check_rule(problem: Problem) -> None:
    rule, q = problem.rule, problem.q
    if rule.scale is not None:
        check_number("scale", rule.scale)
    if rule.softcap is not None:
        check_number("softcap", rule.softcap)
        if rule.softcap <= 0:
            raise InputError(
                f"softcap must be above 0 (scores become softcap * tanh(score / softcap)); got {rule.softcap}."
                " Use None for no soft cap."
            )
    for name, term in (("bias", rule.bias), ("the additive mask", rule.additive_mask)):
        if term is not None:
            if not isinstance(term, Tensor) or not term.dtype.is_floating_point:
                got = term.dtype if isinstance(term, Tensor) else type(term).__name__
                raise ShapeError(f"{name} is added to the scores and must be a floating point tensor; got {got}.")
            check_device(name, term, q)
            check_broadcast(name, term, problem)
    if rule.distance_bias is not None:
        _check_distance_bias(problem, rule.distance_bias, rule.distance_zero)
    if rule.sinks is not None:
        if not isinstance(rule.sinks, Tensor) or not rule.sinks.dtype.is_floating_point:
            raise ShapeError("sinks must be a floating point tensor with one logit per query head.")
        check_device("sinks", rule.sinks, q)
        if tuple(rule.sinks.shape) != (q.shape[1],):
            raise ShapeError(f"sinks must have one logit per query head, ({q.shape[1]},); got {shape_of(rule.sinks)}.")


def _check_pairs(problem: Problem, pairs: Tensor) -> None:
    batch, _, queries, _ = problem.q.shape
    if pairs.dtype != torch.int64:
        raise ShapeError(f"pairs must be int64 key positions, -1 for none; got {pairs.dtype}.")
    check_device("pairs", pairs, problem.q)
    if pairs.ndim != 3 or pairs.shape[1] not in (1, batch) or pairs.shape[2] != queries:
        raise ShapeError(
            f"pairs must be (rules, batch or 1, queries) = (any, {batch} or 1, {queries}); got {shape_of(pairs)}."
        )
    _check_pair_range(problem, pairs)


def _check_pair_range(problem: Problem, pairs: Tensor) -> None:
    keys = problem.k.shape[2]
    if not concrete(pairs) or pairs.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(pairs))
    if low < -1 or high >= keys:
        raise InputError(f"pairs must name keys from 0 to {keys - 1}, or -1 for none; got {low if low < -1 else high}.")


def _check_distance_bias(problem: Problem, table: Tensor, zero: int) -> None:
    heads, queries, keys = problem.q.shape[1], problem.q.shape[2], problem.k.shape[2]
    if not isinstance(table, Tensor) or not table.dtype.is_floating_point:
        raise ShapeError("distance_bias is added to the scores and must be a floating point tensor.")
    check_device("distance_bias", table, problem.q)
    if table.ndim != 2 or table.shape[0] not in (1, heads):
        raise ShapeError(
            f"distance_bias must be (query heads or 1, distances) = ({heads} or 1, any); got {shape_of(table)}."
        )
    low, high = zero - (problem.offset + queries - 1), zero + keys - 1 - problem.offset
    if queries and keys and (low < 0 or high >= table.shape[1]):
        raise ShapeError(
            f"distance_bias must have an entry for every distance j - i between a key and a query, here from"
            f" {low - zero} to {high - zero}; with distance_zero={zero} its {table.shape[1]} entries cover {-zero} to"
            f" {table.shape[1] - 1 - zero}. Make it with headwise.kernels.alibi or t5_bias."
        )


def _check_classes(problem: Problem, classes: Tensor, n_classes: int) -> None:
    batch, keys = problem.q.shape[0], problem.k.shape[2]
    if classes.dtype != torch.uint8:
        raise ShapeError(f"classes must be uint8, one small number per key; got {classes.dtype}.")
    check_device("classes", classes, problem.q)
    if classes.ndim != 2 or classes.shape[0] not in (1, batch) or classes.shape[1] != keys:
        raise ShapeError(f"classes must be (batch or 1, keys) = ({batch} or 1, {keys}); got {shape_of(classes)}.")
    if not 1 <= n_classes <= 256:
        raise InputError(f"n_classes must be from 1 to 256; got {n_classes}.")


def _check_pair_lists(problem: Problem, offsets: Tensor, keys: Tensor) -> None:
    rows = problem.q.shape[0] * problem.q.shape[2]
    for name, tensor in (("offsets", offsets), ("keys", keys)):
        if tensor.dtype != torch.int64 or tensor.ndim != 1:
            raise ShapeError(
                f"The {name} of pair_lists must be int64 with one axis; got {tensor.dtype} {shape_of(tensor)}."
            )
        check_device(f"the {name} of pair_lists", tensor, problem.q)
    if len(offsets) != rows + 1:
        raise ShapeError(
            f"The offsets of pair_lists must be batch * queries + 1 = {rows + 1} numbers; got {len(offsets)}."
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(keys) or bool((offsets[1:] < offsets[:-1]).any()):
        raise InputError(
            f"The offsets of pair_lists must rise from 0 to the number of listed keys, {len(keys)}; they go from"
            f" {int(offsets[0])} to {int(offsets[-1])}{' and fall between' if int(offsets[-1]) == len(keys) else ''}."
        )


def check_number(name: str, value: object) -> None:
    """Refuse what is no finite Python number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        hint = f" For a learned or per-head {name}, multiply q by it and pass scale=1.0." if name == "scale" else ""
        raise InputError(f"{name} must be a Python number; got {type(value).__name__}.{hint}")
    if isinstance(value, (int, float)) and not -float("inf") < value < float("inf"):
        raise InputError(f"{name} must be finite; got {value}.")


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    """Refuse a tensor that is not where q is."""
    if tensor.device != q.device:
        raise ShapeError(
            f"{name} must be on q's device, {q.device}; it is on {tensor.device}. Move it with .to(q.device)."
        )


def check_bool(name: str, mask: Tensor, q: Tensor) -> None:
    """Refuse a mask that is not boolean, with the fix."""
    if not isinstance(mask, Tensor):
        raise ShapeError(f"{name} must be a tensor; got {type(mask).__name__}.")
    if mask.dtype != torch.bool:
        raise InputError(
            f"{name} must be boolean, True = may attend; got {mask.dtype}. If 1 means keep, pass {name}.bool();"
            f" if 1 means drop, pass ~{name}.bool()."
        )
    check_device(name, mask, q)


def check_broadcast(name: str, tensor: Tensor, problem: Problem) -> None:
    """Refuse what is not four axes, each 1 or the full length."""
    full = (problem.q.shape[0], problem.q.shape[1], problem.q.shape[2], problem.k.shape[2])
    words = "(batch or 1, query heads or 1, queries or 1, keys or 1)"
    if tensor.ndim != 4 or any(size not in (1, want) for size, want in zip(tensor.shape, full, strict=True)):
        sizes = ", ".join(f"{want} or 1" for want in full)
        raise ShapeError(f"{name} must broadcast to the scores: {words} = ({sizes}); got {shape_of(tensor)}.")

"""From the arguments of one attention call to a :class:`~headwise.kernels.problem.Problem`.

Everything that changes the scores is honoured or refused by name; nothing is dropped.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headwise.errors import ModelError, UnsupportedError
from headwise.kernels.problem import Problem, ScoreRule, Visible
from headwise.models.masks import CompactMask

__all__ = ["Call", "problem_of", "split_additive"]

#: Arguments that cannot change a score: bookkeeping, and what only variable-length kernels read.
_HARMLESS: Final = frozenset(
    (
        *("dropout", "scaling", "is_causal", "position_bias", "softcap", "s_aux", "sinks", "sliding_window"),
        *("position_ids", "cache_position", "cache", "past_key_values", "past_key_value", "use_cache", "layer_idx"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
        *("deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    )
)
#: Arguments that select keys and are only given to kernels that headwise does not replace.
_SELECTING: Final = frozenset({"indices", "block_indices", "block_table", "block_mask", "kernel_options"})
#: An additive mask whose non-zero values are all at or below this hides keys, whatever it adds to them.
_HIDES: Final = -1e4


@dataclass(frozen=True)
class Call:
    """The arguments of one attention call.

    Attributes:
        module, path: the attention module and its path, for messages.
        query: (B, H, Q, D_k); ``key`` (B, G, K, D_k); ``value`` (B, G, K, D_v).
        mask: what the model passed as ``attention_mask``.
        original: name of the model's own attention implementation.
        own: the function of that name.
        extra: the other arguments.
        stated: makes the problem, where the call did not come through transformers' interface; given the path.
        settled: the model has computed z already and goes on with that.
        heads, lead: how the tensors as the model has them hold their heads, for such a call.
    """

    module: nn.Module
    path: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    original: str
    own: Callable[..., Any]
    extra: Mapping[str, Any]
    stated: Callable[[str], Problem] | None = None
    settled: bool = False
    heads: Any = None
    lead: tuple[int, ...] = ()


def problem_of(call: Call) -> Problem:
    """What ``call`` computes.

    Raises:
        UnsupportedError: an argument that may change the scores and is not understood, by name; or tensors
            that are not laid out as (batch, head, position, width).
        ModelError: the query heads do not divide into the key-value heads; both numbers are named.
    """
    if call.stated is not None:
        return call.stated(call.path)
    _check_arguments(call)
    query, key, value = _check_shapes(call)
    scale = call.extra.get("scaling")
    if isinstance(scale, Tensor):
        query, scale = query * scale, 1.0
    visible, bias = _mask_of(call, query.shape[2], key.shape[2])
    rule = ScoreRule(
        scale=None if scale is None else float(scale),
        softcap=_softcap(call),
        bias=_joined(_position_bias(call, key.shape[2]), bias),
        sinks=_sinks(call),
    )
    return Problem(query, key, value, visible, rule)


def _check_arguments(call: Call) -> None:
    for name, value in call.extra.items():
        if value is None or name in _HARMLESS:
            continue
        if name in _SELECTING or _reads(call.own, name):
            raise UnsupportedError(
                f"{call.path} ({type(call.module).__name__}) passes the argument '{name}' to its attention function, "
                f"and '{call.original}' reads it; headwise does not know what it does to the scores"
            )


def _reads(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` names the argument, or does something with arguments that it does not name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    if name in code.co_varnames or name in code.co_consts:
        return True
    if function is sdpa_attention_forward or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    return any(step.argval == rest and step.opname.startswith("LOAD") for step in dis.get_instructions(code))


def _check_shapes(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        if tensor.ndim != 4:
            raise UnsupportedError(
                f"{call.path} ({type(call.module).__name__}): {name} has the shape {tuple(tensor.shape)}; "
                "expected four axes (batch, head, position, width)"
            )
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ModelError(
            f"{call.path}: {heads} query heads do not divide into {kv_heads} key-value heads; "
            "num_attention_heads must be a multiple of num_key_value_heads"
        )
    if call.value.shape[1] != kv_heads:
        raise UnsupportedError(f"{call.path}: {kv_heads} key heads but {call.value.shape[1]} value heads")
    batch = max(call.query.shape[0], call.key.shape[0])
    if call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return call.query, call.key, call.value
    query, key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (call.query, call.key, call.value))
    return query, key, value


def _softcap(call: Call) -> float | None:
    value = call.extra.get("softcap")
    return None if value is None else float(value)


def _sinks(call: Call) -> Tensor | None:
    for name in ("s_aux", "sinks"):
        value = call.extra.get(name)
        if value is None:
            continue
        if value.numel() == call.query.shape[1]:
            return value.reshape(-1)  # type: ignore[no-any-return]
        raise UnsupportedError(
            f"{call.path}: the argument '{name}' has the shape {tuple(value.shape)}; "
            "only one sink per query head is understood"
        )
    return None


def _position_bias(call: Call, keys: int) -> Tensor | None:
    bias = call.extra.get("position_bias")
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.ndim != 4:
        raise UnsupportedError(f"{call.path}: 'position_bias' is not a tensor with four axes")
    return bias[..., :keys] if bias.shape[-1] > keys else bias


def _joined(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _mask_of(call: Call, queries: int, keys: int) -> tuple[Visible, Tensor | None]:
    mask = call.mask
    if mask is None:
        return _without_mask(call, queries), None
    if isinstance(mask, CompactMask):
        if (mask.queries, mask.keys) != (queries, keys):
            raise UnsupportedError(
                f"{call.path}: a mask for {mask.queries} queries and {mask.keys} keys reached an attention of "
                f"{queries} and {keys}"
            )
        return _for_batch(mask.visible(), call.query.shape[0]), None
    if not isinstance(mask, Tensor) or mask.ndim > 4 or mask.ndim < 2:
        raise UnsupportedError(f"{call.path}: an attention mask of the kind {_kind(mask)} is not understood")
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if mask.dtype == torch.bool:
        return Visible(mask=mask), None
    if not mask.is_floating_point():
        raise UnsupportedError(
            f"{call.path}: an attention mask of {_kind(mask)} is neither boolean nor additive; "
            "what 0 and 1 mean cannot be told"
        )
    return split_additive(mask)


def _kind(mask: Any) -> str:
    return f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def _for_batch(visible: Visible, batch: int) -> Visible:
    padding = visible.key_padding
    if padding is None or padding.shape[0] == batch or padding.shape[0] != 1:
        return visible
    return replace(visible, key_padding=padding.expand(batch, -1))


def _without_mask(call: Call, queries: int) -> Visible:
    """As transformers' own functions read a missing mask.

    ``eager`` sees every key. ``sdpa`` goes by ``is_causal`` (the argument, else the module's, else true) when there
    is more than one query, aligned at the top left: the keys beyond the queries are unwritten cache.
    """
    if call.original == "eager":
        return Visible()
    stated = call.extra.get("is_causal")
    causal = bool(getattr(call.module, "is_causal", True) if stated is None else stated)
    if not causal or queries == 1:
        return Visible()
    window = call.extra.get("sliding_window") if "flash" in call.original else None
    return Visible(causal=True, offset=None if "flash" in call.original else 0, window=window or None)


_SPLIT: Any = WeakIdKeyDictionary()


def split_additive(mask: Tensor) -> tuple[Visible, Tensor | None]:
    """Split an additive mask into what it hides and what it adds; remembered while the mask lives."""
    known = None if mask.requires_grad else _SPLIT.get(mask)
    if known is not None and known[0] == mask._version:
        split: tuple[Visible, Tensor | None] = known[1]
        return split
    with torch.no_grad():
        hidden = mask <= torch.finfo(mask.dtype).min
        rest = (mask != 0) & ~hidden
        if bool(rest.any()) and bool((mask[rest] <= _HIDES).all()):
            hidden, rest = hidden | rest, torch.zeros_like(rest)
        hides, adds = bool(hidden.any()), bool(rest.any())
    bias = (mask.masked_fill(hidden, 0.0) if hides else mask) if adds or mask.requires_grad else None
    split = Visible(mask=~hidden if hides else None), bias
    if not mask.requires_grad:
        _SPLIT[mask] = (mask._version, split)
    return split

"""From torch's attention, or a model's own softmax, to the calls that sessions understand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.kernels.problem import Problem, ScoreRule, Visible
from headwise.models.masks import CompactMask, CompactMaskError
from headwise.models.problems import Call, split_additive
from headwise.models.torch_seam.following import Weighing
from headwise.models.torch_seam.functions import ATTENTION
from headwise.models.torch_seam.heads import Heads

__all__ = ["Direct", "attention_call", "softmax_call"]

_NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: What is added to a score hides the key from here on; the smallest masks in use are -10,000.
_HIDES: Final = -9e3


@dataclass(frozen=True)
class Direct:
    """An attention call that reached torch without transformers' interface.

    Attributes:
        call: the call, heads split.
        back: takes (B, Q, H, D_v) to what the function would have returned.
    """

    call: Call
    back: Callable[[Tensor], Tensor]


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


def attention_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], heads_of: Callable[[int], Heads]
) -> Direct:
    """A call of ``scaled_dot_product_attention``.

    Raises:
        UnsupportedError: nested tensors, or tensors without an axis for batch or heads.
    """
    given = _arguments(args, kwargs)
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    name = type(module).__name__
    if any(isinstance(one, Tensor) and one.is_nested for one in (query, key, value, mask)):
        raise UnsupportedError(
            f"{name} gives nested tensors to scaled_dot_product_attention, whose rows have lengths of their own; "
            "headwise does not understand them: pad the batch and give a mask"
        )
    if isinstance(mask, CompactMask):
        raise CompactMaskError("it gives it to scaled_dot_product_attention")
    if query.ndim < 3:
        raise UnsupportedError(
            f"{name} gives {tuple(query.shape)} to scaled_dot_product_attention: no axis for batch or heads"
        )
    heads = heads_of(query.ndim - 2)
    lead = tuple(query.shape[:-2])
    if not given.get("enable_gqa", False):
        shapes = [one.shape[:-2] for one in (query, key, value)]
        lead = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    query_BHQD = heads.split(query.expand(*lead, *query.shape[-2:]))
    key_BGKD, value_BGKD = heads.groups(key, lead), heads.groups(value, lead)
    key_BGKD, value_BGKD = _same_groups(key_BGKD, value_BGKD)

    def own(*_args: Any, **_kwargs: Any) -> tuple[Tensor, None]:
        return heads.split(ATTENTION(*args, **kwargs)).transpose(1, 2), None

    def stated(_path: str) -> Problem:
        hidden, added = _mask(heads, mask, lead)
        visible = Visible(
            causal=bool(given.get("is_causal", False)), offset=0 if given.get("is_causal") else None, mask=hidden
        )
        return Problem(query_BHQD, key_BGKD, value_BGKD, visible, ScoreRule(scale=given.get("scale"), bias=added))

    call = Call(
        module,
        "",
        query_BHQD,
        key_BGKD,
        value_BGKD,
        None,
        "scaled_dot_product_attention",
        own,
        {"dropout": float(given.get("dropout_p") or 0.0)},
        stated=stated,
        heads=heads,
        lead=lead,
    )
    return Direct(call, lambda output: heads.joined(output.transpose(1, 2), lead))


def _same_groups(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with one number of heads, where one of the two was broadcast."""
    if key.shape[1] == value.shape[1]:
        return key, value
    most = max(key.shape[1], value.shape[1])
    return key.expand(-1, most, -1, -1), value.expand(-1, most, -1, -1)


def _mask(heads: Heads, mask: Any, lead: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """What a mask lets see, and what it adds; each broadcastable to (B, H, Q, K), or None."""
    if mask is None:
        return None, None
    whole = heads.rule(mask, lead)
    if mask.dtype == torch.bool:
        return whole, None
    visible, added = split_additive(whole)
    return visible.mask, added


def softmax_call(
    module: nn.Module, weighing: Weighing, result: Tensor, heads_of: Callable[[int], Heads]
) -> Direct | Tensor:
    """A product of weights and values, after a softmax of the model's own.

    The result itself when the queries and keys behind the weights were not seen, or do not fit them.
    """
    product, origin = weighing.product, weighing.weights.origin
    scores = _scores(weighing)
    if origin is None or scores is None:
        return result
    z = product.turned(result)
    lead = tuple(z.shape[:-2])
    rows, columns = scores.shape[-2:]
    query = _fitted(origin.query, lead, rows)
    key = _fitted(origin.key_turned.transpose(-1, -2), lead, columns)
    if query is None or key is None or tuple(scores.shape[:-2]) != lead:
        return result
    heads = heads_of(len(lead))
    query_BHQD = heads.split(query.expand(*lead, *query.shape[-2:]))
    key_BGKD, value_BGKD = _same_groups(heads.groups(key, lead), heads.groups(product.right, lead))

    def stated(_path: str) -> Problem:
        return _from_scores(heads.split(scores.detach()), query_BHQD, key_BGKD, value_BGKD, origin.scale)

    def own(*_args: Any, **_kwargs: Any) -> tuple[Tensor, None]:
        return heads.split(z).transpose(1, 2), None

    call = Call(
        module,
        "",
        query_BHQD,
        key_BGKD,
        value_BGKD,
        None,
        "softmax",
        own,
        {},
        stated=stated,
        settled=True,
        heads=heads,
        lead=lead,
    )
    return Direct(call, lambda output: product.back(heads.joined(output.transpose(1, 2), lead)))


def _scores(weighing: Weighing) -> Tensor | None:
    """What went into the softmax, laid like the first factor of the product."""
    scores, product = weighing.weights.scores, weighing.product
    given = product.left_as_given
    if given is None or scores.numel() != given.numel():
        return None
    scores = scores.reshape(given.shape)
    return scores if product.left_order is None else scores.permute(product.left_order)


def _fitted(factor: Tensor, lead: tuple[int, ...], length: int) -> Tensor | None:
    """A factor of the scores with the axes ``lead`` before (length, width); None when it cannot be brought there."""
    if factor.shape[-2] != length:
        return None
    own = tuple(factor.shape[:-2])
    if len(own) == len(lead) and all(size in (1, whole) for size, whole in zip(own, lead, strict=True)):
        return factor
    if torch.Size(own).numel() != torch.Size(lead).numel():
        return None
    return factor.reshape(*lead, *factor.shape[-2:])


def _from_scores(scores_BHQK: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Problem:
    """The problem whose scores are exactly ``scores_BHQK``: what is not scale * q.k is its bias."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        each = query.shape[1] // key.shape[1]
        product = (query.to(dtype) * scale) @ key.to(dtype).repeat_interleave(each, 1).transpose(-1, -2)
        rest = scores_BHQK.to(dtype) - product
        hidden = rest <= _HIDES
        bias = rest.masked_fill(hidden, 0.0)
    return Problem(
        query.detach(),
        key.detach(),
        value.detach().to(query.dtype),
        Visible(mask=~hidden),
        ScoreRule(scale=scale, bias=bias),
    )

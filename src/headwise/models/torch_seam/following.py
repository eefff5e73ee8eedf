"""Follows tensors from the product of queries and keys to the softmax, and from there to the values.

A model that takes its own softmax computes ``softmax(f(q k^T)) v`` in steps of torch functions. Each
thread remembers which tensors are scores (of which queries and keys) and which are weights (of which
scores); the product of weights and values is an attention call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from headwise.models.torch_seam.functions import Product, is_softmax, passes_on, scale_of, softmax_input

__all__ = ["STATE", "Scores", "Weighing", "Weights", "follow", "weighing"]


@dataclass(frozen=True)
class Scores:
    """A product of queries (..., Q, D) and keys (..., D, K), and the factor that it was multiplied by since."""

    query: Tensor
    key_turned: Tensor
    scale: float


@dataclass(frozen=True)
class Weights:
    """What went into a softmax, and the product that it came from, if that was seen."""

    scores: Tensor
    origin: Scores | None


@dataclass(frozen=True)
class Weighing:
    """The product of weights and values: an attention call of a model that takes its own softmax."""

    weights: Weights
    product: Product


class _State(threading.local):
    """What a thread remembers.

    Attributes:
        scores, weights: tensors that are followed, held weakly.
        running: the watched modules whose forward is running, innermost last.
        busy: headwise itself is computing.
        entered: seams that a module entered because its thread was not inside, and the module.
    """

    def __init__(self) -> None:
        self.scores: Any = WeakIdKeyDictionary()
        self.weights: Any = WeakIdKeyDictionary()
        self.running: list[nn.Module] = []
        self.busy = False
        self.entered: list[tuple[Any, nn.Module]] = []


STATE = _State()


def follow(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], product: Product | None, result: Any) -> None:
    """Note what the result of a call is, if it is scores or weights."""
    if not isinstance(result, Tensor) or result.ndim < 3:
        return
    if product is not None:
        if _activation(product.left) and _activation(product.right):
            STATE.scores[result] = Scores(product.left, product.right, product.alpha)
        return
    if is_softmax(func):
        scores = softmax_input(args, kwargs)
        if scores is not None:
            STATE.weights[result] = Weights(scores, STATE.scores.get(scores))
        return
    if not (STATE.scores or STATE.weights) or not passes_on(func):
        return
    for one in _tensors(args):
        if one.numel() != result.numel() or one.shape[-1] != result.shape[-1]:
            continue
        if one in STATE.weights:
            STATE.weights[result] = STATE.weights[one]
            return
        if one in STATE.scores:
            scores = STATE.scores[one]
            factor = scale_of(func, args) if one is args[0] else 1.0
            STATE.scores[result] = scores if factor == 1.0 else replace(scores, scale=scores.scale * factor)
            return


def weighing(product: Product) -> Weighing | None:
    """The attention call that a product is, when its first factor are weights."""
    weights = None if product.left_as_given is None else STATE.weights.get(product.left_as_given)
    return None if weights is None else Weighing(weights, product)


def _activation(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter)


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for one in args:
        if isinstance(one, Tensor):
            yield one

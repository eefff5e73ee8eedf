"""What an attention computation is: who may see whom, how scores are made, what is wanted.

Every backend takes the same :class:`Problem` and returns the same :class:`Answer`, so that one
float64 reference can judge them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Answer", "Choice", "Predicate", "Problem", "Rows", "ScoreRule", "Visible", "Wanted"]

#: (batch_index, head_index, query_position, key_position) -> bool, elementwise on broadcastable
#: int64 tensors. Query positions already include ``Visible.offset``.
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Visible:
    """Which keys a query may see. Every rule given must allow a key (they are intersected).

    Attributes:
        causal: a query at position i sees keys j <= i.
        window: with ``causal`` the query sees itself and ``window - 1`` earlier keys; without it
            all keys with ``|i - j| < window``. None: no window.
        offset: position of query row 0 counted in keys; None hangs the last query from the last
            key (``K - Q``, the bottom right corner).
        key_padding: (B, K) bool, True = a real key.
        mask: bool, broadcastable to (B, H, Q, K), True = may attend.
        predicate: any other rule, evaluated block by block.
    """

    causal: bool = False
    window: int | None = None
    offset: int | None = None
    key_padding: Tensor | None = None
    mask: Tensor | None = None
    predicate: Predicate | None = None


@dataclass(frozen=True)
class ScoreRule:
    """How scores are made, in this order: scale, soft cap, bias, then the mask.

    Attributes:
        scale: factor on q.k; None is ``d_k ** -0.5``. Applied to q before the product.
        softcap: c gives ``c * tanh(score / c)``; None for none.
        bias: float, broadcastable to (B, H, Q, K), added; values at or below ``finfo.min`` of its
            dtype hide the key.
        sinks: (H,) one extra logit per head that takes mass and gives no value.
        additive_mask: a second term added after ``bias``, with the same rules; apart so that two
            small tensors need not be broadcast into one large one.
        distance_bias: (H or 1, n), added to the score of query i and key j at ``[j - i + distance_zero]``
            (ALiBi's slopes, T5's buckets), without a tensor of queries x keys; see
            :func:`headwise.kernels.alibi` and :func:`headwise.kernels.t5_bias`. It hides nothing.
        distance_zero: the index of distance 0 in ``distance_bias``.
    """

    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    additive_mask: Tensor | None = None
    distance_bias: Tensor | None = None
    distance_zero: int = 0

    @property
    def added(self) -> tuple[Tensor, ...]:
        """The tensors that are added to the scores: ``bias`` and ``additive_mask``, where given."""
        return tuple(term for term in (self.bias, self.additive_mask) if term is not None)


@dataclass(frozen=True)
class Wanted:
    """What is asked for beside z.

    Attributes:
        rows: the row statistics.
        distance: the mean attended distance ``sum_j p_ij |i - j|`` of every row.
        pairs: int64 (P, B or 1, Q), for each rule and query the key whose weight is wanted, -1 for none.
        weights: the (B, H, Q, K) pattern itself: the only thing that is n x n.
        classes: uint8 (B or 1, K), a class for every key; the weight on each class is wanted.
        n_classes: how many classes there are; a key of a class at or beyond it belongs to none.
        pair_lists: any number of keys per query: int64 offsets (B * Q + 1,) into an int64 list of keys; query
            q of example b names the keys from ``offsets[b * Q + q]`` up to the next offset.
    """

    rows: bool = False
    distance: bool = False
    pairs: Tensor | None = None
    weights: bool = False
    classes: Tensor | None = None
    n_classes: int = 0
    pair_lists: tuple[Tensor, Tensor] | None = None

    @property
    def statistics(self) -> bool:
        """Whether anything about the rows is wanted: ``rows``, ``distance``, pairs or classes."""
        return self.rows or self.distance or any(x is not None for x in (self.pairs, self.classes, self.pair_lists))


@dataclass(frozen=True)
class Problem:
    """One attention computation: q (B, H, Q, D_k), k (B, G, K, D_k), v (B, G, K, D_v).

    ``kv_map`` (H,) names the key-value head of each query head; None means ``h // (H // G)``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Visible = field(default_factory=Visible)
    rule: ScoreRule = field(default_factory=ScoreRule)
    kv_map: tuple[int, ...] | None = None

    @property
    def scale(self) -> float:
        """The factor on q.k: ``rule.scale``, or ``d_k ** -0.5``."""
        return float(self.q.shape[-1] ** -0.5) if self.rule.scale is None else self.rule.scale

    @property
    def offset(self) -> int:
        """The position of query row 0, counted in keys."""
        if self.visible.offset is None:
            return self.k.shape[2] - self.q.shape[2]
        return self.visible.offset

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 input, float32 for all others."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Rows:
    """Statistics of each row of the pattern; float32 (float64 for float64 input), (B, H, Q).

    Attributes:
        lse: log-sum-exp of the visible scores (sinks left out), nats; -inf for a row without a key.
        entropy: of the weights over the keys, renormalised when there is a sink; nats, >= 0; 0 for a row without a key.
        max_weight: largest weight in the pattern (what multiplies v), in [0, 1]; 0 for a row without a key.
        argmax: int64, its key; the lowest index on a tie; -1 for a row without a key.
        visible: int64, the number of keys that the row may see.
        sink: weight that went to the sink, or None without sinks.
        distance: mean attended distance in tokens (renormalised over the keys), or None if not wanted.
        pairs: (P, B, H, Q) weight on the wanted pairs, or None; 0 where the pair is hidden or -1.
        classes: (B, H, Q, C) weight on each class of keys, or None.
        pair_lists: (H, all listed pairs) weight on each, or None; 0 where the pair is hidden or no key.
    """

    lse: Tensor
    entropy: Tensor
    max_weight: Tensor
    argmax: Tensor
    visible: Tensor
    sink: Tensor | None = None
    distance: Tensor | None = None
    pairs: Tensor | None = None
    classes: Tensor | None = None
    pair_lists: Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """Which backend ran, and for every other one why it did not: (name, reason) pairs.

    ``notes`` says what the backend had to do to its input first, such as a copy, and why.
    """

    backend: str
    reasons: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """z (B, H, Q, D_v) in q's dtype, what else was wanted, and which backend ran.

    ``weights`` is (B, H, Q, K) in q's dtype: the pattern that multiplies v, so that a row sums to 1
    less what a sink took.
    """

    z: Tensor
    rows: Rows | None = None
    weights: Tensor | None = None
    choice: Choice | None = None

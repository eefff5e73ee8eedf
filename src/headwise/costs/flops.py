"""Floating-point operations of attention: a multiply and an add count as two.

Scores and mixing are counted for every *query* head, also where heads share keys and values: sharing
saves memory, not arithmetic. Each is given twice: *full*, over the whole rectangle of queries and
keys (what a kernel without a mask computes), and *visible*, over exactly the pairs that the mask allows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from headwise.costs.numbers import AttentionNumbers
from headwise.costs.parameters import block_parameters

__all__ = ["AttentionWork", "attention_work", "decode_work", "prefill_work", "visible_pairs"]


@dataclass(frozen=True)
class AttentionWork:
    """Operations of one attention computation (or the sum of several).

    Attributes:
        projections: the products with W_Q, W_K, W_V and W_O.
        expansion: bringing the cached latents of earlier tokens back to keys and values (latent
            attention while decoding; 0 elsewhere).
        relative: products with a table of relative positions (disentangled attention, Inkling; 0 elsewhere).
        scores, mixing: Q K^T and pattern V over the whole rectangle.
        visible_scores, visible_mixing: the same over the visible pairs.
        exponentials: one per visible pair and query head: the softmax.
        pairs, visible_pairs: query-key pairs of the rectangle and of the mask, per head.
    """

    projections: int = 0
    expansion: int = 0
    relative: int = 0
    scores: int = 0
    mixing: int = 0
    visible_scores: int = 0
    visible_mixing: int = 0
    exponentials: int = 0
    pairs: int = 0
    visible_pairs: int = 0

    @property
    def full(self) -> int:
        """All matrix products, scores and mixing over the whole rectangle."""
        return self.projections + self.expansion + self.relative + self.scores + self.mixing

    @property
    def visible(self) -> int:
        """All matrix products, scores and mixing over the visible pairs."""
        return self.projections + self.expansion + self.relative + self.visible_scores + self.visible_mixing

    def __add__(self, other: AttentionWork) -> AttentionWork:
        return AttentionWork(
            **{part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)}
        )


def visible_pairs(
    queries: int, keys: int, *, causal: bool = True, window: int | None = None, chunk: int | None = None
) -> int:
    """Number of query-key pairs that a mask allows; the last query hangs from the last key.

    Args:
        queries, keys: lengths.
        causal: a query sees itself and earlier keys.
        window: of these at most ``window``; without ``causal`` all keys at a distance below ``window``.
        chunk: only keys of the query's own chunk of ``chunk`` positions.

    Example:
        >>> visible_pairs(64, 64), visible_pairs(4, 4, window=2), visible_pairs(1, 5), visible_pairs(3, 3, causal=False)
        (2080, 7, 5, 9)
    """
    if causal:
        before = max(0, keys - queries)
        return _triangle(keys, window, chunk) - _triangle(before, window, chunk)
    if window is None and chunk is None:
        return queries * keys
    total = 0
    for query in range(keys - queries, keys):
        low, high = 0, keys - 1
        if window is not None:
            low, high = max(low, query - window + 1), min(high, query + window - 1)
        if chunk is not None:
            low, high = max(low, query // chunk * chunk), min(high, query // chunk * chunk + chunk - 1)
        total += max(0, high - low + 1)
    return total


def _triangle(length: int, window: int | None, chunk: int | None) -> int:
    """Visible pairs of the first ``length`` positions of a causal sequence."""
    if chunk is not None:
        whole, part = divmod(length, chunk)
        return whole * _triangle(chunk, window, None) + _triangle(part, window, None)
    ramp = length if window is None else min(length, window)
    return ramp * (ramp + 1) // 2 + (length - ramp) * ramp


def attention_work(
    site: AttentionNumbers, batch: int, queries: int, keys: int, *, pairs: int | None = None
) -> AttentionWork:
    """Scores and mixing of ``queries`` new positions over ``keys`` positions; no projections.

    Args:
        site: the attention layer.
        batch: sequences.
        queries, keys: lengths.
        pairs: pairs of the rectangle where it is smaller than ``queries * keys`` (a cache that keeps a window).

    Example:
        >>> from headwise.costs import grid
        >>> site = grid(768, 12, 1).attention[0]
        >>> work = attention_work(site, 1, 64, 64)
        >>> work.scores + work.mixing, work.visible_scores + work.visible_mixing
        (12582912, 6389760)
    """
    pairs = queries * keys if pairs is None else pairs
    seen = visible_pairs(queries, keys, causal=site.causal, window=site.window, chunk=site.chunk)
    per_pair = batch * site.query_heads * site.calls
    pairs *= batch if site.packed else 1
    return AttentionWork(
        scores=2 * per_pair * pairs * site.d_k,
        mixing=2 * per_pair * pairs * site.d_v,
        visible_scores=2 * per_pair * seen * site.d_k,
        visible_mixing=2 * per_pair * seen * site.d_v,
        exponentials=per_pair * seen,
        pairs=batch * pairs,
        visible_pairs=batch * seen,
    )


def prefill_work(site: AttentionNumbers, batch: int, context: int, source: int) -> AttentionWork:
    """Operations of ``site`` for a whole prompt of ``context`` tokens (``source`` on the encoder's side)."""
    length = source if site.stack != "decoder" else context
    queries = site.queries or length
    keys = source if site.kind == "cross" else length
    block = block_parameters(site)
    own = block.q + block.o + site.matrices
    projections = 2 * batch * (queries * own + keys * (block.k + block.v))
    if site.relative is not None:
        projections += 2 * site.relative.rows(queries) * site.relative.projections
    relative = _relative(site, batch, queries, queries)
    return AttentionWork(projections=projections, relative=relative) + attention_work(site, batch, queries, keys)


def _relative(site: AttentionNumbers, batch: int, queries: int, length: int) -> int:
    """Products of ``queries`` positions of a sequence of ``length`` with the table of relative positions."""
    if site.relative is None:
        return 0
    width = site.d_k if site.relative.width is None else site.relative.width
    return 2 * batch * site.relative.products * site.query_heads * queries * site.relative.rows(length) * width


def decode_work(site: AttentionNumbers, batch: int, context: int, source: int) -> AttentionWork:
    """Operations of ``site`` for one new token per sequence, which sees ``context`` tokens with itself."""
    block = block_parameters(site)
    own = block.q + block.o + site.matrices
    if site.kind == "cross":
        return AttentionWork(projections=2 * batch * own) + attention_work(site, batch, 1, source)
    kept = visible_pairs(1, context, causal=site.causal, window=site.window, chunk=site.chunk)
    expansion = 0
    if site.shares_cache:
        fresh = 0
    elif site.latent is not None:
        fresh, expansion = block.k + block.v, 2 * batch * (kept - 1) * block.v
    else:
        fresh = block.k + block.v
    relative = _relative(site, batch, 1, context)
    projections = AttentionWork(projections=2 * batch * (own + fresh), expansion=expansion, relative=relative)
    return projections + attention_work(site, batch, 1, context, pairs=kept)


def absorbed_decode_flops(site: AttentionNumbers, batch: int, context: int) -> int:
    """All operations of a decode step under latent attention that never expands the latents.

    W_K's up-projection is applied to the query and W_V's to the mixed latent (DeepSeek-AI 2024, section 2.1.2).
    """
    latent = site.latent
    assert latent is not None
    block = block_parameters(site)
    kept = visible_pairs(1, context, causal=site.causal, window=site.window, chunk=site.chunk)
    fixed = block.q + block.k + block.v + block.o + site.matrices
    per_key = site.query_heads * (2 * latent.kv_rank + latent.rope)
    return 2 * batch * (fixed + kept * per_key)

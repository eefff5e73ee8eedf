"""What is kept per token while decoding, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.costs.numbers import AttentionNumbers

__all__ = ["SiteCache", "site_cache", "token_elements"]


@dataclass(frozen=True)
class SiteCache:
    """The key-value cache of one attention layer.

    Attributes:
        token_bytes: bytes per token and sequence.
        tokens: tokens kept per sequence: at most the window.
        bytes: of the whole batch.
        transformers_bytes: the same as transformers' ``DynamicCache`` keeps it: of a window of W
            it keeps W - 1 keys, since the token that comes next brings its own (and all keys of a window of 1).
    """

    token_bytes: float
    tokens: int
    bytes: float
    transformers_bytes: float


def token_elements(site: AttentionNumbers) -> int:
    """Numbers kept per token: key-value heads times true widths, or the latent with its rotary part.

    Example:
        >>> from headwise.costs import grid
        >>> token_elements(grid(4096, 32, 32, kv_heads=8).attention[0])
        2048
    """
    if not site.cached or site.shares_cache:
        return 0
    if site.latent is not None:  # of all heads, and it stays where none is left
        return site.latent.kv_rank + site.latent.rope
    return site.kv_heads * (site.d_k + site.d_v)


def site_cache(site: AttentionNumbers, batch: int, context: int, source: int, itemsize: float) -> SiteCache:
    """The cache of ``site`` after ``context`` tokens (``source`` on the encoder's side)."""
    token_bytes = token_elements(site) * itemsize
    if site.kind == "cross":
        tokens = theirs = source
    else:
        span = min((limit for limit in (site.window, site.chunk) if limit is not None), default=None)
        tokens = context if span is None else min(context, span)
        theirs = context if span is None or span == 1 else min(context, span - 1)
    return SiteCache(token_bytes, tokens, batch * tokens * token_bytes, batch * theirs * token_bytes)

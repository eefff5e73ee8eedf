"""Parameters of the weights of one attention block, by part and per head."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.costs.numbers import AttentionNumbers

__all__ = ["BlockParameters", "block_parameters"]


@dataclass(frozen=True)
class BlockParameters:
    """Parameters of one block.

    Attributes:
        q, k, v, o: weights of the projections, without biases. Under latent attention ``k`` is the
            down-projection of keys and values and ``v`` the up-projection of both.
        biases: of the four projections.
        norms: weights of query, key and latent norms.
        others: everything else that belongs to the block.
        per_head: what goes when one query head is removed: its rows of W_Q and of an output gate, its columns of
            W_O and, where every query head has a key-value head of its own, its rows of W_K and W_V.
        per_group: what goes when one key-value head is removed together with its query heads; None
            under latent attention, where heads share the latent.
    """

    q: int
    k: int
    v: int
    o: int
    biases: int
    norms: int
    others: int
    per_head: int
    per_group: int | None

    @property
    def matrices(self) -> int:
        """Weights of the four projections."""
        return self.q + self.k + self.v + self.o

    @property
    def total(self) -> int:
        """All parameters of the block."""
        return self.matrices + self.biases + self.norms + self.others


def block_parameters(site: AttentionNumbers) -> BlockParameters:
    """Count the parameters of the block that ``site`` reads.

    Example:
        >>> from headwise.costs import grid
        >>> gpt2 = grid(768, 12, 12, bias=True)
        >>> block_parameters(gpt2.attention[0]).total
        2362368
        >>> block_parameters(gpt2.attention[0]).per_head
        196800
    """
    if site.latent is not None:
        return _latent_parameters(site)
    heads, groups, d_k, d_v = site.query_heads, site.kv_heads, site.d_k, site.d_v
    bias_q, bias_k, bias_v, bias_o = site.biases
    norms = {None: 0, "head": 2 * d_k, "layer": (heads + groups) * d_k}[site.qk_norm] if heads else 0
    query_side = d_k * (site.d_model + bias_q) + d_v * site.written + (site.relative.per_head if site.relative else 0)
    query_side += site.gate
    key_side = d_k * (site.width + bias_k) + d_v * (site.width + bias_v)
    if site.qk_norm == "layer":
        query_side, key_side = query_side + d_k, key_side + d_k
    own = heads == groups
    return BlockParameters(
        q=site.d_model * heads * d_k,
        k=site.width * groups * d_k,
        v=site.width * groups * d_v,
        o=heads * d_v * site.written,
        biases=heads * d_k * bias_q + groups * (d_k * bias_k + d_v * bias_v) + site.written * bias_o,
        norms=norms,
        others=site.matrices + site.others,
        per_head=query_side + (key_side if own else 0),
        per_group=query_side * (heads // groups) + key_side if groups else 0,
    )


def _latent_parameters(site: AttentionNumbers) -> BlockParameters:
    latent = site.latent
    assert latent is not None
    heads, d_k, d_v = site.query_heads, site.d_k, site.d_v
    up = d_k - latent.rope + d_v
    if latent.q_rank is None:
        queries, query_rows = site.d_model * heads * d_k, site.d_model * d_k
    else:
        queries = site.d_model * latent.q_rank + latent.q_rank * heads * d_k
        query_rows = latent.q_rank * d_k
    bias_q, bias_k, _, bias_o = site.biases
    down = latent.kv_rank + latent.rope
    width_q = (heads * d_k if latent.q_rank is None else latent.q_rank) * bias_q
    return BlockParameters(
        q=queries,
        k=site.width * down,
        v=latent.kv_rank * heads * up,
        o=heads * d_v * site.written,
        biases=width_q + down * bias_k + site.written * bias_o,
        norms=latent.kv_rank + (latent.q_rank or 0),
        others=site.matrices + site.others,
        per_head=query_rows + latent.kv_rank * up + d_v * site.written + site.gate,
        per_group=None,
    )

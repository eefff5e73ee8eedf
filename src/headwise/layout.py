"""Where the heads of a model sit: sites in its forward pass, blocks in its weights.

A *site* is one attention computation of a forward pass; a *block* is the weights of its heads.
Sites map many-to-one onto blocks: ALBERT computes attention twelve times with one block.
Measures and gates belong to sites, surgery and parameter counts to blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Block", "HeadId", "HeadLayout", "Projection", "Site", "SiteKey"]

Stack = Literal["encoder", "decoder", "vision", "audio"]
Kind = Literal["self", "cross"]


@dataclass(frozen=True, order=True)
class SiteKey:
    """The name of one attention computation of a forward pass.

    Attributes:
        stack: ``"encoder"`` (also a causal text tower that never writes, as in CLIP), ``"decoder"``, ``"vision"`` or
            ``"audio"``.
        kind: ``"self"`` (keys from the same sequence) or ``"cross"``.
        module: dotted path of the attention module in the model, e.g. ``"encoder.layer.0.attention.self"``.
        call: which call of that module within one forward pass, counted from 0.
    """

    stack: str
    kind: str
    module: str
    call: int = 0

    def __str__(self) -> str:
        return self.module if self.call == 0 else f"{self.module}@{self.call}"


@dataclass(frozen=True, order=True)
class HeadId:
    """One head: its site and its index among the site's query heads, counted from 0."""

    site: SiteKey
    head: int

    def __str__(self) -> str:
        return f"{self.site}:{self.head}"


@dataclass(frozen=True)
class Projection:
    """Rows or columns of one weight that belong to the heads of a block.

    Attributes:
        parameter: dotted path of the module that holds ``weight`` (and perhaps ``bias``).
        transposed: True for GPT-2's ``Conv1D``, whose weight is (in, out).
        arrangement: how heads are laid along the output (q, k, v) or input (o) axis, one of
            ``"heads"`` (head after head, this projection alone), ``"q|k|v"`` (blocks of a fused
            weight), ``"(q,k,v) per head"``, ``"(q..,k,v) per group"``, or ``"by head"`` (each head
            where ``starts`` says, beside what belongs to others: an output gate, the head's keys or values).
        starts: the first row of each head, for ``"by head"``.
        width: how many rows a head has; 0 where that is d_k or d_v.
    """

    parameter: str
    transposed: bool
    arrangement: str
    starts: tuple[int, ...] = ()
    width: int = 0


@dataclass(frozen=True)
class Block:
    """The weights of the heads of one attention module.

    Attributes:
        module: dotted path of the attention module.
        query_heads, kv_heads: numbers of query and of key-value heads (H, G).
        d_k, d_v: width of a query/key head and of a value head.
        kv_map: for each query head the key-value head it reads, length H.
        q, k, v, o: where each projection sits; None where it could not be told from the weights,
            with the reason in ``unknown``.
        o_path: dotted path of the module that applies W_O to the concatenated heads, or None
            where something else stands between the heads and the residual stream.
        unknown: for each part that is None, why.
        gate: rows of a layer whose output each head is multiplied by on its way to W_O; None where there is none.
        partial: for each part whose rows go with the heads but are not their whole map, why: a gate stands between
            the heads and W_O, keys share numbers or read a latent.
    """

    module: str
    query_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    kv_map: tuple[int, ...]
    q: Projection | None = None
    k: Projection | None = None
    v: Projection | None = None
    o: Projection | None = None
    o_path: str | None = None
    unknown: tuple[tuple[str, str], ...] = ()
    gate: Projection | None = None
    partial: tuple[tuple[str, str], ...] = ()

    @property
    def even(self) -> bool:
        """Whether query heads belong to the key-value heads in turn, the same number each (else see ``kv_map``)."""
        if not self.query_heads or self.query_heads % self.kv_heads:
            return not self.query_heads
        each = self.query_heads // self.kv_heads
        return self.kv_map == tuple(head // each for head in range(self.query_heads))


@dataclass(frozen=True)
class Site:
    """One attention computation of a forward pass and the block that it reads.

    Attributes:
        key: the site's name.
        block: path of its block (``Block.module``).
        layer: a label for people, counted from 0 within (stack, kind); never a key.
        causal: whether a query may only see keys at or before its own position.
        window: the sliding window, or None.
    """

    key: SiteKey
    block: str
    layer: int
    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class HeadLayout:
    """All sites of a model in the order in which a forward pass meets them, and their blocks.

    Attributes:
        sites: the attention computations, in order.
        blocks: the weights of their heads, by module path.
        uncovered: (module path, why) of attention in the model that is in no site; empty when all is covered.
        facts: (name, text) of what was decided when the heads were found.
    """

    sites: tuple[Site, ...]
    blocks: dict[str, Block]
    uncovered: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    def block_of(self, key: SiteKey) -> Block:
        """The block that the site named ``key`` reads."""
        return self.blocks[self.site(key).block]

    def site(self, key: SiteKey) -> Site:
        """The site named ``key``; ``KeyError`` when there is none."""
        for site in self.sites:
            if site.key == key:
                return site
        raise KeyError(str(key))

    def heads(self) -> Iterator[HeadId]:
        """Every head of every site, in order."""
        for site in self.sites:
            for head in range(self.blocks[site.block].query_heads):
                yield HeadId(site.key, head)

    def __len__(self) -> int:
        return sum(self.blocks[site.block].query_heads for site in self.sites)

"""What the ledger is computed from: attention layers and whole models, in numbers.

Nothing here knows a tensor. A live model, a config without weights and plain numbers given by hand
all end up as :class:`ModelNumbers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headwise.errors import InputError

__all__ = ["AttentionNumbers", "Latent", "ModelNumbers", "Relative", "Rest", "grid"]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values come from one narrow vector per token.

    Attributes:
        kv_rank: width of the latent that is cached (``kv_lora_rank``).
        rope: width of the rotary part of a key, which is cached beside the latent and shared by all heads.
        q_rank: width of the query's own latent (``q_lora_rank``), or None.

    Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1.
    """

    kv_rank: int
    rope: int
    q_rank: int | None = None


@dataclass(frozen=True)
class Relative:
    """Queries (and keys, in disentangled attention) also meet a table of relative positions.

    Attributes:
        span: largest distance.
        clipped: only as many distances are used as the sequence is long.
        products: how many products with the table are added to the scores (content to position, position to content).
        projections: weights that the table is multiplied by, once per forward pass whatever the batch.
        per_head: parameters that belong to one head alone, of those and of what makes the vectors that meet the table;
            0 where W_Q and W_K are used again.
        sides: rows of the table for each distance: 2, or 1 where only earlier keys are told apart.
        width: of the vectors that meet the table; None is d_k.

    Source: He et al. 2021, DeBERTa, section 3.1.
    """

    span: int
    clipped: bool
    products: int
    projections: int
    per_head: int = 0
    sides: int = 2
    width: int | None = None

    def rows(self, length: int) -> int:
        """Rows of the table that a sequence of ``length`` meets."""
        return self.sides * (min(self.span, length) if self.clipped else self.span)


@dataclass(frozen=True)
class AttentionNumbers:
    """One attention computation (a *site*) and the weights that it reads (its *block*).

    Attributes:
        d_model: width of what queries are projected from.
        query_heads, kv_heads: H and G.
        d_k, d_v: width of a query/key head and of a value head; free of d_model / H.
        d_context: width of what keys and values are projected from; None is d_model.
        d_out: width of what W_O writes; None is d_model.
        causal, window: which keys a query sees: with ``causal`` itself and earlier ones, with a
            window of W at most W of them (without ``causal`` all within less than W).
        chunk: queries see only keys of their own chunk of this many positions (Llama 4), or None.
        biases: whether the projections of q, k, v and o have a bias.
        qk_norm: ``"head"`` normalises queries and keys per head (2 d_k weights), ``"layer"`` over
            all heads at once (H d_k + G d_k weights).
        latent: keys and values come from a latent, or None.
        relative: products with a table of relative positions, or None.
        queries: how many positions ask, where they are not those of the stack (the learned probe of a pooling head), or
            None.
        packed: the sequences of a batch are laid end to end, so that the whole rectangle spans all of them (Pixtral).
        calls: how often scores and mixing are computed over the same projections (differential attention: 2).
        cached: whether its keys and values are kept while decoding.
        shares_cache: it reads the cache of an earlier layer and keeps none of its own.
        stack, kind, layer, name: how people call it; stack ``"second"`` is a model inside the model, which writes
            after it (SeamlessM4T's text to units).
        block: name of the weights; sites with the same block share them and count once.
        matrices: weights of further matrices that every token goes through (an output gate).
        gate: weights and biases of an output gate that belong to one query head; ``matrices`` and ``others`` hold them.
        others: further weights (sinks, relative positions); neither matters to what a head costs.
    """

    d_model: int
    query_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    d_context: int | None = None
    d_out: int | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    biases: tuple[bool, bool, bool, bool] = (False, False, False, False)
    qk_norm: str | None = None
    latent: Latent | None = None
    relative: Relative | None = None
    queries: int | None = None
    packed: bool = False
    calls: int = 1
    cached: bool = True
    shares_cache: bool = False
    stack: str = "decoder"
    kind: str = "self"
    layer: int = 0
    name: str = ""
    block: str = ""
    matrices: int = 0
    gate: int = 0
    others: int = 0

    def __post_init__(self) -> None:
        for name in ("d_model", "d_k", "d_v", "calls"):
            _at_least(name, getattr(self, name), 1)
        _at_least("query_heads", self.query_heads, 0)
        _at_least("kv_heads", self.kv_heads, 0)
        for name in ("d_context", "d_out", "window", "chunk", "queries"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.qk_norm not in (None, "head", "layer"):
            raise InputError(f"qk_norm must be None, 'head' or 'layer', got {self.qk_norm!r}")
        if (self.query_heads == 0) != (self.kv_heads == 0):
            raise InputError(
                "query_heads and kv_heads must both be 0 or both be positive, "
                f"got {self.query_heads} and {self.kv_heads}"
            )

    @property
    def width(self) -> int:
        """Width of what keys and values are projected from."""
        return self.d_model if self.d_context is None else self.d_context

    @property
    def written(self) -> int:
        """Width of what W_O writes."""
        return self.d_model if self.d_out is None else self.d_out


@dataclass(frozen=True)
class Rest:
    """What a model has beside attention, as far as it is known.

    Attributes:
        parameters: all parameters of the model, unique storage, tied ones once; None when only
            attention is known.
        embedding: parameters of embedding tables that are looked up, not multiplied.
        tied: parameters of the output matrix where it is an embedding table as well (counted in
            ``embedding``, not again), else 0.
        head: weights of the output matrix (tied or not); multiplied once per position.
        matrices: weights of the other matrices that every token of a stack goes through, by stack; those
            that several layers share as often as they are used.
        once: weights of matrices that one position of every sequence goes through (a pooler).
        experts: all weights of experts, of which a token goes through ``active_experts``.
        active_experts: see ``experts``.
        active_biases: of ``active_experts``, weights that are added and not multiplied.
        idle_experts: of ``experts``, weights that no token goes through (kept for experts that hand on what they get).
        expert_share: experts used per token over experts (the router's top k / number of experts).
        not_counted: parts whose multiplications are not counted, by name.
    """

    parameters: int | None = None
    embedding: int = 0
    tied: int = 0
    head: int = 0
    matrices: dict[str, int] = field(default_factory=dict)
    once: int = 0
    experts: int = 0
    active_experts: int = 0
    active_biases: int = 0
    idle_experts: int = 0
    not_counted: tuple[str, ...] = ()

    @property
    def expert_matrices(self) -> int:
        """Weights of the expert matrices that one token goes through."""
        return self.active_experts - self.active_biases

    @property
    def expert_share(self) -> float:
        """Experts used per token over all that a token may go through."""
        usable = self.experts - self.idle_experts
        return self.active_experts / usable if usable else 1.0


@dataclass(frozen=True)
class ModelNumbers:
    """A model in numbers.

    Attributes:
        name: how the model is called.
        attention: every site, in order.
        rest: what the model has beside attention.
        dtype: of the weights, as torch names it, or None.
        source: length of the encoder's input where it is fixed (Whisper: 1,500), or None.
        vision: positions of an image where its tower fixes them (ViT-base: 197), or None.
        input_rms: root mean square of what the attention layers read, where it was measured.
        init_std: standard deviation with which weights are drawn, where the config says so.
        notes: what a reader must know about how the numbers were found.
    """

    name: str
    attention: tuple[AttentionNumbers, ...]
    rest: Rest = field(default_factory=Rest)
    dtype: str | None = None
    source: int | None = None
    vision: int | None = None
    input_rms: float | None = None
    init_std: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.attention:
            raise InputError(f"{self.name}: no attention layer, so there is nothing to account for")

    @property
    def blocks(self) -> tuple[AttentionNumbers, ...]:
        """One site per block, the first that reads it."""
        first: dict[str, AttentionNumbers] = {}
        for at, site in enumerate(self.attention):
            first.setdefault(site.block or f"#{at}", site)
        return tuple(first.values())

    @property
    def decodes(self) -> bool:
        """Whether it makes one token after the other."""
        return any(site.cached and site.causal for site in self.attention)


def grid(
    d_model: int,
    heads: int,
    layers: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    window: int | None = None,
    causal: bool = True,
    bias: bool = False,
    d_ff: int | None = None,
    gated: bool = True,
    vocab: int | None = None,
    tied: bool = False,
    name: str | None = None,
) -> ModelNumbers:
    """A model of equal layers from plain numbers.

    Args:
        d_model: width of the residual stream.
        heads: query heads per layer.
        layers: number of layers.
        kv_heads: key-value heads per layer; None is ``heads``.
        head_dim: width of a query/key head; None is ``d_model / heads``, which must be whole.
        value_dim: width of a value head; None is ``head_dim``.
        window: sliding window of every layer, or None.
        causal: a decoder (True) or an encoder (False).
        bias: whether the four projections have biases.
        d_ff: width of the feed-forward layers; None leaves everything beside attention out.
        gated: three matrices per feed-forward layer (SwiGLU) instead of two.
        vocab: size of the vocabulary; None leaves embeddings out.
        tied: the output matrix is the embedding table.
        name: how to call it.

    Raises:
        InputError: a number is not positive, or head counts do not divide.

    Example:
        >>> grid(4096, 32, 32, kv_heads=8).attention[0].d_k
        128
    """
    for label, value in (("d_model", d_model), ("heads", heads), ("layers", layers)):
        _at_least(label, value, 1)
    for label, given in (("kv_heads", kv_heads), ("head_dim", head_dim), ("value_dim", value_dim), ("window", window)):
        if given is not None:
            _at_least(label, given, 1)
    for label, given in (("d_ff", d_ff), ("vocab", vocab)):
        if given is not None:
            _at_least(label, given, 1)
    kv_heads = heads if kv_heads is None else kv_heads
    check_groups(heads, kv_heads)
    if head_dim is None:
        if d_model % heads:
            raise InputError(
                f"d_model {d_model} is not a multiple of heads {heads}, so the width of a head is not known; "
                "give head_dim"
            )
        head_dim = d_model // heads
    layer = AttentionNumbers(
        d_model=d_model,
        query_heads=heads,
        kv_heads=kv_heads,
        d_k=head_dim,
        d_v=head_dim if value_dim is None else value_dim,
        causal=causal,
        window=window,
        biases=(bias, bias, bias, bias),
        cached=causal,
        stack="decoder" if causal else "encoder",
    )
    attention = tuple(replace(layer, layer=at, name=f"layers.{at}", block=f"layers.{at}") for at in range(layers))
    rest = _rest(attention, d_model, layers, d_ff, gated, vocab, tied)
    return ModelNumbers(name or f"{layers} layers of {heads} heads, d_model {d_model}", attention, rest)


def _rest(
    attention: tuple[AttentionNumbers, ...],
    d_model: int,
    layers: int,
    d_ff: int | None,
    gated: bool,
    vocab: int | None,
    tied: bool,
) -> Rest:
    from headwise.costs.parameters import block_parameters

    if d_ff is None and vocab is None:
        return Rest()
    feed_forward = layers * (3 if gated else 2) * d_model * d_ff if d_ff is not None else 0
    table = d_model * vocab if vocab is not None else 0
    total = sum(block_parameters(site).total for site in attention) + feed_forward + (table if tied else 2 * table)
    return Rest(
        parameters=total if d_ff is not None and vocab is not None else None,
        embedding=table,
        tied=table if tied else 0,
        head=table,
        matrices={attention[0].stack: feed_forward},
        not_counted=("norms, biases of the feed-forward layers and learned positions",),
    )


def check_groups(heads: int, kv_heads: int) -> None:
    """Refuse head counts that do not divide."""
    if kv_heads > heads or heads % kv_heads:
        raise InputError(
            f"heads {heads} is not a multiple of kv_heads {kv_heads}: every key-value head must serve the same number "
            "of query heads"
        )


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")

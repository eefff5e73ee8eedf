"""The ledger: what a model's heads cost in parameters, operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

from headwise.costs.cache import SiteCache, site_cache, token_elements
from headwise.costs.dtypes import bytes_of, dtype_name
from headwise.costs.flops import AttentionWork, absorbed_decode_flops, decode_work, prefill_work
from headwise.costs.numbers import AttentionNumbers, ModelNumbers
from headwise.costs.parameters import BlockParameters, block_parameters
from headwise.costs.traffic import Traffic, decode_traffic
from headwise.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Cache", "Ledger", "Parameters", "Phase", "PhaseWork", "Scores", "SiteCost", "ledger"]

Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Parameters:
    """Where the parameters are, unique storage only.

    Attributes:
        total: of the model, or None when only attention is known.
        attention: of all attention blocks.
        share: ``attention / total``, or None.
        embedding: of embedding tables.
        tied: of those, the part that is the output matrix as well.
        experts: of the experts of a mixture.
        active: what one token goes through, without tables that are looked up; None when unknown.
    """

    total: int | None
    attention: int
    share: float | None
    embedding: int
    tied: int
    experts: int
    active: int | None


@dataclass(frozen=True)
class PhaseWork:
    """Operations of one phase over the whole batch.

    Attributes:
        tokens: new tokens per sequence.
        attention: all attention layers.
        rest: matrix products outside attention without the output matrix, or None when unknown.
        output: the output matrix, at every new position.
        absorbed: attention while decoding with latents that are never expanded, or None.
    """

    tokens: int
    attention: AttentionWork
    rest: int | None
    output: int
    absorbed: int | None = None

    @property
    def full(self) -> int:
        """All operations that are known, scores over the whole rectangle."""
        return self.attention.full + (self.rest or 0) + self.output

    @property
    def visible(self) -> int:
        """All operations that are known, scores over the visible pairs."""
        return self.attention.visible + (self.rest or 0) + self.output


@dataclass(frozen=True)
class Cache:
    """The key-value cache of the whole model.

    Attributes:
        dtype: of its elements.
        token_bytes: per token and sequence while no window is full; self-attention of the decoder.
        bytes: at the context, of the whole batch, cross-attention included.
        transformers_bytes: as transformers' ``DynamicCache`` holds it.
    """

    dtype: str
    token_bytes: float
    bytes: float
    transformers_bytes: float


@dataclass(frozen=True)
class Scores:
    """Score tensors (batch, query head, query, key) that a tiled kernel never builds.

    Attributes:
        dtype: of their elements.
        largest: bytes of the largest of one layer.
        all: bytes of all layers, as training without recomputation or ``output_attentions`` keeps them.
    """

    dtype: str
    largest: float
    all: float


@dataclass(frozen=True)
class SiteCost:
    """What one attention layer costs."""

    site: AttentionNumbers
    parameters: BlockParameters
    prefill: AttentionWork | None
    decode: AttentionWork | None
    cache: SiteCache


@dataclass(frozen=True)
class Ledger:
    """What a model costs; made by :func:`ledger` and :func:`headwise.cost`.

    Attributes:
        numbers: what it was computed from.
        batch, context, source: sequences, tokens of each, and tokens on the encoder's side (0 without one).
        dtype, cache_dtype: of weights and activations, and of the cache.
        parameters, prefill, decode, cache, scores, traffic: see their classes; ``decode`` and
            ``traffic`` are None for a model that does not decode, or when the phase was not asked for.
        sites: per attention layer.
        notes: what a reader must know.
    """

    numbers: ModelNumbers
    batch: int
    context: int
    source: int
    dtype: str
    cache_dtype: str
    parameters: Parameters
    prefill: PhaseWork | None
    decode: PhaseWork | None
    cache: Cache
    scores: Scores
    traffic: Traffic | None
    sites: tuple[SiteCost, ...]
    notes: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """The ledger as plain lists and dictionaries, as ``headwise cost --json`` prints it."""
        from headwise.costs.document import ledger_document

        return ledger_document(self)

    def to_pandas(self) -> pd.DataFrame:
        """One line per attention layer."""
        import pandas as pd

        from headwise.costs.document import site_document

        return pd.DataFrame([site_document(cost) for cost in self.sites])


def ledger(
    numbers: ModelNumbers,
    *,
    batch: int = 1,
    context: int = 2048,
    source: int | None = None,
    dtype: object = None,
    cache_dtype: object = None,
    phase: Phase = "both",
    bandwidth: float | None = None,
) -> Ledger:
    """Account for a model.

    Args:
        numbers: the model in numbers, e.g. from :func:`grid`.
        batch: sequences, at least 1.
        context: tokens per sequence: the prompt's length in prefill, and while decoding the number
            of tokens that the new one sees, itself included.
        source: tokens on the encoder's side; None is what the model fixes, else ``context``.
        dtype: of weights and activations; None is the model's own, else bfloat16.
        cache_dtype: of the cache; None is ``dtype``.
        phase: ``"prefill"`` (the whole prompt), ``"decode"`` (one new token per sequence) or ``"both"``.
        bandwidth: of memory in bytes per second; sets the time that a decode step takes at least.

    Raises:
        InputError: a number is out of range, a dtype or phase is not known, or the phase is
            ``"decode"`` and the model makes no tokens one by one.

    Example:
        >>> from headwise.costs import grid
        >>> ledger(grid(4096, 32, 32, kv_heads=8), context=8192).cache.token_bytes
        131072
    """
    _check(batch, context, source, bandwidth)
    if phase not in ("both", "prefill", "decode"):
        raise InputError(f"phase must be 'prefill', 'decode' or 'both', got {phase!r}")
    if phase == "decode" and not numbers.decodes:
        raise InputError(f"{numbers.name} has no causal decoder, so there is no decode step; ask for phase 'prefill'")
    decoding = phase != "prefill" and numbers.decodes
    weights = dtype_name(dtype or numbers.dtype or "bfloat16")
    kept = dtype_name(cache_dtype or weights)
    two_sided = any(site.kind == "cross" or site.stack != "decoder" for site in numbers.attention)
    length = (_fixed(numbers) or source or numbers.source or context) if two_sided else 0
    sites = tuple(
        SiteCost(
            site=site,
            parameters=block_parameters(site),
            prefill=prefill_work(site, batch, context, _length(numbers, site.stack, length))
            if phase != "decode"
            else None,
            decode=decode_work(site, batch, context, length) if decoding and site.stack == "decoder" else None,
            cache=site_cache(site, batch, context, length, bytes_of(kept)),
        )
        for site in numbers.attention
    )
    return Ledger(
        numbers=numbers,
        batch=batch,
        context=context,
        source=length,
        dtype=weights,
        cache_dtype=kept,
        parameters=_parameters(numbers),
        prefill=_prefill(numbers, sites, batch, context, length) if phase != "decode" else None,
        decode=_decode(numbers, sites, batch, context) if decoding else None,
        cache=_cache(sites, kept, numbers.decodes),
        scores=_scores(numbers, sites, batch, context, length, weights),
        traffic=decode_traffic(numbers, batch, context, length, weights, kept, bandwidth) if decoding else None,
        sites=sites,
        notes=(*numbers.notes, *_notes(numbers, sites), *_lengths(numbers, source, length)),
    )


def _fixed(numbers: ModelNumbers) -> int | None:
    """The length on the encoder's side where images are all there is on it, and their positions are fixed."""
    others = {site.stack for site in numbers.attention} - {"decoder", "vision"}
    return None if others else numbers.vision


def _length(numbers: ModelNumbers, stack: str, source: int) -> int:
    """Positions of a stack other than the decoder."""
    return numbers.vision if stack == "vision" and numbers.vision is not None else source


def _lengths(numbers: ModelNumbers, asked: int | None, source: int) -> list[str]:
    """Which parts are counted over another length than a reader may think."""
    stacks = {site.stack for site in numbers.attention}
    notes = []
    if stacks == {"decoder"} and any(site.kind == "cross" for site in numbers.attention):
        notes.append(f"cross-attention is counted over positions that come from outside this model: {source:,}")
    if numbers.vision is not None:
        why = f"; source {asked:,} does not change that" if asked not in (None, numbers.vision) else ""
        notes.append(f"the vision part is counted over its own {numbers.vision:,} positions, one image{why}")
    towers = sorted(stacks & ({"vision", "audio"} if numbers.vision is None else {"audio"}))
    if towers and (len(stacks) > 1 or (asked is None and numbers.source is None)):
        notes.append(f"the {' and '.join(towers)} part is counted over as many positions as source says: {source:,}")
    return notes


def _check(batch: object, context: object, source: object, bandwidth: float | None) -> None:
    for name, value in (("batch", batch), ("context", context), ("source", source)):
        if value is None and name == "source":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a positive integer, got {value!r}")
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise InputError(f"bandwidth must be a positive number of bytes per second, got {bandwidth!r}")


def _parameters(numbers: ModelNumbers) -> Parameters:
    rest = numbers.rest
    attention = sum(block_parameters(site).total for site in numbers.blocks)
    total = rest.parameters
    looked_up = rest.embedding - rest.tied
    return Parameters(
        total=total,
        attention=attention,
        share=None if total is None else attention / total,
        embedding=rest.embedding,
        tied=rest.tied,
        experts=rest.experts,
        active=None if total is None else total - looked_up - rest.experts + rest.active_experts,
    )


def _total(works: list[AttentionWork]) -> AttentionWork:
    return reduce(add, works, AttentionWork())


def _known(numbers: ModelNumbers) -> bool:
    rest = numbers.rest
    return bool(rest.matrices or rest.experts or rest.parameters is not None)


def _prefill(numbers: ModelNumbers, sites: tuple[SiteCost, ...], batch: int, context: int, source: int) -> PhaseWork:
    rest = numbers.rest
    matrices = sum(
        weights * (context if stack == "decoder" else _length(numbers, stack, source))
        for stack, weights in rest.matrices.items()
    )
    main = context if any(site.site.stack == "decoder" for site in sites) else source
    return PhaseWork(
        tokens=main,
        attention=_total([site.prefill for site in sites if site.prefill is not None]),
        rest=2 * batch * (matrices + main * rest.expert_matrices + rest.once) if _known(numbers) else None,
        output=2 * batch * main * rest.head,
    )


def _decode(numbers: ModelNumbers, sites: tuple[SiteCost, ...], batch: int, context: int) -> PhaseWork:
    rest = numbers.rest
    absorbed = None
    if any(site.site.latent is not None for site in sites):
        absorbed = sum(
            absorbed_decode_flops(cost.site, batch, context) if cost.site.latent is not None else cost.decode.full
            for cost in sites
            if cost.decode is not None
        )
    return PhaseWork(
        tokens=1,
        attention=_total([site.decode for site in sites if site.decode is not None]),
        rest=2 * batch * (rest.matrices.get("decoder", 0) + rest.expert_matrices) if _known(numbers) else None,
        output=2 * batch * rest.head,
        absorbed=absorbed,
    )


def _cache(sites: tuple[SiteCost, ...], dtype: str, decodes: bool) -> Cache:
    if not decodes:
        return Cache(dtype, 0, 0, 0)
    per_token = [site.cache.token_bytes for site in sites if site.site.kind == "self"]
    return Cache(
        dtype=dtype,
        token_bytes=sum(per_token),
        bytes=sum(site.cache.bytes for site in sites),
        transformers_bytes=sum(site.cache.transformers_bytes for site in sites),
    )


def _scores(
    numbers: ModelNumbers, sites: tuple[SiteCost, ...], batch: int, context: int, source: int, dtype: str
) -> Scores:
    sizes = []
    for cost in sites:
        length = context if cost.site.stack == "decoder" else _length(numbers, cost.site.stack, source)
        keys = source if cost.site.kind == "cross" and cost.site.queries is None else length
        rectangles = batch * batch if cost.site.packed else batch
        sizes.append(rectangles * cost.site.query_heads * (cost.site.queries or length) * keys * bytes_of(dtype))
    return Scores(dtype=dtype, largest=max(sizes), all=sum(sizes))


def _notes(numbers: ModelNumbers, sites: tuple[SiteCost, ...]) -> list[str]:
    notes = []
    if numbers.decodes and any(site.cache.bytes != site.cache.transformers_bytes for site in sites):
        notes.append("transformers' DynamicCache keeps W - 1 keys of a window of W; ours is the window itself")
    if any(site.site.latent is not None for site in sites):
        notes.append(
            "latent attention: the cache is the latent with its rotary part; decoding expands it unless absorbed"
        )
    if any(site.site.shares_cache for site in sites):
        notes.append("some layers read the cache of an earlier layer and keep none of their own")
    shared, blocks = len(numbers.attention), len(numbers.blocks)
    if blocks < shared:
        notes.append(f"{shared} attention layers share {blocks} block{'s' * (blocks > 1)} of weights, counted once")
    if any(site.site.packed for site in sites):
        notes.append(
            "the images of a batch are one sequence: the whole rectangle grows with the square of the batch, the "
            "visible pairs do not"
        )
    if numbers.rest.not_counted:
        notes.append("operations not counted: " + ", ".join(numbers.rest.not_counted))
    if not all(token_elements(site.site) for site in sites if site.site.cached and not site.site.shares_cache):
        notes.append("a layer without heads keeps no cache")
    return notes

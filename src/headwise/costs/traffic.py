"""What a decode step must at least read and write, and the time that sets."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.costs.cache import site_cache, token_elements
from headwise.costs.dtypes import bytes_of
from headwise.costs.flops import decode_work
from headwise.costs.numbers import ModelNumbers
from headwise.costs.parameters import block_parameters

__all__ = ["Traffic", "decode_traffic"]


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of one decode step (one new token for every sequence of the batch).

    Weights are read once for the whole batch, the cache once per sequence; activations are left
    out. Every kernel moves at least this much, so ``seconds`` is a lower bound.

    Attributes:
        weight_bytes: weights that the step goes through. Of a mixture, the experts that a batch is
            expected to meet when all are equally likely.
        cache_read_bytes, cache_write_bytes: the cache that is read, and the new token's part of it.
        intensity: operations per byte of the whole step.
        attention_intensity: operations per byte of scores and mixing alone over the cache.
        bandwidth: bytes per second, or None.
    """

    weight_bytes: float
    cache_read_bytes: float
    cache_write_bytes: float
    intensity: float
    attention_intensity: float
    bandwidth: float | None

    @property
    def bytes(self) -> float:
        """All bytes of the step."""
        return self.weight_bytes + self.cache_read_bytes + self.cache_write_bytes

    @property
    def seconds(self) -> float | None:
        """The least time of a step at the given bandwidth, in seconds."""
        return None if self.bandwidth is None else self.bytes / self.bandwidth


def decode_traffic(
    numbers: ModelNumbers,
    batch: int,
    context: int,
    source: int,
    dtype: str,
    cache_dtype: str,
    bandwidth: float | None,
) -> Traffic:
    """The traffic of one decode step of ``batch`` sequences that see ``context`` tokens each."""
    weight_bytes = _weights(numbers, batch) * bytes_of(dtype)
    sites = [site for site in numbers.attention if site.stack == "decoder"]
    itemsize = bytes_of(cache_dtype)
    read = sum(_read_elements(numbers, at, batch, context, source) for at in range(len(sites))) * itemsize
    write = sum(batch * token_elements(site) * itemsize for site in sites if site.kind == "self")
    works = [decode_work(site, batch, context, source) for site in sites]
    rest = numbers.rest
    products = 2 * batch * (rest.matrices.get("decoder", 0) + rest.expert_matrices + rest.head)
    operations = sum(work.full for work in works) + products
    over_cache = sum(work.scores + work.mixing for work in works)
    total = weight_bytes + read + write
    return Traffic(
        weight_bytes=weight_bytes,
        cache_read_bytes=read,
        cache_write_bytes=write,
        intensity=operations / total if total else 0.0,
        attention_intensity=over_cache / read if read else 0.0,
        bandwidth=bandwidth,
    )


def _read_elements(numbers: ModelNumbers, at: int, batch: int, context: int, source: int) -> float:
    """Numbers of the cache that decoder site ``at`` reads; the new token's own are still at hand."""
    sites = [site for site in numbers.attention if site.stack == "decoder"]
    site = sites[at]
    own = 0 if site.kind == "cross" else 1
    if not site.shares_cache:
        cache = site_cache(site, batch, context, source, 1)
        return cache.bytes - own * batch * cache.token_bytes
    giver = next((one for one in reversed(sites[:at]) if one.kind == site.kind and not one.shares_cache), None)
    return 0 if giver is None else _read_elements(numbers, sites.index(giver), batch, context, source)


def _weights(numbers: ModelNumbers, batch: int) -> float:
    """Weights that a decode step goes through, as a number of elements."""
    attention = 0
    for site in numbers.blocks:
        block = block_parameters(site)
        if site.stack == "decoder":
            attention += block.total - (block.k + block.v if site.kind == "cross" else 0)
    rest = numbers.rest
    share = rest.expert_share
    met = (rest.experts - rest.idle_experts) * (1 - (1 - share) ** batch)
    return attention + rest.matrices.get("decoder", 0) + met + rest.head

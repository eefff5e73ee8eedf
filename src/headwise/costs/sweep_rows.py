"""The rows of each sweep, in the order of the columns that :mod:`headwise.costs.sweep` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from headwise.costs.flops import AttentionWork
from headwise.costs.ledger import Ledger, PhaseWork, ledger
from headwise.costs.numbers import AttentionNumbers, ModelNumbers
from headwise.costs.parameters import block_parameters
from headwise.costs.spread import logit_spread
from headwise.errors import InputError

__all__ = ["BAND", "Found", "Value", "over_context", "over_heads", "over_kv_heads"]

Value = float | bool | None
#: Rows, the index of the model's own, and what holds along them.
Found = tuple[list[tuple[Value, ...]], int | None, list[str]]

#: Widths of a head that most models use.
BAND: Final = (64, 128)
NARROWEST: Final = 8
SHORTEST: Final = 128


def over_heads(
    numbers: ModelNumbers, input_rms: float | None, init_std: float | None, options: Mapping[str, Any]
) -> Found:
    """Head counts that divide the width of the queries, down to heads of width 8."""
    site = _alike(numbers, "heads")
    width, kv_width = site.query_heads * site.d_k, site.kv_heads * site.d_k
    rms = _first(input_rms, numbers.input_rms, 1.0)
    std = _first(init_std, numbers.init_std, site.d_model**-0.5)
    rows: list[tuple[Value, ...]] = []
    own = None
    for heads in _divisors(width):
        d_k = width // heads
        if d_k < NARROWEST or kv_width % d_k or heads % (kv_width // d_k) or (site.query_heads * site.d_v) % heads:
            continue
        d_v = site.query_heads * site.d_v // heads
        book = ledger(_with(numbers, (heads, kv_width // d_k, d_k, d_v)), **options)
        own = len(rows) if heads == site.query_heads else own
        work = _work(book)
        rows.append(
            (
                heads,
                d_k,
                BAND[0] <= d_k <= BAND[1],
                book.parameters.attention,
                work.projections,
                work.scores + work.mixing,
                work.exponentials,
                book.scores.largest,
                book.cache.bytes,
                min(d_k, book.context),
                logit_spread(site.d_model, d_k, input_rms=rms, init_std=std),
                logit_spread(site.d_model, d_k, input_rms=rms, init_std=std, scaled=False),
            )
        )
    notes = [
        "parameters and matrix products do not depend on the number of heads; softmax and score memory grow with it",
        f"spread of scores at an input of rms {rms:.4g} and weights drawn with std {std:.4g}",
    ]
    return rows, own, notes


def over_kv_heads(numbers: ModelNumbers, options: Mapping[str, Any]) -> Found:
    """Every number of key-value heads that divides the query heads."""
    site = _alike(numbers, "kv-heads")
    rows: list[tuple[Value, ...]] = []
    own = None
    for groups in _divisors(site.query_heads):
        book = ledger(_with(numbers, (site.query_heads, groups, site.d_k, site.d_v)), **options)
        own = len(rows) if groups == site.kv_heads else own
        work = _work(book)
        rows.append(
            (
                groups,
                site.query_heads // groups,
                book.parameters.attention,
                work.projections,
                work.scores + work.mixing,
                book.cache.token_bytes,
                book.cache.bytes,
                *_traffic(book, "bytes", "attention_intensity", "seconds"),
            )
        )
    note = "sharing saves cache and memory traffic; scores and mixing are computed for every query head all the same"
    return rows, own, [note]


def over_context(numbers: ModelNumbers, contexts: Sequence[int] | None, options: Mapping[str, Any]) -> Found:
    """Lengths given, or doublings up to the context of the options."""
    fixed = {name: value for name, value in options.items() if name != "context"}
    last = options.get("context", 2048)
    lengths = _doublings(last) if contexts is None else sorted(set(contexts))
    rows: list[tuple[Value, ...]] = []
    turn = None
    for length in lengths:
        book = ledger(numbers, context=length, **fixed)
        work, traffic = _work(book), book.traffic
        if traffic is not None and turn is None and traffic.cache_read_bytes > traffic.weight_bytes:
            turn = length
        rows.append(
            (
                length,
                work.projections,
                work.scores + work.mixing,
                work.visible_scores + work.visible_mixing,
                (work.scores + work.mixing) / _phase(book).full,
                book.scores.largest,
                book.cache.bytes,
                *_traffic(book, "weight_bytes", "cache_read_bytes", "intensity", "seconds"),
            )
        )
    notes = ["projections grow with the context, scores and mixing with its square (without a window)"]
    if turn is not None:
        notes.append(f"from a context of {turn:,} on, a decode step reads more cache than weights")
    return rows, lengths.index(last) if last in lengths else None, notes


def _first(*given: float | None) -> float:
    return next(value for value in given if value is not None)


def _phase(book: Ledger) -> PhaseWork:
    phase = book.prefill if book.prefill is not None else book.decode
    assert phase is not None
    return phase


def _work(book: Ledger) -> AttentionWork:
    return _phase(book).attention


def _traffic(book: Ledger, *names: str) -> list[float | None]:
    return [None if book.traffic is None else getattr(book.traffic, name) for name in names]


def _alike(numbers: ModelNumbers, over: str) -> AttentionNumbers:
    """The first of attention layers that all have one shape."""
    first = numbers.attention[0]
    for site in numbers.attention:
        if site.latent is not None:
            raise InputError(f"{numbers.name} has latent attention ({site.name}): there is no sweep over {over} for it")
        if _shape(site) != _shape(first):
            raise InputError(
                f"{numbers.name} has layers of different shapes ({_said(first)}; {_said(site)}): a sweep over {over} "
                "needs equal layers"
            )
    if first.query_heads == 0:
        raise InputError(f"{numbers.name} has no heads left to sweep over")
    return first


def _shape(site: AttentionNumbers) -> tuple[int, ...]:
    return (site.d_model, site.query_heads, site.kv_heads, site.d_k, site.d_v)


def _said(site: AttentionNumbers) -> str:
    return f"{site.name}: {site.query_heads} query and {site.kv_heads} key-value heads of width {site.d_k}"


def _with(numbers: ModelNumbers, shape: tuple[int, int, int, int]) -> ModelNumbers:
    """The model with every attention layer of another shape (H, G, d_k, d_v); its total follows."""
    heads, groups, d_k, d_v = shape
    attention = tuple(replace(site, query_heads=heads, kv_heads=groups, d_k=d_k, d_v=d_v) for site in numbers.attention)
    other = replace(numbers, attention=attention)
    rest = numbers.rest
    if rest.parameters is None:
        return other
    return replace(other, rest=replace(rest, parameters=rest.parameters + _weights(other) - _weights(numbers)))


def _weights(numbers: ModelNumbers) -> int:
    return sum(block_parameters(site).total for site in numbers.blocks)


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)


def _doublings(last: int) -> list[int]:
    lengths = []
    length = SHORTEST
    while length < last:
        lengths.append(length)
        length *= 2
    return [*lengths, last]

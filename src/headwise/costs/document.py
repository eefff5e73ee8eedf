"""A ledger as plain lists and dictionaries: what ``headwise cost --json`` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from headwise.costs.flops import AttentionWork
from headwise.costs.parameters import BlockParameters

if TYPE_CHECKING:
    from headwise.costs.ledger import Ledger, PhaseWork, SiteCost

__all__ = ["FORMAT", "VERSION", "ledger_document", "site_document"]

FORMAT: Final = "headwise.cost"
VERSION: Final = 1


def ledger_document(ledger: Ledger) -> dict[str, Any]:
    """Everything in the ledger; numbers are counts (FLOP, bytes, parameters), seconds are seconds."""
    traffic = ledger.traffic
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": ledger.numbers.name,
        "batch": ledger.batch,
        "context": ledger.context,
        "source": ledger.source or None,
        "dtype": ledger.dtype,
        "cache_dtype": ledger.cache_dtype,
        "parameters": asdict(ledger.parameters),
        "prefill": _phase(ledger.prefill),
        "decode": _phase(ledger.decode),
        "cache": asdict(ledger.cache),
        "scores": asdict(ledger.scores),
        "traffic": traffic and {**asdict(traffic), "bytes": traffic.bytes, "seconds": traffic.seconds},
        "layers": [site_document(cost) for cost in ledger.sites],
        "notes": list(ledger.notes),
    }


def site_document(cost: SiteCost) -> dict[str, Any]:
    """One attention layer on one line."""
    site, block = cost.site, cost.parameters
    return {
        "name": site.name,
        "block": site.block,
        "stack": site.stack,
        "kind": site.kind,
        "layer": site.layer,
        "query_heads": site.query_heads,
        "kv_heads": site.kv_heads,
        "d_k": site.d_k,
        "d_v": site.d_v,
        "causal": site.causal,
        "window": site.window,
        "chunk": site.chunk,
        "latent": site.latent and asdict(site.latent),
        **_parameters(block),
        "prefill_flop": cost.prefill and cost.prefill.full,
        "prefill_flop_visible": cost.prefill and cost.prefill.visible,
        "decode_flop": cost.decode and cost.decode.full,
        "cache_bytes_per_token": cost.cache.token_bytes,
        "cache_tokens": cost.cache.tokens,
        "cache_bytes": cost.cache.bytes,
        "cache_bytes_transformers": cost.cache.transformers_bytes,
    }


def _parameters(block: BlockParameters) -> dict[str, int | None]:
    return {
        "parameters": block.total,
        "parameters_per_head": block.per_head,
        "parameters_per_kv_head": block.per_group,
    }


def _phase(work: PhaseWork | None) -> dict[str, Any] | None:
    if work is None:
        return None
    return {
        "new_tokens": work.tokens,
        "full": work.full,
        "visible": work.visible,
        "attention": _work(work.attention),
        "rest": work.rest,
        "output": work.output,
        "attention_absorbed": work.absorbed,
    }


def _work(work: AttentionWork) -> dict[str, int]:
    return {**asdict(work), "full": work.full, "visible": work.visible}

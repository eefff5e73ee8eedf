"""The facts of a run: what ran, on what, by which backend and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.data import Batch, Facts
from headwise.kernels import Problem, Wanted
from headwise.layout import Site
from headwise.models import AttentionCall, Model

__all__ = ["BackendLog", "facts_of"]


class BackendLog:
    """Remembers which backend computed each site, and why not the others."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted:  # noqa: ARG002
        """Nothing beside the call itself."""
        return Wanted()

    def see(self, call: AttentionCall, batch: Batch | None) -> None:  # noqa: ARG002
        """Note who computed this call."""
        sites = self._sites.setdefault((call.choice.backend, call.choice.reasons), [])
        name = str(call.site.key)
        if name not in sites:
            sites.append(name)

    def entries(self) -> list[dict[str, Any]]:
        """For ``run.json``: each backend that ran, at which sites, and why not the others."""
        return [
            {"backend": backend, "sites": sites, "reasons": dict(reasons)}
            for (backend, reasons), sites in self._sites.items()
        ]


def facts_of(
    model: Model, facts: Facts, log: BackendLog, warnings: Sequence[str], weight_hash: str | None = None
) -> dict[str, Any]:
    """The arguments of :func:`headwise.artifacts.run_document` that do not come from the caller."""
    layout, module = model.layout, model.module
    found = dict(layout.facts)
    mode, _, why = found.pop("masks", "compact").partition(": ")
    return {
        "model": {
            "name": model.name,
            "kind": model.source.kind,
            "path": model.source.path,
            "revision": model.source.revision,
            "weight_hash": weight_hash or model.source.weight_hash,
            "class": type(module).__name__,
            "model_type": getattr(model.config, "model_type", None),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
        },
        "backends": log.entries(),
        "data": facts.to_dict(),
        "mask": {"mode": mode, "reason": why or None},
        "counts": {
            "sites": len(layout.sites),
            "blocks": len(layout.blocks),
            "heads": len(layout),
            "passages": facts.passages,
            "tokens": facts.tokens,
        },
        "notes": [
            *model.notes,
            *facts.notes,
            *_skipped(facts),
            *([f"whole masks of queries times keys were built: {why}"] if mode != "compact" else []),
            *(f"{name}: {text}" for name, text in found.items()),
        ],
        "warnings": list(warnings),
    }


def _skipped(facts: Facts) -> list[str]:
    """A sentence where passages held nothing to measure."""
    if not facts.skipped_passages:
        return []
    return [f"{facts.skipped_passages} passages hold no token of text and were skipped"]

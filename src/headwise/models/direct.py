"""Attention outside transformers' interface: where it is, how its tensors hold the heads, and what proves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.cut_modules import cut_of
from headwise.models.families import find_projections
from headwise.models.probe import Probe, Record, run_model
from headwise.models.torch_seam import Heads, locate
from headwise.models.torch_seam.heads import copies

__all__ = ["DirectAttention", "find_direct", "outputs_differ", "slow_path"]


@dataclass(frozen=True)
class DirectAttention:
    """Modules that compute attention with torch's own functions.

    Attributes:
        axes: path -> number of axes before (position, width) -> how they hold the heads.
        refused: path -> why a module that seems to compute attention is not measured.
        facts: what was decided.
    """

    axes: Mapping[str, Mapping[int, Heads]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[tuple[str, str], ...] = ()


def find_direct(root: nn.Module, inputs: Mapping[str, Any], on_seam: Mapping[str, nn.Module]) -> DirectAttention:
    """Run ``root`` twice on ``inputs``: to find the modules, and to find out how each holds its heads."""
    emptied = {part for part in root.modules() if (cut := cut_of(part)) is not None and not cut.heads}
    found = locate(root, lambda: run_model(root, inputs), {*on_seam.values(), *emptied})
    if not found:
        return DirectAttention()
    probe = Probe(root, {**on_seam, **found}, direct={path: {} for path in found})
    with probe.running("dense"):
        run_model(root, inputs)
    axes: dict[str, Mapping[int, Heads]] = {}
    unread = {} if probe.seam is None else probe.seam.unread
    refused = {
        probe.names[
            module
        ]: "it takes another softmax, whose result is not multiplied with values in a way that is followed"
        for module, _ in unread.values()
    }
    for path in found:
        if path in refused:
            continue
        records = [record for record in probe.records if record.path == path and record.raw is not None]
        decided = _axes(records)
        if isinstance(decided, str):
            refused[path] = decided
        else:
            axes[path] = decided
    return DirectAttention(axes, refused, tuple(_facts(probe.records, axes)))


def _facts(records: list[Record], axes: Mapping[str, Mapping[int, Heads]]) -> Iterator[tuple[str, str]]:
    used = [record for record in records if record.path in axes]
    own = len({record.path for record in used if record.settled})
    torchs = len({record.path for record in used if not record.settled})
    if torchs:
        yield "seam", f"{torchs} modules call torch's scaled_dot_product_attention themselves"
    if own:
        yield "seam", f"{own} modules take a softmax of their own; their pattern is read from what goes into it"


def _axes(records: list[Record]) -> Mapping[int, Heads] | str:
    """How the calls of one module hold their heads, or why that is not known."""
    axes: dict[int, Heads] = {}
    if not records:
        return "it was not called a second time"
    for record in records:
        assert record.raw is not None
        if record.error is not None:
            return str(record.error)
        lead = record.raw.ndim - 2
        if record.reading is None and (record.settled or lead != 2):
            return (
                "no layer reads its results head by head, side by side, so that which numbers belong to a head "
                "cannot be told"
            )
        heads = record.heads if record.reading is None else record.reading.heads
        assert heads is not None
        heads = replace(heads, repeat=_repeat(record, heads))
        if axes.setdefault(lead, heads) != heads:
            return "its calls hold their heads in different ways"
    return axes


def _repeat(record: Record, heads: Heads) -> int:
    """How often a key-value head is repeated: equal neighbours, where no layer puts out as many values."""
    query, key, value = record.query, record.key, record.value
    if heads.axis is None:
        query, key, value = (heads.split(one[:, 0]) for one in (query, key, value))
    repeat = copies(key, value)
    if repeat == 1 or find_projections(record.linears, query, key, value).v is not None:
        return 1
    return repeat


@contextmanager
def slow_path(root: nn.Module) -> Iterator[bool]:
    """Inside, torch's fused fast path of ``nn.MultiheadAttention`` is off; yields whether that is a change."""
    has = any(isinstance(module, nn.MultiheadAttention) for module in root.modules())
    before = torch.backends.mha.get_fastpath_enabled()
    if not (has and before):
        yield False
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield True
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def outputs_differ(fast: list[Tensor], slow: list[Tensor]) -> bool:
    """Whether two runs gave other shapes or numbers."""
    return any(
        one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-5)
        for one, other in zip(fast, slow, strict=False)
        if one.is_floating_point()
    )

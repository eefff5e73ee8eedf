"""Layers that a model calls several times in one forward pass, where its config says how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headwise.costs import AttentionNumbers
from headwise.models.families import field_of

__all__ = ["calls_of", "in_order_of_calls"]


def in_order_of_calls(sites: list[AttentionNumbers], config: Any) -> list[AttentionNumbers]:
    """Every layer as often as it is called, in that order: ALBERT's groups, and the cycles of HRM.

    Source: Lan et al. 2020, ALBERT, section 3.1; Wang et al. 2025, Hierarchical Reasoning Model, section 2.
    """
    groups, layers = _count(config, "num_hidden_groups"), _count(config, "num_hidden_layers")
    inner = _count(config, "inner_group_num") or 1
    if groups and layers and len(sites) == groups * inner:
        per_group = [sites[at * inner : (at + 1) * inner] for at in range(groups)]
        return [site for at in range(layers) for site in per_group[int(at / (layers / groups))]]
    high, low = _count(config, "H_cycles"), _count(config, "L_cycles")
    slow, fast = _inside(sites, "H_module"), _inside(sites, "L_module")
    if high and low and slow and fast and len(slow) + len(fast) == len(sites):
        return [site for _ in range(high) for site in (*fast * low, *slow)]
    return sites


def calls_of(path: str, sites: Sequence[AttentionNumbers]) -> int:
    """How often what lies at ``path`` is called: as often as the attention of its layer."""
    calls = Counter(site.block for site in sites)
    if not calls or max(calls.values()) == 1:
        return 1
    shared, block = max((_shared(path, block), block) for block in calls)
    return calls[block] if any(part.isdigit() for part in path.split(".")[:shared]) else 1


def _shared(path: str, other: str) -> int:
    """Leading parts that two paths have in common."""
    parts = list(zip(path.split("."), other.split("."), strict=False))
    return next((at for at, (one, two) in enumerate(parts) if one != two), len(parts))


def _inside(sites: Sequence[AttentionNumbers], word: str) -> list[AttentionNumbers]:
    return [site for site in sites if word in site.block.split(".")]


def _count(config: Any, name: str) -> int | None:
    value = field_of(config, name, kind=(int, float))
    return None if value is None else int(value)

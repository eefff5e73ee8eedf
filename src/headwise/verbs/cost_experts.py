"""Experts of a mixture: their weights, and how many of them one token goes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from torch import nn

from headwise.models.families import field_of

__all__ = ["Experts", "experts_of", "is_expert", "shared_experts"]

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE: Final = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k", "moe_top_k")


class Experts(NamedTuple):
    """Weights of all experts of a model: fields of :class:`headwise.costs.Rest`."""

    experts: int
    active_experts: int
    active_biases: int
    idle_experts: int


def is_expert(path: str) -> bool:
    """Whether a weight or a module is one of those among which a router chooses."""
    return "experts" in path.split(".")


def experts_of(root: nn.Module) -> tuple[Experts, list[str]]:
    """Weights of the experts, and what a reader must know of them.

    A vector that stands beside the experts and in none of them (a norm of what they put out) is no expert's. Experts
    that hand on what they get multiply nothing, also where weights are kept for them.

    Source: Meituan 2025, LongCat-Flash, section 2.1 (zero-computation experts).
    """
    weights = {
        path: weight
        for path, weight in root.named_parameters()
        if is_expert(path) and (weight.ndim > 1 or _in_one(path))
    }
    every = sum(weight.numel() for weight in weights.values())
    biases = sum(weight.numel() for path, weight in weights.items() if weight.ndim == 1 or "bias" in _name(path))
    config: Any = getattr(root, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    number = next((value for name in EXPERTS if (value := _count(text, name))), None)
    chosen = next((value for name in ACTIVE if (value := _count(text, name))), None)
    if number is None or chosen is None:
        looked = ", ".join((*EXPERTS, *ACTIVE))
        note = f"experts per token are not known (looked for {looked}): all experts are counted as used"
        return Experts(every, every, biases, 0), [note] if weights else []
    zero = _count(text, "zero_expert_num") or 0
    pool = number + zero
    idle = sum(weight.numel() // pool * zero for weight in weights.values() if zero and len(weight) == pool)
    share = chosen / pool
    note = (
        f"{zero} of {pool} experts hand on what they get (zero_expert_num): counted is the share of the others when "
        "all are picked alike, and a router picks as it does"
    )
    return Experts(every, round((every - idle) * share), round(biases * share), idle), [note] if zero else []


def shared_experts(root: nn.Module) -> Iterator[tuple[str, int]]:
    """Shared experts that are kept in tensors and not in linear layers: every token goes through all of them."""
    for path, weight in root.named_parameters():
        if weight.ndim == 3 and "shared_experts" in path.split("."):
            yield path.rpartition(".")[0], weight.numel()


def _in_one(path: str) -> bool:
    """Whether a weight belongs to one expert, which is a module of its own."""
    parts = path.split(".")
    return any(part.isdigit() for part in parts[parts.index("experts") :])


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _count(config: Any, name: str) -> int | None:
    value = field_of(config, name, kind=(int, float))
    return None if value is None else int(value)

"""What a cut attention module must be told: the ways in which its code may count heads, the likeliest first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from torch import nn

from headwise.layout import Block
from headwise.models.cut_modules import CutConfig, HeadCut, cut_of
from headwise.models.standin import code_names, methods_of
from headwise.surgery.keeping import Kept

__all__ = ["bias_travels", "sharded", "tellings"]

_HEADS: Final = (
    *("num_heads", "n_heads", "num_attention_heads", "n_head", "num_query_heads", "num_attn_heads", "nhead", "heads"),
)
#: Into how many shards the code takes a weight apart: what is left is one.
_SHARDS: Final = ("mp_num",)
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "num_attention_heads_kv")
_GROUPS: Final = ("num_key_value_groups", "n_rep", "num_kv_groups")
_WIDTHS: Final = (
    "all_head_size",
    "inner_dim",
    "split_size",
    "q_dim",
    "q_size",
    "embed_dim",
    "hidden_size",
    "dim",
    "d_model",
)
_KV_WIDTHS: Final = ("kv_dim", "kv_size")


def tellings(module: nn.Module, block: Block, kept: Kept) -> Iterator[HeadCut]:
    """What the module may be told, the likeliest first; a proof on real input decides.

    The counts of heads and groups go by their names. A width (``embed_dim``) may be that of the heads side by side or
    that of the module's input, and what has a head axis may be the module's own or come from outside: both ways are
    given.
    """
    before = cut_of(module)
    own = dict(before.config) if before is not None else {}
    travels = bias_travels(module)
    base = HeadCut(
        heads=kept.heads if before is None else tuple(before.heads[head] for head in kept.heads),
        original=block.query_heads if before is None else before.original,
        kv_map=None if kept.even else kept.kv_map,
        kv_heads=len(kept.kv),
        d_k=block.d_k,
        d_v=block.d_v,
        fused=_fused(block),
    )
    used = _used(module)
    for select in (True,) if travels or (before is not None and before.select) else (False, True):
        for widths in (True, False):
            attributes = _attributes(module, block, kept, used, heads=not travels, widths=widths)
            config = {**own, **_config(module, kept, used)}
            yield replace(base, attributes=attributes, config=config, select=select)


def bias_travels(module: nn.Module) -> bool:
    """Whether a bias with a head axis goes from layer to layer, so that it must keep all heads (T5)."""
    return "position_bias" in inspect.signature(module.forward).parameters


def sharded(module: nn.Module) -> bool:
    """Whether the module's code takes its weight of queries, keys and values apart shard by shard (CodeGen)."""
    return any(type(vars(module).get(name)) is int for name in _SHARDS)


def _fused(block: Block) -> int:
    """How many projections the weight of the keys holds."""
    return sum(
        one is not None and block.k is not None and one.parameter == block.k.parameter
        for one in (block.q, block.k, block.v)
    )


def _used(module: nn.Module) -> set[str]:
    """Names that the module's code refers to outside its constructor."""
    names: set[str] = set()
    for method in methods_of(type(module)):
        if method.__name__ != "__init__":
            names |= code_names(method.__code__)
    return names


def _attributes(
    module: nn.Module, block: Block, kept: Kept, used: set[str], *, heads: bool, widths: bool
) -> dict[str, Any]:
    each = (len(kept.heads) // len(kept.kv) if kept.even and kept.kv else 1) if kept.heads else 1
    known = {
        **dict.fromkeys(_KV_HEADS, (block.kv_heads, len(kept.kv))),
        **dict.fromkeys(_SHARDS, (None, 1)),
        **dict.fromkeys(_GROUPS, (None, each if kept.even else 1)),
    }
    if heads:
        known |= dict.fromkeys(_HEADS, (block.query_heads, len(kept.heads)))
    for names, count, left in ((_WIDTHS, block.query_heads, kept.heads), (_KV_WIDTHS, block.kv_heads, kept.kv)):
        for name in names:
            if name in used:
                known[name] = (count * block.d_v, (len(left) if widths else count) * block.d_v)
    found: dict[str, Any] = {}
    for name, (before, after) in known.items():
        value = vars(module).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and before in (None, value):
            found[name] = after
    return found


def _config(module: nn.Module, kept: Kept, used: set[str]) -> dict[str, int]:
    """Counts that the module's code reads from its config while it runs."""
    given = vars(module).get("config")
    config = given.cut_base if isinstance(given, CutConfig) else given
    if config is None or "config" not in used:
        return {}
    found = {}
    for names, left in ((_HEADS, kept.heads), (_KV_HEADS, kept.kv)):
        for name in names:
            if name in used and name not in vars(module) and isinstance(getattr(config, name, None), int):
                found[name] = len(left)
    return found

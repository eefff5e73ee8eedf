"""What a cut attention module must be told: the ways in which its code may count heads, the likeliest first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any, Final

from torch import nn

from headwise.layout import Block
from headwise.models.cut_modules import CutConfig, HeadCut, cut_of
from headwise.models.standin import code_names, methods_of
from headwise.surgery.averaging import Carriers
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
#: How many arguments of one module may be narrowed.
_MOST: Final = 4


def tellings(
    module: nn.Module, block: Block, kept: Kept, carriers: Carriers, headed: Sequence[str] = ()
) -> Iterator[HeadCut]:
    """What the module may be told, the likeliest first; a proof on real input decides.

    The counts of heads and groups go by their names. A width (``embed_dim``) may be that of the heads side by side or
    that of the module's input, and what has a head axis may be the module's own or come from outside: both ways are
    given.

    Args:
        module: the attention module.
        block: it before the cut.
        kept: what is left of it.
        headed: names of arguments that seem to hold something for every head.
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
        means=_means(before, block, kept, carriers),
    )
    used = _used(module)
    config = {**own, **_config(module, kept, used)}
    selects = (True,) if travels or (before is not None and before.select) else (False, True)
    ways = [replace(base, select=select) for select in selects]
    for telling in (*ways, *_outside(base, headed)):
        for widths in (True, False):
            heads = not travels or not telling.select
            attributes = _attributes(module, block, kept, used, heads=heads, widths=widths)
            yield replace(telling, attributes=attributes, config=config)
    if not kept.heads:
        yield from _on_placeholder(module, block, base, own, headed)


def _on_placeholder(
    module: nn.Module, block: Block, base: HeadCut, own: dict[str, int], headed: Sequence[str]
) -> Iterator[HeadCut]:
    """What a module is told of which no head is left and whose code runs on one head of zeros."""
    assert block.q is not None
    assert block.k is not None
    assert block.v is not None
    widths = {block.q.parameter: block.d_k, block.k.parameter: block.d_k, block.v.parameter: block.d_v}
    if len(widths) == 1:
        widths = {block.q.parameter: 2 * block.d_k + block.d_v}
    inside = len(f"{block.module}.") if block.module else 0
    layers = {path[inside:]: width for path, width in widths.items()}
    wide = block.query_heads * block.d_k
    beside = {
        name: block.d_k
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part.weight.shape[0] == wide and f"{block.module}.{name}" != block.o_path
    }
    one, used = Kept((0,), (0,), (0,)), _used(module)
    config = {**own, **_config(module, one, used)}
    plain = [replace(base, placeholder=found) for found in ({**beside, **layers}, layers)]
    tellings = [way for base in plain for way in (base, replace(base, select=True), *_outside(base, headed))]
    for telling, joined in product(tellings, (True, False)):
        attributes = _attributes(module, block, one, used, heads=True, widths=joined)
        yield replace(telling, attributes=attributes, config=config)


def _outside(base: HeadCut, headed: Sequence[str]) -> Iterator[HeadCut]:
    """Tellings of what lies outside the module's own counts: arguments of all heads, and views as wide as its input."""
    for narrow in _choices(headed):
        yield replace(base, narrow=narrow)
    yield replace(base, fit=True)
    if headed:
        yield replace(base, fit=True, narrow=tuple(headed))


def _choices(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """What may be picked of a few names: all first, then all but one, and so on.

    >>> list(_choices(["mask", "bias"]))
    [('mask', 'bias'), ('mask',), ('bias',)]
    """
    for count in range(len(names[:_MOST]), 0, -1):
        yield from combinations(names[:_MOST], count)


def _means(before: HeadCut | None, block: Block, kept: Kept, carriers: Carriers) -> tuple[tuple[int, ...], ...]:
    """Who carries which running means, by the numbers before the first cut: those of earlier cuts, and new ones."""
    names = tuple(range(block.query_heads)) if before is None else before.heads
    left = {names[head] for head in kept.heads}
    found = {} if before is None else {one[0]: one for one in before.means if one[0] in left}
    for carrier, members in carriers.items():
        old = found.get(names[carrier], (names[carrier],))
        found[names[carrier]] = tuple(dict.fromkeys((*old, *(names[head] for head in members))))
    return tuple(found[carrier] for carrier in sorted(found))


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

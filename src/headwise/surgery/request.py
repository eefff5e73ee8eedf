"""What is asked for: heads of blocks, from a plan or a mapping, checked against the model's layout."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headwise.errors import InputError
from headwise.layout import HeadLayout

__all__ = ["Request", "request_of"]

_REPLACEMENTS: Final = ("nothing", "constant", "running_mean")


@dataclass(frozen=True)
class Request:
    """Heads to cut.

    Attributes:
        removed: for each block, by its module path, the query heads that go, sorted.
        constant: those of them whose mean output stays, as a bias.
        running: those of them in whose place the mean of the visible values stands.
        facts: what the plan says of itself.
    """

    removed: dict[str, tuple[int, ...]]
    constant: dict[str, tuple[int, ...]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    running: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.removed.values()))


def request_of(layout: HeadLayout, plan: Any, weight_hash: str | None = None, name: str = "the model") -> Request:
    """Read a plan, or a mapping from blocks to heads.

    Args:
        layout: the heads of the model.
        plan: a :class:`~headwise.plans.HeadPlan`, or ``{where: [heads]}`` where ``where`` is the path of an attention
            module or a prefix that fits one.
        weight_hash: of the model, to be compared with the plan's.
        name: of the model, for messages.

    Raises:
        InputError: a block or head that does not exist, a head twice, a plan for another model, an unknown replacement.
    """
    if isinstance(plan, Mapping):
        return Request(_sorted(layout, plan.items()))
    cuts = getattr(plan, "cuts", None)
    if cuts is None:
        raise InputError(f"plan must be a HeadPlan or a mapping from blocks to heads, and is a {type(plan).__name__}")
    theirs = getattr(plan, "weight_hash", None)
    if theirs and weight_hash and theirs != weight_hash:
        raise InputError(
            f"the plan was made for {getattr(plan, 'model', None) or 'a model without a name'} (weights "
            f"{theirs[:12]}...), and this is {name} (weights {weight_hash[:12]}...); make a plan for "
            "this model, or load it as for the plan: the same dtype (--dtype) and revision"
        )
    _check_shapes(layout, getattr(plan, "blocks", {}))
    removed: dict[str, list[int]] = {}
    replaced: dict[str, dict[str, list[int]]] = {name: {} for name in _REPLACEMENTS}
    for cut in cuts:
        if cut.replacement not in _REPLACEMENTS:
            raise InputError(
                f"{cut.block}: head {cut.head} has the replacement {cut.replacement!r}; known are {_REPLACEMENTS}"
            )
        if cut.block not in layout.blocks:
            raise InputError(_unknown(layout, cut.block))
        removed.setdefault(cut.block, []).append(cut.head)
        replaced[cut.replacement].setdefault(cut.block, []).append(cut.head)
    facts = {
        name: getattr(plan, name) for name in ("criterion", "budget", "unit", "model", "facts") if hasattr(plan, name)
    }
    constant, running = (
        {block: tuple(sorted(heads)) for block, heads in replaced[name].items()}
        for name in ("constant", "running_mean")
    )
    return Request(_sorted(layout, removed.items()), constant, facts, running)


def _check_shapes(layout: HeadLayout, blocks: Mapping[str, Sequence[int]]) -> None:
    """Refuse a plan whose blocks have other numbers of heads here.

    Raises:
        InputError: which block, and both numbers.
    """
    for path, theirs in blocks.items():
        if path not in layout.blocks:
            raise InputError(f"the plan was made for another model: {_unknown(layout, path)}")
        ours = (layout.blocks[path].query_heads, layout.blocks[path].kv_heads)
        if tuple(theirs) != ours:
            raise InputError(
                f"{path}: the plan was made for {theirs[0]} query heads and {theirs[1]} key-value heads, and the model "
                f"has {ours[0]} and {ours[1]}; make a plan for this model"
            )


def _sorted(layout: HeadLayout, given: Iterable[tuple[Any, Any]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for where, heads in given:
        block = _find(layout, where)
        if block in found:
            raise InputError(f"{block} is named twice; give all its heads in one place")
        count = layout.blocks[block].query_heads
        indices = _indices(block, count, heads)
        if indices:
            found[block] = indices
    return {block: found[block] for block in layout.blocks if block in found}


def _indices(block: str, count: int, heads: Any) -> tuple[int, ...]:
    if isinstance(heads, str | bytes):
        raise InputError(f"{block}: heads must be indices counted from 0, got {heads!r}")
    listed = [heads] if isinstance(heads, int) else heads
    found = []
    try:
        for one in listed:
            if isinstance(one, bool):
                raise TypeError
            found.append(operator.index(one))
    except TypeError:
        raise InputError(f"{block}: heads must be indices counted from 0, got {heads!r}") from None
    for head in found:
        if not 0 <= head < count:
            raise InputError(f"{block}: there is no head {head}; it has the heads 0 to {count - 1}")
    if len(set(found)) < len(found):
        raise InputError(f"{block}: a head is named twice in {found}")
    return tuple(sorted(found))


def _find(layout: HeadLayout, where: Any) -> str:
    if not isinstance(where, str):
        raise InputError(f"a block is named by the path of its attention module, got {type(where).__name__}")
    if where in layout.blocks:
        return where
    found = [block for block in layout.blocks if block.startswith(where + ".")]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{where!r} names {len(found)} blocks: {', '.join(found[:8])}; name one of them")
    raise InputError(_unknown(layout, where))


def _unknown(layout: HeadLayout, where: str) -> str:
    near = difflib.get_close_matches(where, list(layout.blocks), 3, 0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"its blocks are {', '.join(list(layout.blocks)[:6])}"
    return f"the model has no attention block {where!r}; {hint}"

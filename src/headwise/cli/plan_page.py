"""What ``headwise plan`` prints for people: which heads of which layer go, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

if TYPE_CHECKING:
    from headwise.plans import HeadPlan

__all__ = ["plan_page"]

GOES, STAYS = "·", "█"


def plan_page(plan: HeadPlan, output: Path | None) -> RenderableType:
    """Everything that planning says on stdout."""
    return Group(*_parts(plan, output))


def _parts(plan: HeadPlan, output: Path | None) -> Iterator[RenderableType]:
    yield Text(str(plan.model or "model"), style="bold", no_wrap=True, overflow="ignore")
    share = len(plan) / max(1, plan.heads)
    instead = {cut.replacement for cut in plan.cuts} - {"nothing"}
    said = f", replaced by {' or '.join(sorted(instead)).replace('_', ' ')}" if instead else ""
    yield Text(f"{len(plan)} of {plan.heads} heads go ({share:.0%}){said}, chosen by {plan.criterion}")
    for line in _left(plan.facts):
        yield Text(line)
    yield Text("")
    removed = plan.removed
    width = max((len(block) for block in plan.blocks), default=0)
    for block, (heads, _) in plan.blocks.items():
        gone = set(removed.get(block, ()))
        marks = "".join(GOES if head in gone else STAYS for head in range(heads))
        yield Text(f"{block:<{width}}  {marks}  {heads - len(gone)} of {heads}", no_wrap=True, overflow="ignore")
    yield Text(f"{STAYS} stays, {GOES} goes; heads from 0, left to right", style="dim")
    yield Text("")
    said = "the plan was not saved: -o FILE keeps it" if output is None else f"plan: {output}"
    yield Text(said, no_wrap=True, overflow="ignore")


def _left(facts: Any) -> Iterator[str]:
    before, after = facts.get("before"), facts.get("after")
    if before and after:
        less = before["parameters"] - after["parameters"]
        share = abs(less) / max(1, before["parameters"])
        if less < 0:  # the intercepts of the repair, where running means save nothing
            yield f"{after['parameters']:,} parameters with the repair, {-less:,} more than before ({share:.1%})"
        else:
            yield f"{after['parameters']:,} parameters stay, {less:,} go ({share:.1%})"
        if before["cache_bytes"]:
            yield f"{after['cache_bytes']:,.0f} of {before['cache_bytes']:,.0f} cache bytes per token stay"
        if before.get("seconds") and after.get("seconds"):
            yield f"predicted {before['seconds'] / after['seconds']:.2f} times as fast"
    if "loss" in facts:
        yield f"loss on the other half of the text: {facts['loss']:+.2%}"
    if "passes" in facts:
        yield f"cost of choosing: {facts['passes']:.1f} forward passes over the text, {facts.get('seconds', 0.0):.1f} s"

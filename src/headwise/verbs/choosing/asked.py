"""What a caller asks of planning, checked before anything is read or run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.layout import HeadLayout
from headwise.measures.covariance import Statistics
from headwise.models import Model
from headwise.plans import REPLACEMENTS, RIDGE, Pool
from headwise.plans.layer_cost import Repair
from headwise.plans.units import Kind
from headwise.surgery import request_of
from headwise.surgery.repair import check_constants, check_repair
from headwise.verbs.choosing.building import known
from headwise.verbs.choosing.layers import block_shapes, cuttable
from headwise.verbs.seeding import check_seed
from headwise.verbs.statistics import check_skip

__all__ = ["Asked", "unit_for"]


@dataclass(frozen=True)
class Asked:
    """The options of :func:`headwise.plan` that say how heads are chosen; see there."""

    criterion: str = "set-aware"
    repair: Repair = "least_squares"
    ridge: float = RIDGE
    unit: Kind | None = None
    per_layer: int = 1
    protect: Any = None
    only: Sequence[str] = ()
    uniform: bool = False
    replacement: str = "nothing"
    loss: Any = "auto"
    statistics: str | Path | Statistics | None = None
    skip_first: int = 0
    relative: bool = True
    sample: int = 2048
    width: int = 4
    step: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        known(self.criterion)
        if isinstance(self.only, str):
            object.__setattr__(self, "only", (self.only,))
        check_repair(self.repair, self.ridge)
        if self.replacement not in REPLACEMENTS:
            raise InputError(f"replacement must be one of {', '.join(REPLACEMENTS)}, and is {self.replacement!r}")
        if self.replacement == "constant":
            check_constants(self.repair)
        if self.unit not in (None, "head", "group"):
            raise InputError(f"unit must be 'head' or 'group', and is {self.unit!r}")
        if isinstance(self.sample, bool) or not isinstance(self.sample, int) or self.sample < 1:
            raise InputError(f"sample must be a whole number of tokens, at least 1, and is {self.sample!r}")
        check_seed(self.seed)
        check_skip(self.skip_first)

    @property
    def runs(self) -> bool:
        """Whether the criterion needs text beside the statistics."""
        return self.criterion not in ("set-aware", "weight-norm", "random")

    @property
    def reads(self) -> bool:
        """Whether the criterion needs statistics."""
        return self.criterion not in ("weight-norm", "random")

    @property
    def running(self) -> bool:
        """Whether heads are replaced by running means."""
        return self.replacement == "running_mean"

    @property
    def priced(self) -> Repair:
        """The repair that criteria reckon with: a constant in a head's place is what the bias gives."""
        return "bias" if self.replacement == "constant" and self.repair == "none" else self.repair

    def pool(self, model: Model, unit: Kind) -> tuple[Pool, list[str]]:
        """Which heads may go, and notes on those that cannot.

        Raises:
            InputError: protected heads or parts of the model that do not exist, or nothing that may go.
        """
        for one in self.only:
            if not any(_names(one, model.layout, path) for path in model.layout.blocks):
                raise InputError(
                    f"only: {one!r} names no attention of the model; its blocks are "
                    f"{', '.join(list(model.layout.blocks)[:6])}"
                )
        able, reasons = cuttable(model, unit, running=self.running, uniform=self.uniform)
        chosen = [path for path in able if not self.only or any(_names(one, model.layout, path) for one in self.only)]
        if not chosen:
            why = next(iter(reasons.values()), "none is left in it")
            raise InputError(f"no head of the model may go: {why}")
        pool = Pool(
            block_shapes(model),
            unit=unit,
            per_layer=self.per_layer,
            protected=_protected(model.layout, self.protect),
            uniform=self.uniform,
            blocks=chosen,
        )
        return pool, [f"heads stay where they cannot be cut out: {why}" for why in dict.fromkeys(reasons.values())]


def _names(one: str, layout: HeadLayout, path: str) -> bool:
    """Whether a path, a stack or a kind of attention names the block at ``path``."""
    sites = [site for site in layout.sites if site.block == path]
    return (
        path == one
        or path.startswith(f"{one}.")
        or any(set(str(one).split("/")) <= {site.key.stack, site.key.kind} for site in sites)
    )


def _protected(layout: HeadLayout, given: Any) -> set[tuple[str, int]]:
    """(block, head) that must stay, from a mapping, or from texts like ``encoder.layer.0:1,5`` and ``encoder.layer.0``.

    Raises:
        InputError: heads or blocks that do not exist.
    """
    if not given:
        return set()
    if not isinstance(given, Mapping):
        if not isinstance(given, Iterable):
            raise InputError(f"protect takes BLOCK or BLOCK:HEAD,HEAD, or {{block: [heads]}}, and {given!r} came")
        given = _read([given] if isinstance(given, str) else given)
    every = [path for path, heads in given.items() if heads is None]
    named = dict(request_of(layout, {path: heads for path, heads in given.items() if heads is not None}).removed)
    for path in every:
        found = [block for block in layout.blocks if block == path or block.startswith(f"{path}.")]
        if not found:
            request_of(layout, {path: [0]})  # says what the model has
        named |= {block: tuple(range(layout.blocks[block].query_heads)) for block in found}
    return {(block, head) for block, heads in named.items() for head in heads}


def _read(texts: Iterable[Any]) -> dict[str, list[int] | None]:
    found: dict[str, list[int] | None] = {}
    for text in texts:
        path, colon, heads = str(text).rpartition(":")
        try:
            numbers = [int(one) for one in heads.split(",")] if colon else None
        except ValueError:
            raise InputError(f"protect takes BLOCK or BLOCK:HEAD,HEAD, and {text!r} came") from None
        if numbers is None:
            found[str(text)] = None
        elif (before := found.get(path, [])) is not None:  # a block that stays whole stays whole
            found[path] = list(dict.fromkeys([*before, *numbers]))
    return found


def unit_for(asked: Asked, cache: bool) -> Kind:
    """Heads, or groups where cache bytes are to be saved."""
    return asked.unit or ("group" if cache else "head")

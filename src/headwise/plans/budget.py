"""How far to go: a share of the heads, parameters, cache bytes, speed, or a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from headwise.errors import InputError
from headwise.plans.ledger import Ledger
from headwise.plans.units import Unit

__all__ = ["Budget"]


@dataclass(frozen=True)
class Budget:
    """One goal.

    Attributes:
        keep: share of the query heads that stay, in (0, 1]; the nearest number of heads.
        params: parameters that the whole model may have at most.
        cache_bytes: bytes of keys and values per token and sequence at most.
        speed: how many times as fast a forward pass is to be at least, as predicted from measured layer times.
        max_loss: rise of the loss that is allowed, as the evaluator measures it.

    Raises:
        InputError: none or several were given, or one out of its range.
    """

    keep: float | None = None
    params: int | None = None
    cache_bytes: float | None = None
    speed: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        given = self.to_document()
        if len(given) != 1:
            names = ", ".join(one.name for one in fields(self))
            raise InputError(f"give one budget of {names}; {', '.join(given) if given else 'none'} came")
        name, value = next(iter(given.items()))
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{name} must be a number, and is {value!r}")
        if name == "keep" and not 0 < value <= 1:
            hint = f"; {value:g} percent are {value / 100:g}" if 1 < value <= 100 else ""
            raise InputError(f"keep must lie in (0, 1], the share of heads that stay, and is {value}{hint}")
        if name == "speed" and value < 1:
            raise InputError(f"speed must be at least 1, times as fast as now, and is {value}")
        if value < 0:
            raise InputError(f"{name} must be at least 0, and is {value}")

    def to_document(self) -> dict[str, Any]:
        """What was given, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None}

    def check(self, ledger: Ledger) -> None:
        """Refuse a goal that the model cannot be measured by.

        Raises:
            InputError: no cache to save, or no measured times.
        """
        if self.cache_bytes is not None and not ledger.before.cache_bytes:
            raise InputError(
                "cache_bytes: while decoding, the model keeps nothing that goes with a head (an encoder keeps nothing, "
                "and a latent belongs to all heads); choose another budget"
            )
        if self.speed is not None and not ledger.before.seconds:
            raise InputError("speed is predicted from measured layer times, and there are none; give seconds")

    def met(self, ledger: Ledger, removed: Sequence[Unit], grain: int | None = None) -> bool:
        """Whether so much has gone that the goal is reached; ``grain``: how many heads go at a time, if not a unit."""
        left = ledger.after(removed)
        if self.keep is not None:
            size = grain or (len(removed[-1].heads) if removed else 1)
            wanted = math.floor(self.keep * ledger.before.heads + 0.5)
            return left.heads - wanted < size / 2
        if self.params is not None:
            return left.parameters <= self.params
        if self.cache_bytes is not None:
            return left.cache_bytes <= self.cache_bytes
        if self.speed is not None:
            assert left.seconds is not None
            assert ledger.before.seconds is not None
            return ledger.before.seconds >= self.speed * left.seconds
        return False

    def saving(self, ledger: Ledger, unit: Unit) -> float:
        """What removing ``unit`` alone saves of what the budget counts; heads where it counts no bytes or seconds."""
        before, left = ledger.before, ledger.after([unit])
        if self.params is not None:
            return before.parameters - left.parameters
        if self.cache_bytes is not None:
            return before.cache_bytes - left.cache_bytes
        if self.speed is not None and before.seconds is not None and left.seconds is not None:
            return before.seconds - left.seconds
        return float(before.heads - left.heads)

    def short(self, ledger: Ledger, removed: Sequence[Unit]) -> str:
        """How far all that may go falls short of the goal."""
        left = ledger.after(removed)
        said = {
            "keep": f"{left.heads} of {ledger.before.heads} heads are left",
            "params": f"{left.parameters:,} parameters are left",
            "cache_bytes": f"{left.cache_bytes:,.0f} bytes per token are left",
            "speed": ""
            if not left.seconds
            else f"it would be {ledger.before.seconds / left.seconds:.2f} times as fast"
            if ledger.before.seconds
            else "",
        }
        name, value = next(iter(self.to_document().items()))
        return f"{name}={value} cannot be reached: with all that may go removed, {said.get(name, '')}"

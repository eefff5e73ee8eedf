"""What plans with running means must be told of: what they save, and what they cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwise.errors import InputError
from headwise.plans import Budget, Ledger, Pool, Unit

__all__ = ["check_savings", "rounded", "standing"]


def check_savings(budget: Budget, ledger: Ledger, pool: Pool) -> None:
    """Refuse a budget that running means cannot reach, because no unit alone saves any of it.

    Raises:
        InputError: what to ask for instead.
    """
    if budget.keep is None and budget.max_loss is None and not _saves(budget, ledger, pool.units):
        name = next(iter(budget.to_document()))
        raise InputError(
            f"a running mean in the place of {'a head' if pool.unit == 'head' else 'a group'} saves nothing of "
            f"{name}: one query head of its key-value head stays in order to put it out; ask for keep= or max_loss=, "
            "for the unit 'group' (where query heads share a key-value head, and not of cache_bytes), or for the "
            "replacement 'nothing' or 'constant'"
        )


def _saves(budget: Budget, ledger: Ledger, units: Iterable[Unit]) -> bool:
    return any(budget.saving(ledger, unit) > 0 for unit in units)


def standing(ledger: Ledger, removed: Sequence[Unit]) -> list[str]:
    """What running means save, and what constants would."""
    if not ledger.running or not removed:
        return []
    heads, stay = sum(len(unit.heads) for unit in removed), ledger.carriers(removed)
    saved = ledger.before.parameters - ledger.after(removed).parameters
    others = Ledger(ledger.shapes.values(), ledger.before.parameters)
    instead = ledger.before.parameters - others.after(removed).parameters
    if stay == heads:
        return [
            f"running means save nothing here: none of the heads replaced ({heads}) shares its key-value head with "
            f"another of them, so each stays in order to put its running mean out; constants in their place "
            f"would save {instead:,} parameters "
            "(replacement 'constant')"
        ]
    return [
        f"of the {heads} heads in whose place running means stand {stay} stay in order to put them out, one for each "
        f"key-value head; that saves {saved:,} parameters, and constants would save {instead:,}"
    ]


def rounded(budget: Budget, pool: Pool, heads: int, left: int) -> list[str]:
    """Where heads go several at a time, what the share that was asked for became."""
    keep = budget.keep
    if keep is None or abs(left - keep * heads) < 1:
        return []
    why = "every layer loses as many" if pool.uniform else "whole groups go"
    return [f"{left} of {heads} heads stay ({left / heads:.0%}, where {keep:.0%} was asked for): {why} at a time"]

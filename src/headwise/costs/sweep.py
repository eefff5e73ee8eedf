"""What changes, and what does not, as one number of a model goes up and everything else stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from headwise.costs.numbers import ModelNumbers
from headwise.costs.sweep_rows import Value, over_context, over_heads, over_kv_heads
from headwise.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SWEEPS", "Column", "Sweep", "check_sweep", "sweep"]

SWEEPS: Final = ("heads", "kv-heads", "context")


def check_sweep(over: str) -> None:
    """Refuse a name that is no sweep.

    Raises:
        InputError: with the nearest name.
    """
    if over not in SWEEPS:
        near = get_close_matches(over, SWEEPS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(SWEEPS)}"
        raise InputError(f"there is no sweep over {over!r}; {hint}")


@dataclass(frozen=True)
class Column:
    """One column of a sweep: its name in tables, its unit, and what it is."""

    name: str
    unit: str
    about: str


@dataclass(frozen=True)
class Sweep:
    """A table with one row per value of what was swept.

    Attributes:
        over: ``"heads"``, ``"kv-heads"`` or ``"context"``.
        model: what was swept.
        columns: what each column is; the first is what was swept.
        rows: one value per column; None where it is not known.
        own: index of the row that is the model itself, or None.
        notes: what holds along the sweep.
    """

    over: str
    model: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    own: int | None
    notes: tuple[str, ...]

    def column(self, name: str) -> list[Value]:
        """The values of one column.

        Raises:
            InputError: there is no such column.
        """
        names = [column.name for column in self.columns]
        if name not in names:
            raise InputError(f"there is no column {name!r} in this sweep; it has {', '.join(names)}")
        at = names.index(name)
        return [row[at] for row in self.rows]

    def to_document(self) -> dict[str, Any]:
        """The sweep as plain lists and dictionaries."""
        return {
            "over": self.over,
            "model": self.model,
            "columns": [{"name": one.name, "unit": one.unit, "about": one.about} for one in self.columns],
            "rows": [list(row) for row in self.rows],
            "own": self.own,
            "notes": list(self.notes),
        }

    def to_pandas(self) -> pd.DataFrame:
        """The sweep as a data frame."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=[column.name for column in self.columns])


#: What each column is, by the sweep's name: name, unit, explanation.
COLUMNS: Final[dict[str, tuple[Column, ...]]] = {
    "heads": (
        Column("heads", "", "query heads per layer"),
        Column("d_k", "", "width of a head"),
        Column("usual", "", "d_k from 64 to 128, as most models have it"),
        Column("parameters", "", "of all attention layers"),
        Column("projections", "FLOP", "products with W_Q, W_K, W_V, W_O"),
        Column("scores_and_mixing", "FLOP", "Q K^T and pattern V over the whole rectangle"),
        Column("exponentials", "", "softmax: one per visible pair and head"),
        Column("score_bytes", "bytes", "one layer's scores, if they were built"),
        Column("cache_bytes", "bytes", "key-value cache at the context"),
        Column("rank_bound", "", "largest rank of one head's scores: min(d_k, context)"),
        Column("logit_std", "nats", "spread of scores between unrelated inputs with weights as drawn"),
        Column("unscaled_logit_std", "nats", "the same without 1 / sqrt(d_k)"),
    ),
    "kv-heads": (
        Column("kv_heads", "", "key-value heads per layer"),
        Column("group", "", "query heads that share one"),
        Column("parameters", "", "of all attention layers"),
        Column("projections", "FLOP", "products with W_Q, W_K, W_V, W_O"),
        Column("scores_and_mixing", "FLOP", "Q K^T and pattern V: for every query head"),
        Column("cache_bytes_per_token", "bytes", "per sequence"),
        Column("cache_bytes", "bytes", "at the context, of the batch"),
        Column("decode_bytes", "bytes", "that a decode step moves at least, attention and what else is known"),
        Column("attention_intensity", "FLOP/byte", "of scores and mixing over the cache, while decoding"),
        Column("decode_seconds", "s", "least time of a decode step at the bandwidth"),
    ),
    "context": (
        Column("context", "tokens", "tokens of each sequence"),
        Column("projections", "FLOP", "products with W_Q, W_K, W_V, W_O"),
        Column("scores_and_mixing", "FLOP", "Q K^T and pattern V over the whole rectangle"),
        Column("visible", "FLOP", "the same over the pairs that the mask allows"),
        Column("share", "", "of scores and mixing in all operations that are known"),
        Column("score_bytes", "bytes", "one layer's scores, if they were built"),
        Column("cache_bytes", "bytes", "of the batch"),
        Column("decode_weight_bytes", "bytes", "weights that a decode step reads"),
        Column("decode_cache_bytes", "bytes", "cache that a decode step reads"),
        Column("intensity", "FLOP/byte", "of a decode step"),
        Column("decode_seconds", "s", "least time of a decode step at the bandwidth"),
    ),
}


def sweep(
    numbers: ModelNumbers,
    over: str,
    *,
    contexts: Sequence[int] | None = None,
    input_rms: float | None = None,
    init_std: float | None = None,
    **options: Any,
) -> Sweep:
    """Account for a family of models that differ in one number.

    Args:
        numbers: the model that the others are like.
        over: ``"heads"`` (the widths of all queries and of all keys stay, so d_k falls as heads go up),
            ``"kv-heads"`` (query heads and d_k stay) or ``"context"``.
        contexts: for ``"context"``: the lengths; by default doublings from 128 up to the context.
        input_rms: for ``"heads"``: root mean square of what the attention layers read, for the spread of the
            logits; by default the model's own where it was measured, else 1 (behind a norm without weights).
        init_std: standard deviation of the weights, likewise; else 1 / sqrt(d_model).
        options: as for :func:`headwise.costs.ledger`.

    Raises:
        InputError: an unknown sweep, or one that the model cannot be put through.

    Example:
        >>> from headwise.costs import grid
        >>> table = sweep(grid(512, 8, 1), "heads", context=1024)
        >>> table.column("heads"), len(set(table.column("parameters")))
        ([1, 2, 4, 8, 16, 32, 64], 1)
    """
    check_sweep(over)
    if contexts is not None and over != "context":
        raise InputError(f"contexts belong to a sweep over 'context', not over {over!r}")
    if over == "heads":
        rows, own, notes = over_heads(numbers, input_rms, init_std, options)
    elif over == "kv-heads":
        rows, own, notes = over_kv_heads(numbers, options)
    else:
        rows, own, notes = over_context(numbers, contexts, options)
    return Sweep(over, numbers.name, COLUMNS[over], tuple(rows), own, tuple(notes))

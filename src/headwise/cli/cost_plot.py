"""A sweep as a figure; needs matplotlib, which comes with the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.plots import check_plot, save_plot

if TYPE_CHECKING:
    from headwise.costs import Sweep

__all__ = ["draw"]

#: Panels per sweep: title, label of the axis, columns.
PANELS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "heads": (
        ("Matrix products", "FLOP", ("projections", "scores_and_mixing")),
        ("Softmax", "exponentials", ("exponentials",)),
        ("One layer's scores", "bytes", ("score_bytes",)),
        ("Spread of scores as drawn", "nats", ("logit_std", "unscaled_logit_std")),
    ),
    "kv-heads": (
        ("Attention's parameters", "parameters", ("parameters",)),
        ("Cache at the context", "bytes", ("cache_bytes",)),
        ("Read by a decode step", "bytes", ("decode_bytes",)),
        ("Scores and mixing over the cache", "FLOP per byte", ("attention_intensity",)),
    ),
    "context": (
        ("Operations", "FLOP", ("projections", "scores_and_mixing", "visible")),
        ("Share of scores and mixing", "share", ("share",)),
        ("One layer's scores", "bytes", ("score_bytes",)),
        ("Read by a decode step", "bytes", ("decode_weight_bytes", "decode_cache_bytes")),
    ),
}


def draw(table: Sweep, path: Path) -> None:
    """Write the figure of a sweep.

    Raises:
        InputError: see :func:`headwise.cli.plots.check_plot`.
        RunError: the file cannot be written.
    """
    figure = check_plot(path)(figsize=(10, 7), layout="constrained")
    figure.suptitle(f"{table.model}: {table.over}")
    at = table.column(table.columns[0].name)
    for axes, (title, unit, names) in zip(figure.subplots(2, 2).flat, PANELS[table.over], strict=True):
        _panel(axes, table, at, names)
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel(table.over.replace("kv-", "key-value "))
    save_plot(figure, path)


def _scale(axes: Any, values: list[Any]) -> None:
    """Logarithmic where the values span more than two decades, else from zero; with decimal prefixes."""
    from matplotlib.ticker import EngFormatter

    if max(values) > 100 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(places=None, sep=" "))


def _panel(axes: Any, table: Sweep, at: list[Any], names: tuple[str, ...]) -> None:
    drawn = False
    for name in names:
        values = table.column(name)
        if any(value is not None for value in values):
            axes.plot(at, values, marker="o", label=name.replace("_", " "))
            drawn = True
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [f"{value:,}" for value in at], rotation=45)
    axes.minorticks_off()
    if not drawn:
        axes.text(0.5, 0.5, "does not decode", ha="center", transform=axes.transAxes)
        return
    _scale(axes, [value for name in names for value in table.column(name) if value])
    axes.grid(alpha=0.3)
    if len(names) > 1:
        axes.legend()
    if table.over == "heads":
        usual = [value for value, band in zip(at, table.column("usual"), strict=True) if band]
        if usual:
            axes.axvspan(usual[0], usual[-1], alpha=0.12, color="tab:green")
    if table.own is not None:
        axes.axvline(at[table.own], color="0.5", linestyle=":")

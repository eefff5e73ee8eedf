"""A comparison of criteria as a figure; needs matplotlib, which comes with the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.plots import check_plot, save_plot

if TYPE_CHECKING:
    from headwise.verbs.plan_compare import Comparison

__all__ = ["draw"]


def draw(found: Comparison, path: Path) -> None:
    """Write the figure of a comparison: one panel for each repair, the random control as a band.

    Raises:
        InputError: see :func:`headwise.cli.plots.check_plot`.
        RunError: the file cannot be written.
    """
    repairs = list(dict.fromkeys(one.repair for one in found.curves))
    figure = check_plot(path)(figsize=(5 * len(repairs), 5), layout="constrained")
    figure.suptitle(f"{found.model}: {found.loss}", fontsize="medium")
    panels = figure.subplots(1, len(repairs), squeeze=False, sharey=True)[0]
    for axes, repair in zip(panels, repairs, strict=True):
        _panel(axes, found, repair)
    save_plot(figure, path)


def _panel(axes: Any, found: Comparison, repair: str) -> None:
    curves = [one for one in found.curves if one.repair == repair]
    for one in curves:
        if one.seed is None:
            at = [100 * point.heads / found.heads for point in one.points]
            low = [max(0.0, point.loss - point.low) for point in one.points]
            high = [max(0.0, point.high - point.loss) for point in one.points]
            axes.errorbar(at, [point.loss for point in one.points], [low, high], label=one.criterion, marker=".")
    control = [one for one in curves if one.seed is not None]
    if control:
        at = [100 * point.heads / found.heads for point in control[0].points]
        each = list(zip(*([point.loss for point in one.points] for one in control), strict=True))
        axes.fill_between(at, list(map(min, each)), list(map(max, each)), color="0.85", label=control[0].criterion)
    if all(point.loss > 0 for one in curves for point in one.points):
        axes.set_yscale("log")
    axes.set_title(f"repair: {repair}")
    axes.set_xlabel("heads removed, %")
    axes.set_ylabel("rise of the loss")
    axes.legend(fontsize="small")

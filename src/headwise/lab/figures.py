"""How the figures look, and how they become SVG files. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwise.errors import RunError
from headwise.lab.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "MARKERS",
    "ORANGE",
    "PURPLE",
    "RED",
    "SKY",
    "number_axis",
    "panels",
    "require_matplotlib",
    "save_figure",
]

# The palette of Okabe and Ito (2008), told apart by colour-blind eyes.
BLUE: Final = "#0072b2"
ORANGE: Final = "#e69f00"
GREEN: Final = "#009e73"
RED: Final = "#d55e00"
PURPLE: Final = "#cc79a7"
SKY: Final = "#56b4e9"
GREY: Final = "#6b6b6b"
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: Final[dict[str, Any]] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "white",
    "font.size": 9,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "headwise",
}


def panels(figure: Figure, columns: int, *, height: float = 3.1) -> list[Axes]:
    """``columns`` panels side by side."""
    figure.set_size_inches(8.6, height)
    figure.set_layout_engine("constrained")
    return list(figure.subplots(1, columns, squeeze=False)[0])


def number_axis(axis: Axis, values: Sequence[float]) -> None:
    """Ticks at ``values``, written as plain numbers, on a logarithmic axis."""
    axis.set_ticks(list(values), [f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)


def require_matplotlib() -> None:
    """Refuse before anything is computed, where figures could not be drawn.

    Raises:
        RunError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise RunError("figures need matplotlib; install it with: pip install 'headwise[plot]'")


def save_figure(experiment: Experiment, series: Mapping[str, Any], path: Path) -> Path:
    """Draw an experiment's figure from its saved series and write it as SVG.

    Raises:
        RunError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure()
        FigureCanvasSVG(figure)
        experiment.draw(figure, series)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "headwise lab"})
    # Trailing blanks come from the SVG writer; without them the files are stable under editors and git.
    text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n"
    path.write_text(text, encoding="utf-8")
    return path

"""A heat map of heads in the terminal: one row per layer, one cell per head.

A cell is two columns wide and always shows its digit, so that colour is never the only sign: 0 for
values in [0, 0.1), 9 for [0.9, 1]. ``.`` is a head that the layer does not have, or a value that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

__all__ = ["HeatMap", "draw", "legend"]

#: Ten steps of viridis (Smith and van der Walt 2015), which stays in order for colour-blind eyes and in grey.
RAMP = ("440154", "482878", "3e4a89", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
STYLES = tuple(
    Style(bgcolor=f"#{colour}", color="#ffffff" if step < 5 else "#000000") for step, colour in enumerate(RAMP)
)
MISSING = "."
CELL = 2
MARK_EVERY = 5


@dataclass(frozen=True)
class HeatMap:
    """Values in [0, 1] per layer and head; rows may be of different lengths, NaN is missing.

    Attributes:
        title: what the rows are, e.g. ``"decoder, cross-attention"``.
        layers: the label of each row.
        values: one sequence of values per row.
    """

    title: str
    layers: Sequence[int | str]
    values: Sequence[Sequence[float]]

    @property
    def heads(self) -> int:
        """The largest number of heads of a layer."""
        return max((len(row) for row in self.values), default=0)


def digit(value: float) -> int | None:
    """The step of ``value`` on the ramp, or None where it is missing.

    Example:
        >>> [digit(value) for value in (0.0, 0.05, 0.61, 1.0, float("nan"))]
        [0, 0, 6, 9, None]
    """
    return min(9, max(0, int(value * 10))) if math.isfinite(value) else None


def draw(heat_map: HeatMap, width: int) -> Text:
    """The heat map as text of at most ``width`` columns; many heads are broken into several maps."""
    label = max([len("layer"), *(len(str(layer)) for layer in heat_map.layers)])
    room = max(1, (width - label - 1) // CELL)
    parts = max(1, math.ceil(heat_map.heads / room))
    size = math.ceil(heat_map.heads / parts) if heat_map.heads else 1
    text = Text(heat_map.title, style="bold")
    for start in range(0, max(1, heat_map.heads), size):
        stop = min(start + size, heat_map.heads)
        text.append("\n" + "layer".rjust(label) + " ", style="dim")
        text.append(_marks(start, stop, width - label - 1), style="dim")
        for layer, row in zip(heat_map.layers, heat_map.values, strict=True):
            text.append("\n" + str(layer).rjust(label) + " ", style="dim")
            for head in range(start, stop):
                _append_cell(text, row[head] if head < len(row) else math.nan)
    return text


def legend() -> Text:
    """The ramp with its digits."""
    text = Text("head 0, 1, 2 ... from the left; ")
    for step, style in enumerate(STYLES):
        text.append(str(step), style=style)
    text.append("  0 = peaked (one key), 9 = uniform over the visible keys")
    return text


def _marks(start: int, stop: int, room: int) -> str:
    """Numbers of the heads above their cells, one in five."""
    line = ""
    for head in range(start, stop):
        number = str(head)
        if head == start or head % MARK_EVERY == 0:
            place = (head - start) * CELL
            if place >= len(line) + bool(line) and place + len(number) <= room:
                line = line.ljust(place) + number
    return line


def _append_cell(text: Text, value: float) -> None:
    step = digit(value)
    if step is None:
        text.append(MISSING.ljust(CELL), style="dim")
    else:
        text.append(str(step).ljust(CELL), style=STYLES[step])

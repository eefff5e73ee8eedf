"""Writing a figure to a file; needs matplotlib, which comes with the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.errors import InputError, RunError

__all__ = ["check_plot", "save_plot"]

ENDINGS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> Any:
    """matplotlib's ``Figure``, once it is known that a figure can be written to ``path``: before hours of computing.

    Raises:
        InputError: matplotlib is not installed, the file's ending is no figure's, or there is no such folder.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: a plot is written to {', '.join(ENDINGS)}; choose one of these endings")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a plot needs matplotlib, which is not installed; pip install 'headwise[plot]'") from None
    return Figure


def save_plot(figure: Any, path: Path) -> None:
    """Write a figure; of an .svg the bytes are a function of the content.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise RunError(
            f"{path}: the plot cannot be written: {error.strerror or error}; free the place, or give another file"
        ) from error

"""Make a run's report again from its saved files: the verb behind ``hw.report`` and ``headwise report``."""

from __future__ import annotations

from pathlib import Path

from headwise.reports import write_report

__all__ = ["report"]


def report(run: str | Path) -> Path:
    """Write ``report.html`` into the run folder ``run`` from the files that are saved there.

    Args:
        run: a folder that a scan wrote.

    Returns:
        The path of the page, which needs no network and no other file.

    Raises:
        RunError: the folder is missing, not a run, unfinished or damaged, or cannot be written.
    """
    return write_report(run)

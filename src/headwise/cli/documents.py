"""What ``--json`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.verbs import ScanResult

__all__ = ["scan_document"]


def scan_document(result: ScanResult) -> dict[str, Any]:
    """``run`` as run.json holds it, ``table`` as heads.json holds it, ``folder`` where they are (or null)."""
    return {
        "run": result.run,
        "table": result.table.to_document(),
        "folder": None if result.folder is None else str(result.folder),
    }

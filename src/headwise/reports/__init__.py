"""A finished run as one HTML page, made from its saved files alone.

The page needs no network and no other file; it works from a USB stick.
"""

from __future__ import annotations

from headwise.reports._page import render_report as render_report
from headwise.reports._page import write_report as write_report

__all__ = ["render_report", "write_report"]

"""The reference page of measures is what the measures say now."""

from __future__ import annotations

from pathlib import Path

from headwise.measures import MEASURES, reference_page
from headwise.measures.conformance import CHECKS
from headwise.measures.importance import LOSSES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "measures.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), "make docs writes it anew"


def test_everything_is_on_it() -> None:
    page = reference_page()
    for name in (*MEASURES, *LOSSES, *CHECKS, "gate_gradient", "fisher", "ablation_resample"):
        assert f"| `{name}` |" in page, name

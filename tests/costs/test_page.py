"""The how-to page computes what it says."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "costs.md"


def published() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("published_models", Path(__file__).with_name("published.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    models: dict[str, Any] = module.PUBLISHED
    return models


def test_examples() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert (results.failed, results.attempted > 3) == (0, True)


def test_number_of_released_models() -> None:
    stated = re.search(r"totals of (\d+) released models", PAGE.read_text(encoding="utf-8"))
    assert stated is not None
    assert int(stated[1]) == len(published())

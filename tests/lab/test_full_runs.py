"""The whole lab, as on the results page: minutes, not seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headwise import lab
from headwise.lab.page import read_results

DOCS = Path(__file__).resolve().parents[2] / "docs" / "lab"
#: Times of a loaded machine say little; the rules of these are about times, or about bytes that do not change.
TIMED = {"cache"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in lab.CATALOGUE])
def test_a_full_run_repeats_the_verdict_of_the_docs(name: str) -> None:
    saved = next(one for one in read_results(DOCS)[0] if one.name == name)
    start = time.process_time()
    outcome = lab.run(name, seed=saved.seed)
    assert time.process_time() - start < 300
    if name in TIMED:
        assert outcome.quantities["bytes_ratio"] == saved.quantities["bytes_ratio"]
    else:
        assert outcome.verdict is saved.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in lab.CATALOGUE if entry.name not in TIMED])
def test_another_seed_gives_the_same_verdict(name: str) -> None:
    saved = next(one for one in read_results(DOCS)[0] if one.name == name)
    assert lab.run(name, seed=saved.seed + 11).verdict is saved.verdict

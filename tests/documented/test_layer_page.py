"""The explanation of multi-head attention computes what it says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "multi-head-attention.md"


def examples(text: str) -> doctest.DocTest:
    """All Python blocks of a page as one session."""
    session = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return doctest.DocTestParser().get_doctest(session, {}, PAGE.name, str(PAGE), 0)


def failures(test: doctest.DocTest) -> tuple[int, str]:
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return result.failed, "".join(report)


def test_every_number_on_the_page_is_computed():
    test = examples(PAGE.read_text(encoding="utf-8"))
    assert len(test.examples) > 40
    failed, report = failures(test)
    assert failed == 0, report


def test_a_wrong_number_would_be_found():
    text = PAGE.read_text(encoding="utf-8").replace("tensor([1.1000, 0.9000])", "tensor([1.1000, 0.8000])")
    assert failures(examples(text))[0] == 1


def test_the_worked_split_reads_both_and_the_single_head_blurs():
    """q = [0.9, 0.1 | 0.2, 0.8]: the numbers of the page, by hand."""
    text = PAGE.read_text(encoding="utf-8")
    assert "q = [0.9, 0.1, 0.2, 0.8]" in text
    assert "0.9 + 0.2 for A and 0.1 + 0.8" in text

"""The results page: made from the saved file alone, fresh, and honest about what it shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headwise import lab
from headwise.errors import RunError
from headwise.lab.figures import save_figure
from headwise.lab.page import page_text, read_results, write_page, write_results

DOCS = Path(__file__).resolve().parents[2] / "docs" / "lab"
FACTS = {"headwise": "0", "torch": "0"}


@pytest.fixture(scope="module")
def outcomes() -> list[lab.Outcome]:
    return [lab.run("worked-split", size="small"), lab.run("saturation", size="small")]


def test_page_and_figures_come_from_the_saved_file(tmp_path: Path, outcomes: list[lab.Outcome]) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra headwise[plot]")
    page = write_page(tmp_path / "a", outcomes, FACTS)
    text = page.read_text(encoding="utf-8")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.json").write_bytes((tmp_path / "a" / "results.json").read_bytes())
    again = write_page(tmp_path / "b")
    assert again.read_text(encoding="utf-8") == text
    for outcome in outcomes:
        figure = f"figures/{outcome.name}.svg"
        assert f"]({figure})" in text
        drawn = (tmp_path / "a" / figure).read_bytes()
        assert drawn == (tmp_path / "b" / figure).read_bytes()
        assert len(drawn) < 150_000
        assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_verdict_claim_rule_and_number_are_on_the_page(outcomes: list[lab.Outcome]) -> None:
    text = page_text(outcomes, FACTS)
    for outcome in outcomes:
        assert f"**Verdict: {outcome.verdict.value}**" in text
        assert f"> {lab.find(outcome.name).claim}" in text
        assert outcome.finding in text
        for check in (*outcome.stated, *outcome.conditioned):
            assert check.threshold.says in text
    saturation = lab.definition("saturation").rule
    assert f"**holds under a condition**: {saturation.condition} |" in text
    assert "| `wide_q` |" in text
    assert "Vaswani et al. 2017" in text


def test_a_small_run_is_marked(outcomes: list[lab.Outcome]) -> None:
    assert "**Not a full run: worked-split, saturation.**" in page_text(outcomes, FACTS)
    assert "Not a full run" not in page_text([replace(one, size="full") for one in outcomes], FACTS)


def test_new_results_stand_beside_those_of_other_experiments(tmp_path: Path, outcomes: list[lab.Outcome]) -> None:
    write_results(tmp_path, outcomes[:1], FACTS)
    write_results(tmp_path, [replace(outcomes[1], seed=5)], FACTS)
    write_results(tmp_path, [replace(outcomes[1], seed=6)], FACTS)
    saved, facts = read_results(tmp_path)
    assert [(one.name, one.seed) for one in saved] == [("saturation", 6), ("worked-split", 0)]
    assert facts == FACTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist; run the experiments first"),
        ("{", "is not valid JSON"),
        ("[]", "is not a results file of the lab"),
        ('{"format": "headwise-lab", "version": 2}', "is not a results file of the lab"),
        ('{"format": "headwise-lab", "version": 1, "outcomes": [{}]}', "cannot be read"),
    ],
)
def test_a_damaged_results_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=message):
        write_page(tmp_path)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headwise.lab.figures.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install 'headwise\[plot\]'"):
        save_figure(lab.definition("rank"), {}, tmp_path / "x.svg")


def test_every_figure_of_the_docs_can_be_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra headwise[plot]")
    for outcome in read_results(DOCS)[0]:
        drawn = save_figure(lab.definition(outcome.name), outcome.series, tmp_path / f"{outcome.name}.svg")
        assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
        assert (DOCS / "figures" / drawn.name).is_file()


def test_the_page_of_the_docs_is_fresh() -> None:
    """`headwise lab --page docs/lab` for new results, `write_page("docs/lab")` for the same ones."""
    outcomes, facts = read_results(DOCS)
    assert [one.name for one in outcomes] == [entry.name for entry in lab.CATALOGUE]
    assert {one.size for one in outcomes} == {"full"}
    assert (DOCS / "README.md").read_text(encoding="utf-8") == page_text(outcomes, facts)


def test_the_verdicts_of_the_docs_follow_from_their_numbers_by_todays_rules() -> None:
    for outcome in read_results(DOCS)[0]:
        verdict, stated, conditioned = lab.definition(outcome.name).rule.judge(outcome.quantities)
        assert verdict is outcome.verdict, outcome.name
        assert (stated, conditioned) == (outcome.stated, outcome.conditioned)


def test_the_page_is_plain_markdown_without_leftovers() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\bnan\b|\bNone\b|\{q\[", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 100
    assert all(line.rstrip().endswith("|") for line in rows)


def test_results_file_has_no_value_that_json_does_not_know() -> None:
    json.loads((DOCS / "results.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)

"""``headwise lab`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise import lab
from headwise.cli.main import main


def test_list_gives_every_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--list"]) == 0
    out = capsys.readouterr().out
    for entry in lab.CATALOGUE:
        assert f"\n{entry.name}\n" in f"\n{out}"
    assert all(len(line) <= 80 for line in out.splitlines())


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in document["experiments"]] == [entry.name for entry in lab.CATALOGUE]


def test_one_experiment_prints_verdict_rule_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "worked-split", "--quick"]) == 0
    printed = capsys.readouterr()
    assert "  -> holds" in [line.rstrip() for line in printed.out.splitlines()]
    assert "separation_two" in printed.out
    assert "its verdicts count for nothing" in printed.err


def test_json_is_one_document_with_the_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "worked-split", "saturation", "--quick", "--json", "--seed", "3"]) == 0
    printed = capsys.readouterr()
    first, second = json.loads(printed.out)["experiments"]
    assert (first["name"], first["condition"]) == ("saturation", lab.definition("saturation").rule.condition)
    assert (second["name"], second["condition"], second["verdict"]) == ("worked-split", None, "holds")
    assert (second["seed"], second["size"]) == (3, "small")
    assert second["claim"] == lab.find("worked-split").claim
    assert second["quantities"]["lost_one"]["mean"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("arguments", [["worked-spilt"], ["--list", "worked-spilt"], ["rank", "worked-spilt"]])
def test_an_unknown_name_is_refused_with_the_nearest(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "headwise: the lab has no experiment 'worked-spilt'; did you mean 'worked-split'?\n"


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--list", "--quick"], ["--list", "--page", "x"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *arguments]) == 2
    assert capsys.readouterr().out == ""


def test_page_is_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra headwise[plot]")
    assert main(["lab", "worked-split", "--quick", "--page", str(tmp_path / "page")]) == 0
    assert str(tmp_path / "page" / "README.md") in capsys.readouterr().out
    assert (tmp_path / "page" / "figures" / "worked-split.svg").is_file()


def test_a_page_that_cannot_be_drawn_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headwise.lab.figures.find_spec", lambda name: None)
    monkeypatch.setattr("headwise.lab.running.run", lambda *_, **__: pytest.fail("it ran"))
    assert main(["lab", "worked-split", "--page", str(tmp_path / "page")]) == 1
    assert "headwise[plot]" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()

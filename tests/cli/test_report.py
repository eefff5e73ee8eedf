"""``headwise report`` and ``hw.report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headwise as hw
from headwise.artifacts import write_run
from headwise.cli.main import main
from tests.tables import synthetic_run, synthetic_table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = synthetic_table()
    return Path(write_run(tmp_path / "run", synthetic_run(table), table))


def test_the_page_is_written_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "report.html"
    page.unlink(missing_ok=True)
    assert main(["report", str(folder)]) == 0
    assert Path(capsys.readouterr().out.strip()).samefile(page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["report", str(folder), "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["report"]).samefile(page)
    assert hw.report(folder).samefile(page)


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "there is no run folder" in capsys.readouterr().err


def test_the_door_survives_the_import_of_its_package() -> None:
    import headwise.reports

    assert callable(hw.report)
    assert headwise.reports.write_report is not hw.report

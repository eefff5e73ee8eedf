"""The page as a file: self-contained, bounded in size, inert, made from saved files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise import artifacts
from headwise.errors import RunError
from headwise.heads import HeadTable, Moments
from headwise.reports import render_report, write_report
from headwise.reports._page import _script
from tests.tables import synthetic_run, synthetic_table

EVIL = "</script><img src=x onerror=document.title='owned'>&amp;\"'{{7*7}}"


class Reader(HTMLParser):
    """Collects what matters: tags with attributes, and the text of the data block."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def a_run(folder: Path, table: HeadTable, **changes: Any) -> Path:
    artifacts.write_run(folder, synthetic_run(table, **changes), table, report=write_report)
    return folder / "report.html"


def test_self_contained_and_small(tmp_path: Path) -> None:
    file = a_run(tmp_path / "run", synthetic_table())
    assert sorted(path.name for path in file.parent.iterdir()) == ["heads.json", "report.html", "run.json"]
    page = file.read_text("utf-8")
    assert len(page.encode()) < 1_500_000
    reader = read(page)
    for tag, attributes in reader.tags:
        assert tag not in ("iframe", "object", "embed", "base", "form") or attributes.get("id") == "filters"
        for name in ("src", "href", "action", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, name, value)
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_the_page_holds_every_number(tmp_path: Path) -> None:
    table = synthetic_table({("encoder", "self"): [3, 2], ("decoder", "cross"): [2]})
    data = json.loads(read(a_run(tmp_path / "run", table).read_text("utf-8")).data)
    assert len(data["heads"]["site"]) == 7
    for entry in data["measures"]:
        for rows in ("token", "special"):
            means = table.mean(entry["name"], rows)
            assert entry[rows]["mean"] == [None if np.isnan(mean) else mean for mean in means]
            stds = [np.nan if std is None else std for std in entry[rows]["std"]]
            np.testing.assert_allclose(stds, table.std(entry["name"], rows), rtol=1e-7)
            counts = entry[rows]["rows"]
            spelled = [counts] * 7 if isinstance(counts, int) else counts
            assert spelled == table.count(entry["name"], rows).tolist()


def test_values_that_are_not_finite_are_named() -> None:
    table = synthetic_table({("encoder", "self"): [2]}, measures=1)
    values = {("entropy", "token"): Moments([5, 5], [np.nan, -np.inf], [np.nan, np.nan])}
    odd = HeadTable.build(table.layout, table.measures, values)  # type: ignore[arg-type]
    data = json.loads(read(render_report(synthetic_run(odd), odd)).data)
    assert data["measures"][0]["token"]["mean"] == [None, None]
    assert data["measures"][0]["token"]["odd"] == {"0": "nan", "1": "-inf"}


def test_hostile_names_are_text(tmp_path: Path) -> None:
    table = synthetic_table({("encoder", "self"): [2]}, model=EVIL, prefix=EVIL + ".")
    page = a_run(tmp_path / "run", table, notes=[EVIL], warnings=[EVIL], arguments={EVIL: EVIL}).read_text("utf-8")
    reader = read(page)
    assert not [tag for tag, _ in reader.tags if tag in ("img", "image")]
    assert page.count("</script>") == 3  # the data and two scripts, nothing else
    assert json.loads(reader.data)["model"] == EVIL
    assert json.loads(reader.data)["sites"][0]["module"].startswith(EVIL)
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", page)[0]


def test_the_place_does_not_matter(tmp_path: Path) -> None:
    """A report is a function of the two documents: no time, no path of this machine."""
    table = synthetic_table()
    run = synthetic_run(table)
    assert render_report(run, table) == render_report(run, table)
    page = a_run(tmp_path / "run", table).read_text("utf-8")
    assert str(tmp_path) not in page


def test_write_report_again_replaces_the_page(tmp_path: Path) -> None:
    file = a_run(tmp_path / "run", synthetic_table())
    before = file.read_bytes()
    file.write_text("old")
    assert write_report(tmp_path / "run") == file
    assert file.read_bytes() == before


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run folder"):
        write_report(tmp_path / "none")
    with pytest.raises(RunError, match="is not a headwise run"):
        write_report(tmp_path)
    table = synthetic_table().select(where=lambda row: False)
    with pytest.raises(RunError, match="the table has no heads"):
        render_report(synthetic_run(table), table)
    for text in ("a</ScRipt>", "<!-- b"):
        with pytest.raises(RunError, match="would end its own tag"):
            _script(text)


def test_a_large_model_case_43(tmp_path: Path) -> None:
    """48 x 64 heads with 12 measures: under 5 MB and written in well under 30 s, every head present."""
    table = synthetic_table({("decoder", "self"): [64] * 48}, measures=12)
    started = time.monotonic()
    file = a_run(tmp_path / "run", table)
    assert time.monotonic() - started < 30
    assert file.stat().st_size < 5_000_000
    data = json.loads(read(file.read_text("utf-8")).data)
    assert len(data["heads"]["head"]) == 3072


def test_one_head(tmp_path: Path) -> None:
    table = synthetic_table({("decoder", "self"): [1]}, measures=1, special=False)
    page = a_run(tmp_path / "run", table).read_text("utf-8")
    assert "decoder self-attention: 1 layer of 1 head</li>" in page
    assert 'id="row-class"' not in page


def test_the_facts_are_in_words(tmp_path: Path) -> None:
    table = synthetic_table({("encoder", "self"): [2], ("decoder", "cross"): [2]})
    page = a_run(tmp_path / "run", table, warnings=["read me first"]).read_text("utf-8")
    for words in [
        "read me first",
        "pooler.dense.weight is in the checkpoint",
        "<strong>tiled</strong> ran at every site",
        "<strong>sdpa</strong>: returns no largest weight",
        "<strong>Distance</strong>: keys and queries are positions of different sequences",
        "decoder.layer.0.attention.cross (decoder, cross)",
        "<dt>weight hash</dt><dd>sha256:00ff</dd>",
        "<dt>parameters</dt><dd>22,713,216</dd>",
        "the synthetic model has no queries",
    ]:
        assert words in page


def test_the_report_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    a_run(tmp_path / "run", synthetic_table())
    script = (
        "import sys; from headwise.reports import write_report; write_report(sys.argv[1]); "
        "print(sorted({'torch', 'transformers', 'pandas'} & sys.modules.keys()))"
    )
    ended = subprocess.check_output([sys.executable, "-c", script, str(tmp_path / "run")], text=True)
    assert ended.strip() == "[]"


def test_the_libraries_in_the_page_carry_their_licences(tmp_path: Path) -> None:
    page = a_run(tmp_path / "run", synthetic_table()).read_text("utf-8")
    vendor = Path(__file__).parents[2] / "src/headwise/reports/vendor"
    licences = (vendor / "LICENSES.txt").read_text("utf-8")
    asked = json.loads((vendor / "package.json").read_text("utf-8"))["devDependencies"]
    for name in ("@observablehq/plot", "sortable-tablesort"):
        assert f"{name} {asked[name]} (" in licences
    assert "Permission to use, copy, modify" in page

"""What a scan prints: heat maps that fit, the heads at both ends, notes, one JSON document."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headwise.cli.heatmap import HeatMap, digit, draw, legend
from headwise.cli.options import Settings
from headwise.cli.render import heat_maps, scan_page
from headwise.cli.scan import tell
from headwise.cli.sink import Sink
from headwise.heads import HeadTable, MeasureInfo, Moments
from headwise.layout import Block, HeadLayout, Site, SiteKey

MEASURES = (
    "entropy",
    "normalized_entropy",
    "max_weight",
    "previous_weight",
    "first_weight",
    "distance",
)


def layout_of(counts: dict[tuple[str, str], list[int]]) -> HeadLayout:
    """Sites with the given numbers of heads per (stack, kind)."""
    sites, blocks = [], {}
    for (stack, kind), heads in counts.items():
        for layer, number in enumerate(heads):
            module = f"{stack}.{layer}.{kind}"
            sites.append(Site(SiteKey(stack, kind, module), module, layer, causal=stack == "decoder"))
            blocks[module] = Block(module, number, number, 7, 7, tuple(range(number)))
    return HeadLayout(tuple(sites), blocks)


def table_of(counts: dict[tuple[str, str], list[int]]) -> HeadTable:
    """Head i of n has normalised entropy i / n, entropy 2 i / n nats, and so on; no distance across sequences."""
    layout = layout_of(counts)
    number = len(layout)
    base = np.arange(number) / number
    values = {}
    crossing = np.array([head.site.kind == "cross" for head in layout.heads()])
    for factor, name in enumerate(MEASURES, start=1):
        given = base * {"normalized_entropy": 1.0, "entropy": 2.0}.get(name, float(factor))
        if name == "distance":
            count = np.where(crossing, 0, 2)
            values[name, "token"] = Moments(
                count, np.where(crossing, math.nan, given), np.where(crossing, math.nan, 0.0)
            )
        else:
            values[name, "token"] = Moments.of(np.stack([given, given]))
    absent = {"distance": {site.key: "two sequences" for site in layout.sites if site.key.kind == "cross"}}
    infos = {name: MeasureInfo(name, "nats", 0, None, None, name) for name in MEASURES}
    return HeadTable.build(layout, infos, values, absent=absent)


def result_of(table: HeadTable, folder: Path | None = None, **run: Any) -> Any:
    facts = {"model": {"name": "tiny"}, "data": {"passages": 3, "tokens": 1234}, "seconds": 2.5, **run}
    return SimpleNamespace(table=table, run=facts, folder=folder)


def printed(result: Any, width: int = 80) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, emoji=False, markup=False)
    console.print(scan_page(result, console), crop=False)
    return stream.getvalue().splitlines()


def plain(heat_map: HeatMap, width: int = 80) -> list[str]:
    return draw(heat_map, width).plain.splitlines()


def test_digits_are_tenths() -> None:
    assert [digit(value) for value in (0.0, 0.0999, 0.1, 0.95, 1.0, 1.0000001, -1e-9)] == [0, 0, 1, 9, 9, 9, 0]
    assert digit(math.nan) is None


def test_a_heat_map_line_by_line() -> None:
    heat_map = HeatMap("encoder, self-attention", [0, 1], [[0.0, 0.15, 1.0], [0.55, math.nan]])
    assert plain(heat_map) == ["encoder, self-attention", "layer 0", "    0 0 1 9 ", "    1 5 . . "]


@pytest.mark.parametrize("heads", [1, 12, 37, 38, 64, 128])
@pytest.mark.parametrize("width", [40, 80])
def test_many_heads_are_broken_and_none_is_lost(heads: int, width: int) -> None:
    values = [[(head % 10) / 10 + 0.05 for head in range(heads)] for _ in range(2)]
    lines = plain(HeatMap("t", [0, 1], values), width)
    assert max(map(len, lines)) <= width
    for layer in ("0", "1"):
        cells = "".join(line.split(maxsplit=1)[1] for line in lines[1:] if line.split()[0] == layer)
        assert cells.replace(" ", "") == "".join(str(head % 10) for head in range(heads))


def test_head_numbers_stand_above_their_cells() -> None:
    lines = plain(HeatMap("t", [0], [[0.5] * 64]))
    marks = [line for line in lines if line.startswith("layer ")]
    assert len(marks) == 2
    for start, line in zip((0, 32), marks, strict=True):
        for head in (int(word) for word in line.split()[1:]):
            place = len("layer ") + 2 * (head - start)
            assert line[place:].split()[0] == str(head)
    assert [int(word) for word in marks[1].split()[1:]] == [32, 35, 40, 45, 50, 55, 60]


def test_colour_only_where_it_is_wanted() -> None:
    heat_map = HeatMap("t", [0], [[0.0, 0.99]])
    for force, coloured in ((True, True), (False, False)):
        stream = io.StringIO()
        console = Console(file=stream, width=80, force_terminal=force, color_system="truecolor" if force else None)
        console.print(draw(heat_map, 80))
        assert ("\x1b[" in stream.getvalue()) is coloured
        assert "48;2;68;1;84" in stream.getvalue() or not coloured


def test_no_color_keeps_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=True).print(legend())
    assert "48;" not in stream.getvalue()
    assert "0123456789" in stream.getvalue()


def test_heat_maps_of_a_table_with_uneven_layers() -> None:
    maps = heat_maps(table_of({("encoder", "self"): [2, 3], ("decoder", "cross"): [5]}))
    assert [(each.title, list(each.layers)) for each in maps] == [
        ("encoder, self-attention", [0, 1]),
        ("decoder, cross-attention", [0]),
    ]
    assert plain(maps[0])[-2:] == ["    0 0 1 . ", "    1 2 3 4 "]
    assert plain(maps[1])[-1:] == ["    0 5 6 7 8 9 "]


def test_the_page() -> None:
    lines = printed(result_of(table_of({("encoder", "self"): [11] * 2, ("decoder", "cross"): [3]}), Path("runs/x")))
    assert lines[:2] == ["tiny", "25 heads in 3 attention layers over 3 passages, 1,234 tokens, 2.5 s"]
    assert max(map(len, lines)) <= 80
    peaked = lines.index("Most peaked heads") + 2
    uniform = lines.index("Most uniform heads") + 2
    assert lines[peaked].split() == ["encoder", "self", "0", "0", "0.000", "0.000", "0.000", "0.000", "0.000", "0.0"]
    assert lines[peaked + 9].split()[:4] == ["encoder", "self", "0", "9"]
    assert lines[uniform].split() == ["decoder", "cross", "0", "2", "1.920", "0.960", "2.880", "3.840", "4.800", "-"]
    assert lines[uniform + 9].split()[:4] == ["encoder", "self", "1", "4"]
    assert lines[-1] == "report: runs/x/report.html"


def test_a_model_of_one_kind_needs_no_such_column() -> None:
    lines = printed(result_of(table_of({("encoder", "self"): [3]})))
    assert lines[lines.index("Most peaked heads") + 1].split()[:2] == ["layer", "head"]
    assert not any("report" in line for line in lines)
    assert len([line for line in lines if line.split()[:2] == ["0", "2"]]) == 2


def test_a_long_path_is_one_line() -> None:
    folder = Path("/" + "/".join(["somewhere"] * 20))
    assert printed(result_of(table_of({("encoder", "self"): [2]}), folder))[-1] == f"report: {folder}/report.html"


def test_a_model_with_markup_in_its_name() -> None:
    lines = printed(result_of(table_of({("encoder", "self"): [2]}), model={"name": "[bold]x[/] :smile:"}))
    assert lines[0] == "[bold]x[/] :smile:"


def told(result: Any, **settings: bool) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    tell(Sink(Settings(**settings), out, err), result)
    return out.getvalue(), err.getvalue()


def test_json_is_one_document(tmp_path: Path) -> None:
    table = table_of({("decoder", "cross"): [2]})
    result = result_of(table, tmp_path, notes=["cut 3 tokens"], warnings=["long"])
    out, err = told(result, json=True)
    document = json.loads(out)
    assert document["folder"] == str(tmp_path)
    assert document["run"]["model"] == {"name": "tiny"}
    assert HeadTable.from_document(document["table"]) == table
    assert err == "headwise: warning: long\nheadwise: note: cut 3 tokens\n"


def test_notes_are_said_once_and_quiet_is_quiet() -> None:
    result = result_of(table_of({("encoder", "self"): [2]}), notes=["cut 3 tokens", "cut 3 tokens"])
    assert told(result)[1] == "headwise: note: cut 3 tokens\n"
    assert told(result, quiet=True)[1] == ""
    assert told(result)[0].startswith("tiny\n2 heads")


def test_nan_is_null_in_json() -> None:
    out = io.StringIO()
    Sink(Settings(json=True), out).document({"a": math.nan, "b": [math.inf, 1.5], "c": np.float64(2.0), "d": Path("x")})
    assert json.loads(out.getvalue()) == {"a": None, "b": [None, 1.5], "c": 2.0, "d": "x"}


def test_progress_draws_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, drawn in ((io.StringIO(), False), (Terminal(), True)):
        with Sink(Settings(), io.StringIO(), stream).progress() as bar:
            bar(1, 7, "measuring")
            bar(7, 7, "measuring")
        assert ("measuring" in stream.getvalue()) is drawn
    stream = Terminal()
    with Sink(Settings(quiet=True), io.StringIO(), stream).progress() as bar:
        bar(1, 7, "measuring")
    assert stream.getvalue() == ""


def test_warnings_become_notes() -> None:
    import warnings

    err = io.StringIO()
    with Sink(Settings(), io.StringIO(), err).warnings_as_notes():
        warnings.simplefilter("default")
        warnings.warn("old\n  thing", DeprecationWarning, stacklevel=1)
    assert err.getvalue() == "headwise: warning: old thing\n"

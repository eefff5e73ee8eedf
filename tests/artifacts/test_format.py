"""The format of heads.json and run.json: bytes pinned, exact round trips, versions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import artifacts
from headwise.errors import InputError, RunError
from headwise.heads import HeadTable, MeasureInfo, Moments
from headwise.layout import Block, HeadLayout, Projection, Site, SiteKey
from tests.tables import synthetic_run, synthetic_table

HERE = Path(__file__).parent


def golden_table() -> HeadTable:
    """Every kind of entry once: two sites, a shared block, GQA, an absence, a value that is not finite."""
    block = Block(
        "layers.0.attn", 2, 1, 3, 5, (0, 0), q=Projection("layers.0.attn.qkv", True, "q|k|v"),
        o=Projection("layers.0.attn.out", False, "heads"), o_path="layers.0.attn.out", unknown=(("v", "fused \u00e9"),),
    )  # fmt: skip
    keys = [SiteKey("decoder", "self", "layers.0.attn", 0), SiteKey("decoder", "self", "layers.0.attn", 1)]
    sites = (Site(keys[0], "layers.0.attn", 0, True, 7), Site(keys[1], "layers.0.attn", 1, True))
    layout = HeadLayout(
        sites, {"layers.0.attn": block}, uncovered=(("mlp.attn", "own softmax"),), facts=(("mask", "compact"),)
    )
    measures = {
        "entropy": MeasureInfo("entropy", "nats", 0, None, None, "Shannon entropy of the row", "Shannon 1948"),
        "distance": MeasureInfo("distance", "tokens", 0.0, None, "low"),
    }
    values: dict[Any, Moments] = {
        ("entropy", "token"): Moments([3, 3, 2, 0], [0.1, 1 / 3, math.inf, 0.0], [0.0, 5e-324, math.nan, 0.0]),
        ("entropy", "special"): Moments([1, 1, 1, 1], [-0.0, 1e300, 0.1 + 0.2, 2.0], [0.0] * 4),
        ("distance", "token"): Moments([3, 3, 0, 0], [1.0, 2.0, 0.0, 0.0], [0.5, 0.25, 0.0, 0.0]),
    }
    absent = {"distance": {keys[1]: "the keys are compressed"}}
    return HeadTable.build(layout, measures, values, absent=absent, model="a/b", weight_hash="h", parts=["y", "x"])


def golden_run() -> dict[str, Any]:
    run = artifacts.run_document(
        model={"name": "a/b", "weight_hash": "h", "kind": "folder", "class": "B", "dtype": "float32", "device": "cpu"},
        arguments={"text": [Path("x.txt")], "max_length": None, "scale": math.nan},
        seed=0,
        backends=[{"backend": "tiled", "sites": ("layers.0.attn",), "reasons": {"sdpa": "no largest weight"}}],
        data={"passages": np.int64(3), "share": np.float64(0.25)},
        mask={"mode": "compact", "reason": None},
        counts={"heads": 4},
        seconds=1.5,
        notes=["a note"],
        warnings=["a warning"],
        date="2026-11-30T02:37:36+00:00",
    )
    run["versions"] = {"headwise": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "transformers": None}
    run["system"] = {"machine": "x86_64"}
    return run


@pytest.mark.parametrize(("name", "made"), [("heads.json", golden_table), ("run.json", golden_run)])
def test_bytes_are_pinned(name: str, made: Any) -> None:
    made = made()
    raw = artifacts.encode_document(made if isinstance(made, dict) else made.to_document())
    assert raw.decode() == (HERE / "golden" / name).read_text(encoding="ascii")


def test_golden_files_are_read(tmp_path: Path) -> None:
    table = HeadTable.load(HERE / "golden" / "heads.json")
    assert table == golden_table()
    run = artifacts.read_run(HERE / "golden")
    assert run.run == golden_run()
    assert HeadTable.from_document(run.heads) == table
    assert HeadTable.load(HERE / "golden") == table
    assert math.copysign(1.0, table.mean("entropy", "special")[0]) == -1.0
    assert table.mean("entropy")[2] == math.inf
    assert table.layout == golden_table().layout


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    first = synthetic_table().save(tmp_path / "a.json").read_bytes()
    second = synthetic_table().save(tmp_path / "b.json").read_bytes()
    assert first == second
    assert HeadTable.load(tmp_path / "a.json").save(tmp_path / "c.json").read_bytes() == first


def test_order_and_selection_are_saved(tmp_path: Path) -> None:
    table = synthetic_table({("encoder", "self"): [3, 2], ("decoder", "cross"): [3]})
    chosen = table.sort("entropy", descending=True).select(layer=0)
    assert HeadTable.load(chosen.save(tmp_path / "t.json")) == chosen


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2**53 - 1), st.floats(), st.floats(min_value=0.0)), min_size=1, max_size=5))
def test_every_float_comes_back_exactly(rows: list[tuple[int, float, float]]) -> None:
    block = Block("a", len(rows), 1, 1, 1, (0,) * len(rows))
    layout = HeadLayout((Site(SiteKey("encoder", "self", "a"), "a", 0, False),), {"a": block})
    count, mean, m2 = (np.array(column) for column in zip(*rows, strict=True))
    info = {"x": MeasureInfo("x", "1")}
    table = HeadTable.build(layout, info, {("x", "token"): Moments(count, mean, m2)})
    raw = artifacts.encode_document(table.to_document())
    back = HeadTable.from_document(json.loads(raw, parse_constant=pytest.fail))
    assert back == table
    number = ~np.isnan(table["x"])
    assert np.signbit(back["x"][number]).tolist() == np.signbit(table["x"][number]).tolist()


@pytest.mark.parametrize("format", [artifacts.HEADS_FORMAT, artifacts.RUN_FORMAT])
def test_schemas_are_valid_and_accept_our_documents(format: str) -> None:
    schema = artifacts.schema(format)
    jsonschema.Draft202012Validator.check_schema(schema)
    table = synthetic_table()
    document = table.to_document() if format == artifacts.HEADS_FORMAT else synthetic_run(table)
    # The plain library, not our quicker loop over numbers, agrees.
    jsonschema.Draft202012Validator(schema).validate(json.loads(artifacts.encode_document(document)))


def test_later_minor_versions_are_read_and_their_keys_ignored(tmp_path: Path) -> None:
    document = golden_table().to_document()
    document["version"] = "1.7"
    document["new"] = {"deep": [1]}
    document["sites"][0]["new"] = 1
    document["measures"][0]["new"] = None
    document["values"][0]["new"] = []
    (tmp_path / "heads.json").write_text(json.dumps(document))
    assert HeadTable.load(tmp_path) == golden_table()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.0", "version 2.0; this headwise reads version 1.x: it was written by a newer headwise: upgrade"),
        ("0.9", "version 0.9; this headwise reads version 1.x: scan again"),
        ("1", "has the version '1'; a version is written like '1.0'"),
        (1.0, "has the version 1.0; a version is written like"),
        ("1.0.0", "a version is written like"),
        ("\u0661.0", "a version is written like"),
        ("1." + "9" * 5000, "a version is written like"),
        (None, "has the version None"),
    ],
)
def test_other_versions_are_refused(version: Any, words: str) -> None:
    document = golden_table().to_document() | {"version": version}
    with pytest.raises(RunError, match=words):
        HeadTable.from_document(document)


def test_versions_name_what_numbers_depend_on() -> None:
    found = artifacts.versions()
    assert found["headwise"] == "0.1.0"
    assert found["torch"] is not None
    assert str(found["python"]).startswith("3.")


def test_run_document_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(InputError, match=r"arguments\.model is a object; run\.json holds numbers"):
        synthetic_run(synthetic_table(), arguments={"model": object()})


def test_numbers_that_are_not_finite_become_null_with_a_note() -> None:
    run = golden_run()
    assert run["arguments"]["scale"] is None
    assert run["notes"] == ["a note", "arguments.scale was nan and is written as null"]


def test_names_of_any_bytes_survive(tmp_path: Path) -> None:
    """A path that is not UTF-8 reaches Python as lone surrogates; it must not fail at the end of a run."""
    name = "caf\udce9 \u2028 \u65e5\u672c </script>"
    table = synthetic_table(model=name)
    artifacts.write_run(tmp_path / "run", synthetic_run(table), table)
    assert artifacts.read_run(tmp_path / "run").run["model"]["name"] == name
    assert HeadTable.load(tmp_path / "run").model == name


@pytest.mark.parametrize("name", ["heads.json", "run.json"])
def test_the_format_page_shows_the_pinned_bytes(name: str) -> None:
    page = (HERE.parents[1] / "docs" / "format.md").read_text("utf-8")
    assert f"```json\n{(HERE / 'golden' / name).read_text('ascii')}```\n" in page


@pytest.mark.parametrize("format", [artifacts.HEADS_FORMAT, artifacts.RUN_FORMAT])
def test_the_format_page_names_every_key(format: str) -> None:
    page = (HERE.parents[1] / "docs" / "format.md").read_text("utf-8")
    schema = artifacts.schema(format)
    for part in [schema, *schema.get("$defs", {}).values(), *schema["properties"].values()]:
        for key in part.get("properties", {}):
            assert f"`{key}`" in page, key

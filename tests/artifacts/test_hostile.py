"""Damaged and hostile files: one clear RunError each, quickly, and never half a table."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise import artifacts
from headwise.errors import RunError
from headwise.heads import HeadTable
from tests.artifacts.test_format import golden_run, golden_table

GOOD = artifacts.encode_document(golden_table().to_document())


def edited(change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = json.loads(GOOD)
    change(document)
    return json.dumps(document).encode()


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


BYTES = {
    "empty": (b"", "is empty"),
    "cut": (GOOD[: len(GOOD) // 2], r"not JSON: .*"),
    "cut at the end": (GOOD[:-3], r"the file is cut short"),
    "not json": (b"hello", "not JSON: Expecting value at line 1, column 1"),
    "binary": (bytes(range(256)), "not UTF-8 text"),
    "utf-16": (GOOD.decode().encode("utf-16"), "not UTF-8 text"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, "byte order mark"),
    "NaN": (GOOD.replace(b"1e+300", b"NaN"), "holds NaN, which is not JSON"),
    "infinity": (GOOD.replace(b"1e+300", b"-Infinity"), "holds -Infinity, which is not JSON"),
    "overflow": (GOOD.replace(b"1e+300", b"1e999"), "the number 1e999 does not fit a float64"),
    "long integer": (GOOD.replace(b"1e+300", b"9" * 5000), r"the number 9{40}\.\.\. has 5000 digits"),
    "deep list": (b"[" * 200_000, "nested too deeply"),
    "deep object": (b'{"a":' * 200_000, "nested too deeply"),
    "twice the same key": (GOOD.replace(b'"parts"', b'"format"'), "the key 'format' occurs twice"),
    "a list": (b"[]", "not a headwise.heads document: it holds a list"),
    "null": (b"null", "it holds a null"),
    "no format": (b"{}", "it names no format"),
    "another format": (artifacts.encode_document(golden_run()), "its format is 'headwise.run'"),
    "trailing": (GOOD + b"{}", "not JSON: Extra data"),
}


@pytest.mark.parametrize("name", BYTES)
def test_damaged_bytes(name: str, tmp_path: Path) -> None:
    raw, words = BYTES[name]
    file = tmp_path / "heads.json"
    file.write_bytes(raw)
    with pytest.raises(RunError, match=words) as caught:
        HeadTable.load(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 600


EDITS = {
    "missing part": (lambda d: d.pop("sites"), "'sites' is a required property"),
    "wrong type": (put("sites", value=3), "sites: must be array, not 3"),
    "long wrong value": (put("sites", value="x" * 10**6), r"sites: must be array, not 'x+\.\.\."),
    "count as text": (put("values", 0, "count", 0, value="3"), r"values\[0\]\.count\[0\]: must be integer, not '3'"),
    "count as boolean": (put("values", 0, "count", 0, value=True), "must be integer, not True"),
    "negative count": (put("values", 0, "count", 0, value=-1), "-1 breaks the rule minimum 0"),
    "huge count": (put("values", 0, "count", 0, value=2**60), "breaks the rule maximum 9007199254740991"),
    "fractional count": (put("values", 0, "count", 0, value=1.5), "must be integer, not 1.5"),
    "negative m2": (put("values", 0, "m2", 0, value=-1e-9), "breaks the rule minimum 0"),
    "mean as text": (put("values", 0, "mean", 0, value="nan"), "must be number or null, not 'nan'"),
    "null mean of counted rows": (put("values", 0, "mean", 0, value=None), "mean of head 0 is null although 3 rows"),
    "mean without rows": (put("values", 0, "mean", 3, value=1.0), "mean of head 3 is 1.0 although no rows"),
    "short list": (lambda d: d["values"][0]["mean"].pop(), "mean has 3 entries and count has 4"),
    "short lists": (
        lambda d: [d["values"][0][part].pop() for part in ("mean", "m2", "count")],
        "is over 3 heads; the table has 4",
    ),
    "not finite twice": (
        lambda d: d["values"][0]["not_finite"].append(d["values"][0]["not_finite"][0]),
        "not_finite names a head twice",
    ),
    "not finite elsewhere": (put("values", 0, "not_finite", 0, "at", value=99), "or one that is not there"),
    "not finite and a number": (put("values", 0, "mean", 2, value=1.0), "mean of head 2 is both 1.0 and inf"),
    "duplicate head": (put("heads", "head", 1, value=0), "head layers.0.attn:0 is in the table twice"),
    "head out of range": (put("heads", "head", 1, value=9), r"head layers.0.attn:9 .* is not in the layout"),
    "site out of range": (put("heads", "site", 1, value=2**31 - 1), "heads.site names site 2147483647; there are 2"),
    "negative site": (put("heads", "site", 1, value=-1), "-1 breaks the rule minimum 0"),
    "uneven heads": (lambda d: d["heads"]["head"].pop(), "heads lists 4 sites for 3 heads"),
    "duplicate site": (put("sites", 1, "call", value=0), "is in the layout twice"),
    "duplicate block": (lambda d: d["blocks"].append(d["blocks"][0]), "block 'layers.0.attn' is listed twice"),
    "unknown block": (put("sites", 1, "block", value="x"), "reads block 'x', which the layout does not have"),
    "huge block": (put("blocks", 0, "query_heads", value=2**40), "breaks the rule maximum 1048576"),
    "wrong head map": (put("blocks", 0, "kv_map", value=[0]), "kv_map has 1 entries for 2 query heads"),
    "head map out of range": (put("blocks", 0, "kv_map", value=[0, 5]), "key-value head outside"),
    "duplicate measure": (lambda d: d["measures"].append(d["measures"][0]), "'entropy' is listed twice"),
    "bad measure name": (put("measures", 0, "name", value="A b"), "breaks the rule pattern"),
    "no measures": (put("measures", value=[]), "measures: .*minItems|non-empty"),
    "measure named like a column": (put("measures", 0, "name", value="layer"), "collides with a column"),
    "duplicate values": (lambda d: d["values"].append(d["values"][0]), "over token rows are listed twice"),
    "values of no measure": (put("values", 0, "measure", value="x"), "values has the key"),
    "no token values": (lambda d: d["values"].pop(0), "no moments for measure 'entropy'"),
    "unknown rows": (put("values", 0, "rows", value="pad"), "'pad' breaks the rule enum"),
    "absent of no measure": (put("absent", 0, "measure", value="x"), "absent names measure 'x'"),
    "absent with rows": (put("absent", 0, "site", value=0), "declared absent at site layers.0.attn but has 3"),
    "absent twice": (lambda d: d["absent"].append(d["absent"][0]), "twice"),
    "empty reason": (put("absent", 0, "reason", value=""), "reason: "),
    "unhashable format": (put("format", value=["headwise.heads"]), r"its format is \['headwise.heads'\]"),
}


@pytest.mark.parametrize("name", EDITS)
def test_damaged_content(name: str, tmp_path: Path) -> None:
    change, words = EDITS[name]
    file = tmp_path / "heads.json"
    file.write_bytes(edited(change))
    with pytest.raises(RunError, match=words) as caught:
        HeadTable.load(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 600


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), length=st.integers(0, 9))
def test_random_damage_is_refused_or_harmless(at: int, byte: int, length: int, tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_bytes(GOOD[:at] + bytes([byte]) + GOOD[at + length :])
    try:
        table = HeadTable.load(file)
    except RunError:
        return
    assert len(table) == 4


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_value_anywhere_is_refused_or_harmless(data: st.DataObject) -> None:
    document = json.loads(GOOD)
    node: Any = document
    while True:
        step = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        child = node[step]
        if not isinstance(child, (dict, list)) or not child or data.draw(st.booleans()):
            break
        node = child
    node[step] = data.draw(JUNK)
    before = copy.deepcopy(document)
    try:
        HeadTable.from_document(document)
    except RunError as error:
        assert len(str(error)) < 800  # noqa: PT017
    assert document == before


def test_a_whole_float_is_no_integer() -> None:
    """JSON schema takes 0.0 for an integer; it indexes nothing."""
    document = json.loads(GOOD)
    document["heads"]["site"][0] = 0.0
    with pytest.raises(RunError, match=r"heads.site\[0\]: must be integer, not 0.0"):
        HeadTable.from_document(document)


def test_a_folder_a_pipe_and_a_device_are_no_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(RunError, match="is not a regular file"):
        HeadTable.load(pipe)  # and does not wait for a writer
    with pytest.raises(RunError, match="is not a regular file"):
        HeadTable.load("/dev/zero")
    with pytest.raises(RunError, match="does not exist"):
        HeadTable.load(tmp_path / "no.json")
    with pytest.raises(RunError, match=r"heads\.json does not exist"):
        HeadTable.load(tmp_path)


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A superuser could: ``--overwrite -o /dev/null``."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RunError, match="is not a regular file and cannot be replaced by one"):
        artifacts.replace_file(pipe, b"x")
    assert pipe.is_fifo()
    monkeypatch.setattr(os, "replace", None)
    with pytest.raises(RunError, match="/dev/null is not a regular file"):
        artifacts.replace_file(Path("/dev/null"), b"x")


def test_a_loop_of_links(tmp_path: Path) -> None:
    loop = tmp_path / "heads.json"
    loop.symlink_to(loop)
    with pytest.raises(RunError, match="cannot be opened: Too many levels"):
        HeadTable.load(loop)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    with open(file, "wb") as stream:
        stream.truncate(2**29 + 1)  # sparse
    with pytest.raises(RunError, match="has 536,870,913 bytes; documents of headwise have at most 536,870,912"):
        HeadTable.load(file)


def test_a_link_is_read_through_and_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    golden_table().save(real)
    link = tmp_path / "link.json"
    link.symlink_to(real)
    table = HeadTable.load(link)
    table.sort("entropy", descending=True).save(link)
    assert link.is_symlink()
    assert HeadTable.load(real) == table.sort("entropy", descending=True)


def test_nothing_can_be_unpickled(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    file = tmp_path / "heads.json"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RunError):
        HeadTable.load(file)
    assert not (tmp_path / "exploded").exists()

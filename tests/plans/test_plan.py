"""Plans as data: saved, read back, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import InputError, RunError
from headwise.plans import HeadCut, HeadPlan

BLOCKS = {"a": (4, 2), "b": (3, 3)}


def plan(*cuts: HeadCut, **more: Any) -> HeadPlan:
    return HeadPlan(cuts, "tiny", "abc", "set-aware", {"keep": 0.6}, blocks=BLOCKS, facts={"passes": 1.0}, **more)


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    before = plan(HeadCut("b", 2), HeadCut("a", 1, "constant"), HeadCut("b", 0))
    before.save(tmp_path / "plan.json")
    after = HeadPlan.load(tmp_path / "plan.json")
    assert after == before
    assert after.cuts == before.cuts  # in the order of removal
    assert list(after.blocks) == ["a", "b"]
    assert after.removed == {"a": (1,), "b": (0, 2)}
    assert after.heads == 7
    again = tmp_path / "again.json"
    after.save(again)
    assert again.read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_the_beginning_of_a_plan() -> None:
    whole = plan(HeadCut("b", 2), HeadCut("a", 1))
    assert whole.first(1).cuts == (HeadCut("b", 2),)
    with pytest.raises(InputError, match="count must lie in 0 to 2, the heads of the plan, and is 3"):
        whole.first(3)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ([HeadCut("c", 0)], "removes head 0 of 'c', and its blocks are a, b"),
        ([HeadCut("a", 4)], "a: there is no head 4; it has the heads 0 to 3"),
        ([HeadCut("a", -1)], "a: there is no head -1"),
        ([HeadCut("a", 1), HeadCut("a", 1)], "a: head 1 is removed twice"),
        ([HeadCut("a", 1, "magic")], "head 1 is replaced by 'magic'; known are nothing, constant, running_mean"),
    ],
)
def test_refusals(cuts: list[HeadCut], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        plan(*cuts)
    document = plan().to_document() | {
        "cuts": [{"block": cut.block, "head": cut.head, "replacement": cut.replacement} for cut in cuts]
    }
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps(document))
    with pytest.raises(RunError, match=r"hostile\.json"):
        HeadPlan.load(file)


def test_a_unit_that_is_none() -> None:
    with pytest.raises(InputError, match="unit must be one of head, group, and is 'pair'"):
        plan(unit="pair")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cuts": 3}, "cuts: must be array"),
        ({"unit": "pair"}, "unit"),
        ({"format": "headwise.heads"}, "its format is"),
        ({"version": "2.0"}, "this headwise reads version 1.x"),
        ({"cuts": [{"block": "a", "head": 0.5, "replacement": "nothing"}]}, "head: must be integer"),
    ],
)
def test_hostile_files(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan().to_document() | change))
    with pytest.raises(RunError, match=words):
        HeadPlan.load(file)


def test_a_file_cut_short(tmp_path: Path) -> None:
    file = plan(HeadCut("a", 0)).save(tmp_path / "plan.json")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(RunError, match="cut short"):
        HeadPlan.load(file)

"""Measures as small callables: names, instances, what is refused, and what a table of them keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import InputError, MeasureError
from headwise.heads import HeadTable
from headwise.measures import GROUPS, MEASURES, PATTERN, PATTERN_MEASURES, Look, RowMeasure, WeightMeasure, resolve
from tests.measures.tiny import ids, llama, t5


@dataclass(frozen=True, kw_only=True)
class Keys(RowMeasure):
    name: str = "keys"
    unit: str = "keys"
    low: float | None = 0.0
    description: str = "How many keys a row may see."

    def __call__(self, look: Look) -> torch.Tensor:
        return look.rows.visible.expand(look.call.z.shape[:3]).float()


@dataclass(frozen=True, kw_only=True)
class WrongShape(Keys):
    def __call__(self, look: Look) -> torch.Tensor:
        return look.rows.entropy.mean(-1)


@dataclass(frozen=True, kw_only=True)
class NoBool(Keys):
    def __call__(self, look: Look) -> Any:
        return look.rows.entropy, look.rows.entropy


def test_default_is_the_ten_of_the_first_floor() -> None:
    table = hw.scan(hw.wrap(llama()), inputs=ids(5))
    assert list(table.measures) == list(PATTERN_MEASURES) == [measure.name for measure in PATTERN]
    assert len(PATTERN) == 10
    assert all(table.measures[name] == info for name, info in PATTERN_MEASURES.items())
    assert not any(info.pooled for info in PATTERN_MEASURES.values())


def test_names_groups_and_instances() -> None:
    table = hw.scan(hw.wrap(llama()), inputs=ids(5, 3), measures=["entropy", "rank", Keys()])
    assert list(table.measures) == ["entropy", *(measure.name for measure in GROUPS["rank"]), "keys"]
    assert table["keys"] == pytest.approx([(15 + 6) / 8] * 12)
    assert [measure.name for measure in resolve("entropy")] == ["entropy"]
    assert resolve(None) == PATTERN
    assert resolve(["pattern", "entropy"]) == PATTERN


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["entropi"], "there is no measure 'entropi'; did you mean 'entropy'?"),
        (["zzz"], "there is no measure 'zzz'; known are pattern"),
        ([], "measures is empty"),
        (3, "measures must be names or measures, and is a int"),
        ([3], "measures holds a int"),
        ([Keys], "measures holds the class Keys; give an instance, Keys()"),
        ([Keys(name="entropy"), "entropy"], "two different measures named 'entropy'"),
        ([Keys(name="layer")], "collides with a column"),
    ],
)
def test_refusals(asked: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        hw.scan(hw.wrap(llama()), inputs=ids(5), measures=asked)
    assert words in str(caught.value)


def test_a_measure_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(MeasureError, match=r"'keys' gave \(1, 4\).*\(1, 4, 5\)"):
        hw.scan(hw.wrap(llama()), inputs=ids(5), measures=[WrongShape()])
    with pytest.raises(MeasureError, match="bool tensor"):
        hw.scan(hw.wrap(llama()), inputs=ids(5), measures=[NoBool()])


def test_pooled_numbers_are_not_merged_and_come_back_from_a_file(tmp_path: Any) -> None:
    model = hw.wrap(llama())
    first, second = (hw.scan(model, inputs=part, measures=["score_rank"]) for part in (ids(5), ids(7, seed=3)))
    with pytest.raises(InputError, match="cannot merge: 'score_rank' depends on all rows together"):
        first.merge(second)
    first.save(tmp_path / "heads.json")
    again = HeadTable.load(tmp_path / "heads.json")
    assert again == first
    assert again.measures["score_rank"].pooled
    assert '"pooled"' not in (tmp_path / "heads.json").read_text().replace('"pooled": true', "")


def test_weights_measured_twice_merge_to_themselves() -> None:
    model = hw.wrap(llama())
    first, second = (hw.scan(model, inputs=part, measures=["qk_rank"]) for part in (ids(5), ids(7, seed=3)))
    assert first.merge(second)["qk_rank"].tolist() == first["qk_rank"].tolist()


def test_a_reason_stands_where_a_measure_does_not_apply() -> None:
    inputs = [{"input_ids": torch.tensor([[3, 4, 5, 6]]), "decoder_input_ids": torch.tensor([[0, 7, 8]])}]
    table = hw.scan(hw.wrap(t5()), inputs=inputs, measures=["previous_weight", "first_weight"])
    cross = [site for site in table.sites if site.key.kind == "cross"]
    assert all("different sequences" in str(table.reason("previous_weight", site.key)) for site in cross)
    assert not np.isnan(table["first_weight"]).any()


def test_watching_may_be_read_more_than_once() -> None:
    module = llama()
    with hw.watch(module) as watched, torch.no_grad():
        module(torch.tensor([[5]]))
        assert watched.table.count("previous_weight").tolist() == [0] * 12
        module(torch.tensor([[5, 6, 7]]))
        assert watched.table.count("previous_weight").tolist() == [2] * 12


def test_every_measure_says_where_it_comes_from() -> None:
    for name, measure in MEASURES.items():
        assert measure.name == name
        assert measure.description
        assert measure.source or name.endswith("_rank")
        assert hash(measure) is not None
    assert any(isinstance(measure, WeightMeasure) for measure in MEASURES.values())

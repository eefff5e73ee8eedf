"""Verify: from disk, with and without repair; every kind of difference is found."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import InputError, ModelError
from headwise.models import load
from headwise.surgery import prune, verify
from tests.surgery import small

PLAN = {"encoder.layer.0.attention.self": [1], "encoder.layer.1.attention.self": [0, 3]}


def test_from_disk(tmp_path: Path) -> None:
    bert: Any = small.bert()
    bert.save_pretrained(tmp_path / "bert")
    folder = prune(bert, PLAN, repair="none").save(tmp_path / "small")
    found = verify(tmp_path / "bert", folder)
    assert found.removed == {path: tuple(heads) for path, heads in PLAN.items()}
    assert found.repaired == ()
    assert found.recorded
    assert found.unchanged == len(bert.state_dict())
    assert [one.module for one in found.proof.layers] == [f"encoder.layer.{at}.attention.output.dense" for at in (0, 1)]


def test_a_model_against_itself() -> None:
    bert = small.bert()
    found = verify(bert, copy.deepcopy(bert))
    assert found.removed == {}
    assert found.proof.identical


@pytest.mark.parametrize("name", ["embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.value.weight"])
def test_any_other_change_is_found(name: str) -> None:
    bert = small.bert()
    pruned = prune(bert, PLAN, repair="none")
    with torch.no_grad():
        pruned.module.get_parameter(name).view(-1)[0] += 1e-3
    with pytest.raises(ModelError, match=f"{name} is not the original's"):
        verify(bert, pruned)


def test_another_dtype_is_said() -> None:
    bert: Any = small.bert()
    pruned = prune(copy.deepcopy(bert).bfloat16(), PLAN, repair="none")
    with pytest.raises(ModelError, match=r"is bfloat16 in PRUNED and float32 in ORIGINAL, .*--dtype bfloat16"):
        verify(bert, pruned)


def test_a_wrong_count_is_found() -> None:
    bert = small.bert()
    pruned: Any = prune(bert, PLAN, repair="none")
    pruned.module.encoder.layer[0].attention.self.scaling *= 2
    with pytest.raises(ModelError, match=r"PRUNED is not ORIGINAL without these heads: encoder\.layer\.0"):
        verify(bert, pruned)


def test_models_that_do_not_belong_together() -> None:
    deep = prune(small.bert(num_hidden_layers=3), {"encoder.layer.2": [1]}, repair="none")
    with pytest.raises(InputError, match=r"PRUNED was cut in encoder\.layer\.2\S*, which ORIGINAL does not have"):
        verify(small.bert(), deep)
    with pytest.raises(InputError, match="not of one model"):
        verify(small.bert(), small.gpt2())
    bert = small.bert()
    once = prune(bert, {"encoder.layer.0": [1]}, repair="none")
    with pytest.raises(InputError, match=r"PRUNED has the heads \[0, 2, 3\], and ORIGINAL \[0, 1, 3\]"):
        verify(prune(bert, {"encoder.layer.0": [2]}, repair="none"), once)


def test_another_config_is_found(tmp_path: Path) -> None:
    """A wrong epsilon or activation changes less than the proof of the whole model allows."""
    bert = small.bert()
    folder = prune(bert, PLAN, repair="none").save(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu_new"}))
    with pytest.raises(ModelError, match="the config says hidden_act = 'gelu_new' in PRUNED and 'gelu' in ORIGINAL"):
        verify(bert, load(folder))
    even = prune(bert, {f"encoder.layer.{at}": [1] for at in range(2)}, repair="none")
    assert verify(bert, load(even.save(tmp_path / "even"))).unchanged


def test_a_projection_that_no_repair_changed(tmp_path: Path) -> None:
    bert = small.bert()
    pruned: Any = prune(bert, PLAN, repair="none")
    with torch.no_grad():
        pruned.module.encoder.layer[0].attention.output.dense.weight.mul_(2)
    with pytest.raises(
        ModelError, match=r"output\.dense\.weight is not .* the record of PRUNED says nothing of a repair"
    ):
        verify(bert, load(pruned.save(tmp_path / "small")))


def test_pruned_twice_against_the_first(tmp_path: Path) -> None:
    bert = small.bert()
    inputs = [{"input_ids": torch.arange(4, 28).view(2, 12)}]
    first = hw.prune(bert, {"encoder.layer.0": [1]}, inputs=inputs)
    second = hw.prune(first, {"encoder.layer.0": [0], "encoder.layer.1": [2]}, repair="none")
    found = verify(bert, load(second.save(tmp_path / "small")))
    assert found.removed == {"encoder.layer.0.attention.self": (0, 1), "encoder.layer.1.attention.self": (2,)}
    assert found.repaired == ("encoder.layer.0.attention.output.dense",)
    assert found.recorded

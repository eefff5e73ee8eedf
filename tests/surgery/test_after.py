"""What can be done with a pruned model of which a layer has no head left: measured, planned, pruned and timed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.models import load
from tests.surgery import small

PLAN = {"model.layers.0": [0], "model.layers.1": [0, 1, 2, 3]}


def inputs() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(3, 29, (1, 12), generator=draw)} for _ in range(5)]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pruned model, loaded from disk."""
    model = hw.prune(small.decoder("Llama", num_hidden_layers=3), PLAN, inputs=inputs())
    return load(model.save(tmp_path_factory.mktemp("after") / "small"))


def test_it_is_measured(pruned: Any, tmp_path: Path) -> None:
    table = hw.scan(pruned, inputs=inputs(), output=tmp_path / "run")
    assert table is not None
    assert hw.roles(pruned, inputs=inputs(), roles="previous")["previous"][0].rows == 5 * 11
    assert {str(key) for key in hw.statistics(pruned, inputs=inputs())} == {
        "model.layers.0.self_attn", "model.layers.2.self_attn",
    }  # fmt: skip


@pytest.mark.parametrize("criterion", ["set-aware", "lazy", "michel", "weight-norm", "random"])
def test_it_is_planned_and_pruned_again(pruned: Any, criterion: str) -> None:
    plan = hw.plan(pruned, inputs=inputs(), keep=0.6, criterion=criterion, sample=40)
    assert plan.removed
    assert "model.layers.1.self_attn" not in plan.removed
    again = hw.prune(pruned, plan, inputs=inputs())
    assert hw.verify(pruned, again).removed == plan.removed

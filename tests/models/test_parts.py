"""Vision towers that cut one attention into pieces, one per image."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zoo

from headwise.models import discover, gate, observe, output_weight
from headwise.models.examples import dummy_inputs
from headwise.models.probe import run_model


def test_pieces_are_parts_of_one_call(collect: Any) -> None:
    model = zoo.build("qwen2_5_vl_vision", {"fullatt_block_indexes": [0, 1]})
    inputs = dummy_inputs(model)
    assert inputs["grid_thw"].tolist() == [[1, 4, 4], [1, 4, 8]]
    layout = discover(model)
    assert len(layout.sites) == 2
    assert all(site.key.call == 0 and site.key.stack == "vision" for site in layout.sites)
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        run_model(model, inputs)
    assert [(call.site.layer, call.part, call.problem.q.shape[2]) for call in seen.calls] == [
        (0, 0, 16),
        (0, 1, 32),
        (1, 0, 16),
        (1, 1, 32),
    ]


def test_a_gate_acts_on_every_part() -> None:
    model = zoo.build("qwen2_5_vl_vision", {"fullatt_block_indexes": [0, 1]})
    inputs = dummy_inputs(model)
    block = next(iter(discover(model).blocks.values()))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        output_weight(changed, block)[2] = 0
        with gate(model, {block.module: [2]}):
            gated = run_model(model, inputs)[0]
        torch.testing.assert_close(gated, run_model(changed, inputs)[0], rtol=0, atol=1e-5)

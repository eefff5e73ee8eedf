"""Weights that gradients find: gates beside queries, latents, shards, packed sequences; and what they must not find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

from headwise.layout import Block
from headwise.measures import HeadWeights
from headwise.models import discover
from headwise.models.by_gradient import NOBODY, SHARED, owners
from headwise.models.examples import dummy_inputs
from headwise.models.probe import run_model, tensors_of

#: Type -> for each part the end of its layer's path, the first row of every head, how many rows it has.
WHERE: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = {
    "qwen3_5_text": {"q": ("q_proj", (0, 16, 32, 48), 8), "gate": ("q_proj", (8, 24, 40, 56), 8)},
    "afmoe": {"gate": ("gate_proj", (), 8)},
    "lfm3": {"gate": ("g_proj", (), 1)},
    "deepseek_v3": {
        "q": ("q_b_proj", (), 24),
        "k": ("kv_b_proj", (0, 28, 56, 84), 16),
        "v": ("kv_b_proj", (16, 44, 72, 100), 12),
    },
    "codegen": {
        "q": ("qkv_proj", (0, 24, 48, 72), 8),
        "v": ("qkv_proj", (8, 32, 56, 80), 8),
        "k": ("qkv_proj", (16, 40, 64, 88), 8),
    },
}


def first_block(model: nn.Module) -> Block:
    return next(iter(discover(model).blocks.values()))


@pytest.mark.parametrize("model_type", WHERE)
def test_where_heads_sit(model_type: str) -> None:
    block = first_block(zoo.build(model_type))
    for part, (path, starts, width) in WHERE[model_type].items():
        found = getattr(block, part)
        assert found.parameter.endswith(path)
        assert (found.starts, found.width) == (starts, width)
        assert found.arrangement == ("by head" if starts else "heads")
    assert block.o is not None
    assert block.unknown == ()
    assert (block.gate is not None) == ("gate" in WHERE[model_type])


def test_packed_sequences_are_joined() -> None:
    """A vision tower that attends image by image puts out all images' queries at once."""
    block = first_block(zoo.build("qwen2_5_vl_vision"))
    assert block.q is not None
    assert (block.q.arrangement, block.q) == ("q|k|v", block.v)


def test_a_projection_that_reads_the_sequence_first_is_found() -> None:
    block = first_block(zoo.build("mlcd_vision_model"))
    assert block.o is not None
    assert (block.o.arrangement, block.partial) == ("heads", ())


def test_a_norm_over_all_heads_is_no_gate() -> None:
    """Behind it every head depends on every other."""
    assert dict(first_block(zoo.build("bitnet")).unknown).keys() == {"o"}
    assert dict(first_block(zoo.build("dory")).unknown).keys() == {"o"}
    assert dict(first_block(zoo.build("diffllama")).unknown).keys() == {"o"}


def test_discovery_leaves_nothing_behind() -> None:
    model = zoo.build("deepseek_v3")
    inputs = dummy_inputs(model)
    with torch.no_grad():
        before = tensors_of(run_model(model, inputs))
    discover(model)
    with torch.no_grad():
        after = tensors_of(run_model(model, inputs))
    assert all(map(torch.equal, before, after))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(value.grad is None for value in model.parameters())


def test_what_is_not_a_head_s_whole_map_has_no_rank() -> None:
    model = zoo.build("deepseek_v3")
    weights = HeadWeights(model, first_block(model))
    assert weights.qk_spectrum == "q_b_proj does not read the layer's input but what the layer made of it"
    assert weights.ov_spectrum == "kv_b_proj does not read the layer's input but what the layer made of it"
    assert weights.k == "it holds numbers that all heads share"
    gated = zoo.build("qwen3_5_text")
    block = first_block(gated)
    found = HeadWeights(gated, block)
    assert isinstance(found.output_factor, str)
    assert "(a gate) stands between the heads and" in found.output_factor
    assert isinstance(found.q, Tensor)
    assert block.q is not None
    rows = gated.get_submodule(block.q.parameter).weight.view(4, 2, 8, -1)[:, 0]
    torch.testing.assert_close(found.q, rows.detach().double().transpose(1, 2))


def test_owners_of_columns() -> None:
    made = torch.randn(2, 3, 14, requires_grad=True)
    other = torch.randn(2, 3, 2, requires_grad=True)
    rotated = made[..., :12].unflatten(-1, (3, 4)).flip(-1).transpose(1, 2) * made[..., 12, None, None].swapaxes(1, 2)
    whose = owners([rotated], {"made": made, "other": other})
    assert whose["made"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [SHARED, NOBODY]
    assert whose["other"].tolist() == [NOBODY, NOBODY]


def test_owners_over_parts() -> None:
    """A head is told also where only one of the parts depends on a layer."""
    made = torch.randn(1, 6, 4, requires_grad=True)
    heads = made.unflatten(-1, (2, 2)).transpose(1, 2)
    fixed: Any = torch.randn(1, 2, 3, 2)
    assert owners([heads[:, :, :3], fixed], {"made": made})["made"].tolist() == [0, 0, 1, 1]

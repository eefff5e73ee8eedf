"""Heads cut out of weights in which they lie beside what belongs to others: gates, latents, shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import headwise as hw
from headwise.errors import UnsupportedError
from headwise.models import discover
from headwise.surgery import prune
from headwise.verbs import statistics
from tests.surgery.small import IDS, apart, masked, noisy, outputs

SMALL = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 16}
PLAN = {"layers.0.self_attn": [1], "layers.1.self_attn": [0, 3]}


def afmoe(**extra: Any) -> nn.Module:
    from transformers import AfmoeConfig, AfmoeModel

    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_dense_layers": 2}
    return noisy(AfmoeModel(AfmoeConfig(**{**sizes, **extra})))


def deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3Model

    latents = {"q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    config = DeepseekV3Config(
        **SMALL, **latents, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=2, n_group=1
    )
    return noisy(DeepseekV3Model(config))


def qwen(**extra: Any) -> nn.Module:
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    states = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**{**sizes, **states, "linear_value_head_dim": 4, "layer_types": kinds, **extra})
    return noisy(Qwen3_5TextModel(config))


def codegen(heads: int) -> nn.Module:
    from transformers import CodeGenConfig, CodeGenModel

    return noisy(
        CodeGenModel(CodeGenConfig(vocab_size=31, n_embd=6 * heads, n_layer=2, n_head=heads, rotary_dim=4, n_inner=16))
    )


@pytest.mark.parametrize("kind", [afmoe, deepseek])
def test_removed_equals_gated(kind: Any) -> None:
    model = kind()
    small = prune(model, PLAN, repair="none")
    assert apart(outputs(small.module, input_ids=IDS), masked(model, PLAN, input_ids=IDS)) < 2e-5
    assert [block.query_heads for block in discover(small.module).blocks.values()] == [3, 2]


@pytest.mark.parametrize("kind", [afmoe, deepseek])
def test_inference_mode_hides_no_heads_and_what_is_left_can_learn(kind: Any) -> None:
    model = kind()
    with torch.inference_mode():
        small = hw.prune(model, PLAN, inputs=[{"input_ids": IDS}], notice=lambda said: None, heal=2)
    assert not any(value.is_inference() for value in small.module.parameters())
    small.module(input_ids=IDS).last_hidden_state.sum().backward()
    with torch.inference_mode():  # weights that were made there have no gradients
        strange = copy.deepcopy(small.module)
        with pytest.raises(UnsupportedError, match="is not known"):
            prune(strange, {"layers.0.self_attn": [0]}, repair="none")


def test_the_gate_s_rows_go_with_the_head() -> None:
    small: Any = prune(afmoe(), PLAN, repair="none").module
    assert [layer.self_attn.gate_proj.weight.shape[0] for layer in small.layers] == [18, 12]


def test_the_latent_stays() -> None:
    model: Any = deepseek()
    small: Any = prune(model, PLAN, repair="none").module
    for layer, old, left in zip(small.layers, model.layers, (3, 2), strict=True):
        new, whole = layer.self_attn, old.self_attn
        assert torch.equal(new.kv_a_proj_with_mqa.weight, whole.kv_a_proj_with_mqa.weight)
        assert new.q_b_proj.weight.shape[0] == left * 10
        assert new.kv_b_proj.weight.shape[0] == left * 11


def test_a_second_cut_finds_the_heads_again() -> None:
    model = deepseek()
    twice = prune(prune(model, {"layers.1.self_attn": [0]}, repair="none"), {"layers.1.self_attn": [2]}, repair="none")
    expected = masked(model, {"layers.1.self_attn": [0, 3]}, input_ids=IDS)
    assert apart(outputs(twice.module, input_ids=IDS), expected) < 2e-5


def test_shards_may_keep_different_numbers() -> None:
    """CodeGen takes its weight apart into four shards of several heads; what is left is one shard."""
    model = codegen(8)
    plan = {"h.0.attn": [1, 2, 5], "h.1.attn": [7]}
    small: Any = prune(model, plan, repair="none").module
    assert apart(outputs(small, input_ids=IDS), masked(model, plan, input_ids=IDS)) < 2e-5
    assert small.h[0].attn.mp_num == 1


def test_statistics_are_of_what_the_output_projection_reads() -> None:
    model: Any = afmoe()
    read: list[Tensor] = []
    handle = model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _module, args: read.append(args[0]))
    with torch.no_grad():
        for row in IDS:
            model(row[None])
    handle.remove()
    rows = torch.cat(read).flatten(0, 1).double()
    found = statistics(model, inputs=[{"input_ids": row[None]} for row in IDS])
    site = next(key for key in found if key.module == "layers.1.self_attn")
    torch.testing.assert_close(found[site].covariance, torch.cov(rows.T, correction=0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[site].mean, rows.mean(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [afmoe, deepseek])
def test_a_repair_is_better_than_none(kind: Any) -> None:
    model = kind()
    draw = torch.Generator().manual_seed(5)
    inputs = [{"input_ids": torch.randint(1, 31, (1, 17), generator=draw)} for _ in range(24)]
    small = prune(model, PLAN, statistics=statistics(model, inputs=inputs))
    assert small.surgery is not None
    layers = small.surgery.repair["layers"]
    assert len(layers) == 2
    assert all(layer["left"] < 0.9 * layer["lost"] for layer in layers)


@pytest.mark.parametrize("heads", [[1], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("kind", [afmoe, deepseek])
def test_costs_of_what_is_left_are_true(kind: Any, heads: list[int]) -> None:
    model = kind()
    pruned = prune(model, {"layers.1.self_attn": heads}, repair="none")
    assert pruned.surgery is not None
    before, after = hw.cost(model, context=5), hw.cost(pruned, batch=2, context=5)
    assert after.parameters.total == sum(value.numel() for value in pruned.module.parameters())
    assert before.parameters.attention - after.parameters.attention == pruned.surgery.blocks[0].parameters
    cache = DynamicCache(config=pruned.module.config)
    with torch.no_grad():
        pruned.module(input_ids=IDS, cache=cache)
    held = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    assert after.cache.bytes == held > 0


def test_a_table_with_gates_and_latents_is_saved_and_read(tmp_path: Any) -> None:
    for kind in (afmoe, deepseek):
        table = hw.scan(kind(), inputs=[{"input_ids": IDS}])
        table.save(tmp_path / f"{kind.__name__}.json")
        assert hw.HeadTable.load(tmp_path / f"{kind.__name__}.json").layout == table.layout


@pytest.mark.parametrize("kind", [qwen, afmoe, deepseek])
def test_a_head_costs_what_goes_with_it(kind: Any) -> None:
    """The rows of its gate too; with a whole group the rows of its keys and values."""
    model = kind()
    path = list(discover(model).blocks)[-1]
    [cost] = [site.parameters for site in hw.cost(model, context=5).sites if site.site.block == path]
    for heads, expected in (([1], cost.per_head), ([0, 1], cost.per_group)):
        surgery = prune(model, {path: heads}, repair="none").surgery
        assert surgery is not None
        if expected is not None:
            before, after = surgery.parameters
            assert before - after == expected

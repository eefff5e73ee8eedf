"""Every family: rows equal the model's own eager attention in float64, gates equal zeroed columns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headwise.models import discover, gate, observe, output_weight
from headwise.models.examples import dummy_inputs
from headwise.models.probe import run_model

#: Type -> what it stands for. Sizes are zoo's, with primes where the type lets them be.
TEXT = {
    "bert": "encoder",
    "roberta": "encoder with offset positions",
    "distilbert": "encoder without layer indices",
    "electra": "encoder with an embedding projection",
    "albert": "one module, several calls",
    "esm": "encoder of proteins, rotary",
    "modernbert": "encoder, fused Wqkv, window without causality",
    "xlm-roberta": "encoder",
    "camembert": "encoder",
    "gpt2": "decoder, Conv1D",
    "gpt_neox": "decoder, fused per head",
    "gpt_bigcode": "multi-query",
    "opt": "decoder with offset positions",
    "biogpt": "decoder, scaled embeddings",
    "llama": "grouped queries, rotary",
    "mistral": "sliding window",
    "qwen2": "biases on q, k, v",
    "qwen3": "normalised queries and keys",
    "gemma": "wide heads",
    "gemma2": "soft cap and every other layer a window",
    "gemma3_text": "window and normalised queries",
    "gpt_oss": "sinks, window",
    "deepseek_v3": "d_k differs from d_v",
    "phi3": "fused q|k|v",
    "olmo2": "queries normalised over all heads",
    "cohere": "parallel residual",
    "starcoder2": "window",
    "stablelm": "partly rotary",
    "granite": "attention multiplier",
    "llama4_text": "chunks",
    "smollm3": "layers without positions",
    "t5": "relative bias, cross-attention",
    "mt5": "relative bias, cross-attention",
    "bart": "cross-attention",
    "marian": "cross-attention, sinusoids",
    "pegasus": "cross-attention",
    "m2m_100": "cross-attention",
    "layoutlm": "its own additive mask",
}
SIGNAL = {
    "vit": "images",
    "deit": "images",
    "dinov2": "images",
    "clip": "images and text",
    "siglip_vision_model": "images",
    "whisper": "audio, cross-attention",
    "wav2vec2": "audio",
    "hubert": "audio",
    "audio-spectrogram-transformer": "audio as images",
}


@pytest.fixture(scope="module", params=[*TEXT, *SIGNAL])
def family(request: Any) -> tuple[str, nn.Module, dict[str, Any]]:
    model = zoo.build(request.param)
    return request.param, model, dummy_inputs(model)


def with_padding(model_type: str, inputs: dict[str, Any], side: str) -> dict[str, Any] | None:
    if side == "none":
        return inputs
    if model_type not in TEXT:
        return None
    mask = torch.ones_like(inputs["input_ids"])
    if side == "left":
        mask[0, :3] = 0
    else:
        mask[0, -2:] = 0
    return {**inputs, "attention_mask": mask}


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_rows_equal_eager_attention_in_float64(
    family: Any, side: str, collect: Any, truth: Any, entropies: Any
) -> None:
    model_type, model, inputs = family
    padded = with_padding(model_type, inputs, side)
    if padded is None:
        pytest.skip("not padded by a mask of ids")
    if model_type == "clip":
        pytest.skip("its outputs carry no attentions at the top; its towers are tested as siglip and vit")
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        run_model(model, padded)
    expected = truth(model, padded)
    two_stacks = ("", "self") not in expected
    if model_type == "siglip_vision_model":  # its outputs carry no weights of the pooling head
        seen.calls = [call for call in seen.calls if call.site.key.kind == "self"]
    for key in {(call.site.key.stack, call.site.key.kind) for call in seen.calls}:
        mine = [call for call in seen.calls if (call.site.key.stack, call.site.key.kind) == key]
        theirs = expected[key if two_stacks else ("", "self")]
        assert len(mine) == len(theirs)
        for call, weights in zip(mine, theirs, strict=True):
            rows = call.answer.rows
            seeing = (rows.visible > 0).expand(rows.entropy.shape)
            assert bool(seeing.any())
            torch.testing.assert_close(rows.entropy.double()[seeing], entropies(weights)[seeing], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(rows.max_weight.double()[seeing], weights.amax(-1)[seeing], rtol=1e-4, atol=1e-5)
            assert bool((rows.argmax[seeing] == weights.argmax(-1)[seeing]).double().mean() > 0.95)


def test_observation_does_not_change_the_output(family: Any, collect: Any) -> None:
    _, model, inputs = family
    with torch.no_grad():
        plain = run_model(model, inputs)[0]
        with observe(model, collect()):
            seen = run_model(model, inputs)[0]
        again = run_model(model, inputs)[0]
    torch.testing.assert_close(seen, plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(plain, again)


def test_a_gate_equals_zeroed_columns_of_the_output_projection(family: Any) -> None:
    """Case 26, for every family and every kind of site."""
    _, model, inputs = family
    layout = discover(model)
    kinds: dict[Any, Any] = {}
    for site in layout.sites:
        kinds.setdefault((site.key.stack, site.key.kind), site)
    for site in kinds.values():
        block = layout.block_of(site.key)
        head = block.query_heads - 1
        assert block.o is not None, block.unknown
        changed = copy.deepcopy(model)
        with torch.no_grad():
            output_weight(changed, block)[head] = 0
            expected = _all(run_model(changed, inputs))
            plain = _all(run_model(model, inputs))
            calls = [other.key for other in layout.sites if other.block == site.block]
            with gate(model, {key: [head] for key in calls}):
                gated = _all(run_model(model, inputs))
        # cached keys and values of later layers change with the gate; compare every tensor
        assert len(gated) == len(expected)
        for left, right in zip(gated, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-6 * max(1.0, right.abs().max().item()))
        assert any(not torch.equal(left, right) for left, right in zip(gated, plain, strict=True))


def _all(output: Any) -> list[Tensor]:
    from headwise.models.probe import tensors_of

    return [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]


def test_every_family_is_covered_whole(family: Any) -> None:
    model_type, model, _ = family
    layout = discover(model)
    if model_type == "siglip_vision_model":  # its pooling head is a torch module of its own
        assert [site.key.module for site in layout.sites if site.key.kind == "cross"] == ["head.attention"]
    assert layout.uncovered == ()
    assert len(layout.sites) >= 2
    for block in layout.blocks.values():
        assert block.query_heads % block.kv_heads == 0
        assert len(block.kv_map) == block.query_heads


def test_masks_stay_descriptions(family: Any) -> None:
    """No family of this list makes headwise fall back to whole masks."""
    assert dict(discover(family[1]).facts)["masks"] == "compact"


def test_the_list_is_long_enough() -> None:
    assert len(TEXT) + len(SIGNAL) >= 25


def test_a_head_on_top_changes_no_row(collect: Any) -> None:
    torch.manual_seed(0)
    config = zoo.small_config(zoo.CONFIG_MAPPING["qwen2"])
    model = AutoModelForCausalLM.from_config(config).eval()
    whole, body = collect(), collect()
    ids = dummy_inputs(model)["input_ids"]
    with torch.no_grad():
        with observe(model, whole):
            model(ids)
        with observe(model, body):
            model.base_model(ids)
    assert [call.site for call in whole.calls] == [call.site for call in body.calls]
    for left, right in zip(whole.calls, body.calls, strict=True):
        assert torch.equal(left.answer.rows.entropy, right.answer.rows.entropy)

"""torch's own modules: nn.MultiheadAttention, nn.TransformerEncoder, nn.Transformer, and a ViT of timm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.kernels import Wanted
from headwise.models import discover, observe, output_weight

WIDTH, HEADS, LENGTH = 20, 4, 7


def encoder(batch_first: bool = True, layers: int = 2, **more: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 23, batch_first=batch_first, **more)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=batch_first and not more).eval()


def padding(batch: int = 3) -> Tensor:
    hidden = torch.zeros(batch, LENGTH, dtype=torch.bool)
    hidden[0, -2:] = True
    return hidden


def own_patterns(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The weights that every nn.MultiheadAttention returns when asked, in float64 (B, H, Q, K)."""
    truth = copy.deepcopy(model).double()
    patterns: list[Tensor] = []

    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        handle = handles.pop(module)
        handle.remove()
        with torch.no_grad():
            given = {**kwargs, "need_weights": True, "average_attn_weights": False}
            patterns.append(module(*args, **given)[1])

    handles = {
        part: part.register_forward_pre_hook(ask, with_kwargs=True)
        for part in truth.modules()
        if isinstance(part, nn.MultiheadAttention)
    }
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            truth(**{name: one.double() if one.is_floating_point() else one for name, one in inputs.items()})
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return patterns


def check(model: nn.Module, inputs: dict[str, Tensor], collect: Any, entropies: Any) -> list[Any]:
    seen = collect(Wanted(rows=True, weights=True))
    with torch.no_grad(), observe(model, seen):
        model(**inputs)
    patterns = own_patterns(model, inputs)
    assert len(seen.calls) == len(patterns)
    for call, pattern in zip(seen.calls, patterns, strict=True):
        torch.testing.assert_close(call.answer.weights.double(), pattern, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(call.answer.rows.entropy.double(), entropies(pattern), rtol=1e-4, atol=1e-5)
        assert torch.equal(call.answer.rows.visible.expand(pattern.shape[:3]), (pattern > 0).sum(-1))
    return seen.calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", ["", "padding", "causal", "float padding", "both"])
def test_encoder_rows_equal_its_own_weights(batch_first: bool, masked: str, collect: Any, entropies: Any) -> None:
    model = encoder(batch_first)
    source = torch.randn(3, LENGTH, WIDTH)
    inputs = {"src": source if batch_first else source.transpose(0, 1)}
    if masked in ("padding", "both"):
        inputs["src_key_padding_mask"] = padding()
    if masked == "float padding":
        inputs["src_key_padding_mask"] = torch.zeros(3, LENGTH).masked_fill(padding(), -torch.inf)
    if masked == "causal":
        inputs["mask"] = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    if masked == "both":
        inputs["mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    layout = discover(model, inputs)
    assert [str(site.key) for site in layout.sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert {site.causal for site in layout.sites} == {masked in ("causal", "both")}
    assert {site.key.kind for site in layout.sites} == {"self"}
    block = layout.blocks["layers.0.self_attn"]
    assert (block.query_heads, block.kv_heads, block.d_k, block.o_path) == (4, 4, 5, "layers.0.self_attn.out_proj")
    check(model, inputs, collect, entropies)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_path_gives_way_and_is_recorded(collect: Any) -> None:
    """Torch's fast path computes without a function that can be seen; the path in steps runs instead."""
    model = encoder()
    inputs = {"src": torch.randn(3, LENGTH, WIDTH), "src_key_padding_mask": padding()}
    assert torch.backends.mha.get_fastpath_enabled()
    facts = dict(discover(model, inputs).facts)
    assert torch.backends.mha.get_fastpath_enabled()
    assert "it gives zeros at padding" in facts["fast path"]
    with torch.no_grad():
        plain = model(**inputs)
        seen = collect()
        with observe(model, seen):
            given = model(**inputs)
    assert len(seen.calls) == 2
    real = ~padding()
    torch.testing.assert_close(given[real], plain[real], rtol=1e-4, atol=1e-5)
    assert bool((plain[~real] == 0).all())
    assert "fast path" not in dict(discover(model, {"src": inputs["src"]}).facts)


@pytest.mark.parametrize("batch_first", [True, False])
def test_case_26_a_gate_equals_zeroed_columns(batch_first: bool) -> None:
    model = encoder(batch_first)
    inputs = {"src": torch.randn(3, LENGTH, WIDTH)}
    layout = discover(model, inputs)
    for site in layout.sites:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            output_weight(changed, layout.block_of(site.key))[2] = 0
            with hw.gate(model, {site.key: [2]}):
                gated = model(**inputs)
            assert (gated - changed(**inputs)).abs().max() <= 1e-6
            assert (gated - model(**inputs)).abs().max() > 1e-4


@pytest.mark.parametrize("batch_first", [True, False])
def test_training_with_gates(batch_first: bool) -> None:
    model = encoder(batch_first, dropout=0.0).train()
    inputs = {"src": torch.randn(3, LENGTH, WIDTH)}
    discover(model, inputs)
    scale = torch.full((HEADS,), 0.7, requires_grad=True)
    with hw.gate(model, {"layers.0": [0, 1, 2, 3]}, scale=scale):
        model(**inputs).square().sum().backward()
    assert scale.grad is not None
    assert bool((scale.grad != 0).all())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 9}])
def test_multihead_attention_alone(need_weights: bool, extra: dict[str, Any], collect: Any, entropies: Any) -> None:
    """As the model itself; keys that it adds of its own count as keys."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **extra).eval()
    inputs = {
        "query": torch.randn(2, 5, WIDTH),
        "key": torch.randn(2, 3, extra.get("kdim", WIDTH)),
        "value": torch.randn(2, 3, extra.get("vdim", WIDTH)),
    }
    example = {**inputs, "need_weights": need_weights}
    layout = discover(model, example)
    (site,) = layout.sites
    assert (site.key.module, site.key.kind, site.causal) == ("", "cross", False)
    assert layout.blocks[""].query_heads == HEADS
    assert layout.blocks[""].o_path == "out_proj"
    check(model, inputs, collect, entropies)
    with torch.no_grad():
        plain, own = model(**example)
        seen = collect()
        with observe(model, seen):
            given, weights = model(**example)
    torch.testing.assert_close(given, plain, rtol=1e-4, atol=1e-6)
    assert (weights is None) is not need_weights
    if need_weights:
        torch.testing.assert_close(weights, own)


def test_encoder_and_decoder(collect: Any, entropies: Any) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 23, batch_first=True).eval()
    inputs = {
        "src": torch.randn(2, 7, WIDTH),
        "tgt": torch.randn(2, 5, WIDTH),
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5),
    }
    layout = discover(model, inputs)
    kinds = [(site.key.stack, site.key.kind, site.causal) for site in layout.sites]
    assert kinds == [("encoder", "self", False)] * 2 + [("decoder", "self", True), ("decoder", "cross", False)] * 2
    check(model, inputs, collect, entropies)
    table = hw.scan(model, inputs=[{"src": inputs["src"], "tgt": inputs["tgt"]}])
    assert len(table) == 6 * HEADS


def test_unbatched_input(collect: Any) -> None:
    model = encoder()
    inputs = {"src": torch.randn(3, LENGTH, WIDTH)}
    discover(model, inputs)
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        model(inputs["src"][1])
    assert seen.calls[0].z.shape == (1, HEADS, LENGTH, WIDTH // HEADS)


def test_half_precision(collect: Any, entropies: Any) -> None:
    model = encoder().bfloat16()
    inputs = {"src": torch.randn(3, LENGTH, WIDTH).bfloat16()}
    discover(model, inputs)
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        model(**inputs)
    for call, pattern in zip(seen.calls, own_patterns(model, inputs), strict=True):
        torch.testing.assert_close(call.answer.rows.entropy.double(), entropies(pattern), rtol=2e-2, atol=2e-2)


def timm_vit() -> Any:
    """A small ViT of timm with random weights; skips, with the reason, where timm cannot be imported."""
    reason = "timm cannot be imported: make test-timm fetches it"
    return pytest.importorskip("timm", reason=reason).models.vision_transformer.VisionTransformer


@pytest.mark.parametrize("fused", [True, False])
def test_a_vit_of_timm(fused: bool, collect: Any, entropies: Any) -> None:
    kind = timm_vit()
    torch.manual_seed(0)
    model = kind(img_size=32, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=HEADS, num_classes=5).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    inputs = {"x": torch.randn(2, 3, 32, 32)}
    layout = discover(model, inputs)
    assert [str(site.key) for site in layout.sites] == ["blocks.0.attn", "blocks.1.attn"]
    assert {(site.key.stack, site.key.kind, site.causal) for site in layout.sites} == {("vision", "self", False)}
    block = layout.blocks["blocks.0.attn"]
    assert (block.query_heads, block.d_k, block.o_path) == (HEADS, 5, "blocks.0.attn.proj")
    assert block.q is not None
    assert block.q.arrangement == "q|k|v"
    truth = copy.deepcopy(model).double()
    patterns: list[Tensor] = []
    for part in truth.blocks:
        part.attn.fused_attn = False
        part.attn.attn_drop.register_forward_hook(lambda _module, _args, output: patterns.append(output))
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        model(**inputs)
        truth(inputs["x"].double())
    for call, pattern in zip(seen.calls, patterns, strict=True):
        torch.testing.assert_close(call.answer.rows.entropy.double(), entropies(pattern), rtol=1e-4, atol=1e-5)
    assert len(hw.scan(model, inputs=[inputs])) == 2 * HEADS
    changed = copy.deepcopy(model)
    with torch.no_grad():
        output_weight(changed, block)[1] = 0
        with hw.gate(model, {"blocks.0": [1]}):
            assert (model(**inputs) - changed(**inputs)).abs().max() <= 1e-6

"""Pruned equals gated; or it is refused by name, and nothing has changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.models import discover, gate, weight_hash
from headwise.models.cut_modules import cut_of
from headwise.surgery import prune
from tests.surgery import small
from tests.surgery.small import IDS, apart, masked, outputs

ATTENTION = "encoder.layer.{}.attention.self"


def parameters(model: nn.Module) -> int:
    return sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("plan", [{0: [1]}, {0: [0, 3], 1: [1, 2]}, {1: [0, 1, 2]}])
def test_separate_projections(plan: dict[int, list[int]]) -> None:
    bert = small.bert()
    named = {ATTENTION.format(layer): heads for layer, heads in plan.items()}
    pruned = prune(bert, named, repair="none")
    assert apart(outputs(pruned.module, input_ids=IDS), masked(bert, named, input_ids=IDS)) <= 1e-6
    gone = sum(map(len, plan.values()))
    assert parameters(bert) - parameters(pruned.module) == gone * (4 * 5 * 20 + 3 * 5)
    for layer, heads in plan.items():
        attention = pruned.module.get_submodule(ATTENTION.format(layer))
        assert attention.num_attention_heads == 4 - len(heads)
        assert attention.query.out_features == 5 * (4 - len(heads))


@pytest.mark.parametrize("plan", [{0: [1]}, {0: [0, 1, 3], 1: [2]}])
def test_conv1d_with_fused_weight(plan: dict[int, list[int]]) -> None:
    gpt2 = small.gpt2()
    named = {f"transformer.h.{layer}.attn": heads for layer, heads in plan.items()}
    pruned = prune(gpt2, named, repair="none")
    assert apart(outputs(pruned.module, input_ids=IDS), masked(gpt2, named, input_ids=IDS)) <= 1e-6
    attention = pruned.module.transformer.h[0].attn
    left = 4 - len(plan[0])
    assert attention.c_attn.weight.shape == (16, 3 * 4 * left)
    assert (attention.c_attn.nf, attention.split_size, attention.num_heads) == (12 * left, 4 * left, left)


def test_case_27_gpt2_columns() -> None:
    """Hidden 8, 4 heads of 2, head 1 out: columns 2, 3, 10, 11, 18, 19 of c_attn and rows 2, 3 of c_proj go."""
    gpt2 = small.gpt2(n_embd=8)
    pruned = prune(gpt2, {"transformer.h.0": [1]}, repair="none").module.transformer.h[0].attn
    keep = [at for at in range(24) if at not in (2, 3, 10, 11, 18, 19)]
    whole = gpt2.transformer.h[0].attn
    assert torch.equal(pruned.c_attn.weight, whole.c_attn.weight[:, keep])
    assert torch.equal(pruned.c_attn.bias, whole.c_attn.bias[keep])
    assert torch.equal(pruned.c_proj.weight, whole.c_proj.weight[[0, 1, 4, 5, 6, 7]])
    assert torch.equal(pruned.c_proj.bias, whole.c_proj.bias)


def test_interleaved_weight() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=31, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, intermediate_size=13, rotary_pct=1.0
    )
    neox = small.noisy(GPTNeoXForCausalLM(config))
    plan = {"gpt_neox.layers.0.attention": [1]}
    pruned = prune(neox, plan, repair="none")
    assert apart(outputs(pruned.module, input_ids=IDS), masked(neox, plan, input_ids=IDS)) <= 1e-6
    weight = pruned.module.gpt_neox.layers[0].attention.query_key_value.weight
    keep = [at for at in range(24) if not 6 <= at < 12]
    assert torch.equal(weight, neox.gpt_neox.layers[0].attention.query_key_value.weight[keep])


def uniform_llama(heads: int, kv_heads: int) -> Any:
    """Query projection zero: each head gives the mean of the values it sees; V of KV head 0 is 1, of 1 is 10."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=heads * 2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=7,
        pad_token_id=None,
    )
    llama = LlamaModel(config).eval()
    attention: Any = llama.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        llama.embed_tokens.weight.fill_(1.0)
        llama.layers[0].input_layernorm.weight.fill_(1.0)
        for head in range(kv_heads):
            attention.v_proj.weight[2 * head : 2 * head + 2] = 10.0**head / config.hidden_size
        attention.o_proj.weight.copy_(torch.eye(2 * heads))
    return llama


def first_columns(model: Any) -> list[float]:
    """What each head of layer 0 writes."""
    seen: list[torch.Tensor] = []
    handle = model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=IDS)
    handle.remove()
    return [round(float(value), 3) for value in seen[0][0, -1, ::2]]


@pytest.mark.parametrize(
    ("removed", "expected", "counts"),
    [
        ([0, 1], [1, 10, 10, 10], (4, 2, False)),
        ([0, 4], [1, 1, 10, 10], (4, 2, True)),
        ([3, 4, 5], [1, 1, 1], (3, 1, True)),
    ],
)
def test_case_28_uneven_groups(removed: list[int], expected: list[float], counts: tuple[int, int, bool]) -> None:
    llama = uniform_llama(6, 2)
    pruned = prune(llama, {"layers.0.self_attn": removed}, repair="none")
    assert first_columns(pruned.module) == expected
    assert pruned.surgery is not None
    change = pruned.surgery.blocks[0]
    assert (change.query_heads[1], change.kv_heads[1], change.even) == counts
    block = pruned.layout.blocks["layers.0.self_attn"]
    assert (block.query_heads, block.kv_heads, block.even) == counts


def test_case_28_multi_query() -> None:
    """8 query heads on one key-value head, half of them out: 4 query heads really gone, keys and values stay."""
    llama = uniform_llama(8, 1)
    pruned = prune(llama, {"layers.0.self_attn": [0, 2, 4, 6]}, repair="none")
    attention = pruned.module.layers[0].self_attn
    assert attention.q_proj.weight.shape == (8, 16)
    assert attention.k_proj.weight.shape == (2, 16)
    assert attention.num_key_value_groups == 4


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("Llama", "sdpa"),
        ("Llama", "eager"),
        ("Qwen2", "sdpa"),
        ("Qwen3", "eager"),
        ("Phi3", "sdpa"),
        ("Phi3", "eager"),
        ("Gemma2", "eager"),
        ("GptOss", "eager"),
    ],
)
@pytest.mark.parametrize("plan", [{0: [1]}, {0: [0, 1], 1: [3]}, {0: [0, 2], 1: [1, 3]}])
def test_grouped_query_attention(name: str, attention: str, plan: dict[int, list[int]]) -> None:
    extra: dict[str, Any] = {}
    if name == "GptOss":
        extra = {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 32, "intermediate_size": 32}
    model: Any = small.decoder(name, **extra)
    model.set_attn_implementation(attention)
    named = {f"model.layers.{layer}.self_attn": heads for layer, heads in plan.items()}
    pruned = prune(model, named, repair="none")
    assert apart(outputs(pruned.module, input_ids=IDS), masked(model, named, input_ids=IDS)) <= 1e-5


def test_implementation_can_be_set_afterwards() -> None:
    """What stands before an unevenly grouped layer follows the model's attention implementation."""
    llama = small.decoder("Llama")
    plan = {"model.layers.0.self_attn": [1]}
    pruned: Any = prune(llama, plan, repair="none").module
    pruned.set_attn_implementation("eager")
    with torch.no_grad():
        found = pruned(input_ids=IDS, output_attentions=True)
    assert [weights.shape[1] for weights in found.attentions] == [3, 4]
    llama.set_attn_implementation("eager")
    assert apart([found.logits], masked(llama, plan, input_ids=IDS)[:1]) <= 1e-5


def test_gates_and_a_second_surgery_on_an_uneven_model() -> None:
    llama = small.decoder("Llama")
    once = prune(llama, {"model.layers.0.self_attn": [1]}, repair="none")
    with gate(once, {"model.layers.0.self_attn": [0]}):
        gated = outputs(once.module, input_ids=IDS)
    twice = prune(once, {"model.layers.0.self_attn": [0]}, repair="none")
    assert apart(outputs(twice.module, input_ids=IDS), gated) <= 1e-5
    assert apart(gated, masked(llama, {"model.layers.0.self_attn": [0, 1]}, input_ids=IDS)) <= 1e-5
    assert twice.surgery is not None
    assert len(twice.surgery.earlier) == 1
    cut = cut_of(twice.module.model.layers[0].self_attn)
    assert cut is not None
    assert cut.heads == (2, 3)


@pytest.mark.parametrize("block", ["encoder.block.0.layer.0.SelfAttention", "decoder.block.1.layer.1.EncDecAttention"])
@pytest.mark.parametrize("heads", [[1], [0, 2], [0, 1, 2, 3]])
def test_shared_relative_bias(block: str, heads: list[int]) -> None:
    """T5 computes one bias for all layers in the first: each layer reads its own heads' part."""
    t5 = small.t5()
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}
    plan = {block: heads, "encoder.block.1.layer.0.SelfAttention": [0, 3]}
    pruned = prune(t5, plan, repair="none")
    assert apart(outputs(pruned.module, **inputs), masked(t5, plan, **inputs)) <= 1e-5


def test_case_31_a_shared_block_changes_every_layer_and_says_so() -> None:
    albert = small.albert()
    block = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    pruned = prune(albert, {block: [1]}, repair="none")
    assert parameters(albert) - parameters(pruned.module) == 268
    assert pruned.surgery is not None
    assert pruned.surgery.blocks[0].sites == (block, f"{block}@1", f"{block}@2")
    layout = discover(albert)
    with gate(albert, {site.key: [1] for site in layout.sites}):
        reference = outputs(albert, input_ids=IDS)
    assert apart(outputs(pruned.module, input_ids=IDS), reference) <= 1e-6
    with pytest.raises(InputError, match=r"block .*@1"):
        prune(albert, {f"{block}@1": [2]}, repair="none")


def test_shared_weights_in_two_modules_are_refused() -> None:
    bert = small.bert()
    bert.encoder.layer[1].attention.self.query.weight = bert.encoder.layer[0].attention.self.query.weight
    with pytest.raises(UnsupportedError, match=r"same weight as encoder\.layer\.1"):
        prune(bert, {ATTENTION.format(0): [1]}, repair="none")


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (small.bert, ATTENTION.format(0)),
        (lambda: small.decoder("Llama"), "model.layers.0.self_attn"),
        (small.gpt2, "transformer.h.0.attn"),
    ],
)
def test_case_30_every_head_of_a_layer(make: Callable[[], Any], first: str) -> None:
    model = make()
    plan = {first: [0, 1, 2, 3]}
    pruned = prune(model, plan, repair="none")
    assert apart(outputs(pruned.module, input_ids=IDS), masked(model, plan, input_ids=IDS)) <= 1e-6
    layout = pruned.layout
    assert layout.blocks[first].query_heads == 0
    assert first not in {site.block for site in layout.sites}
    everywhere = {block: [0, 1, 2, 3] for block in discover(model).blocks}
    empty = prune(model, everywhere, repair="none")
    assert apart(outputs(empty.module, input_ids=IDS), masked(model, everywhere, input_ids=IDS)) <= 1e-6


@pytest.mark.parametrize("name", ["Olmo2", "Olmo3", "FlexOlmo"])
def test_norms_over_all_heads_are_refused_by_name(name: str) -> None:
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 32, "intermediate_size": 32}
    extra = moe if name == "FlexOlmo" else {}
    model = small.decoder(name, **extra)
    before = weight_hash(model), outputs(model, input_ids=IDS)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.q_norm: .* over all heads at once"):
        prune(model, {"model.layers.0.self_attn": [0, 1]}, repair="none")
    assert (before[0], apart(before[1], outputs(model, input_ids=IDS))) == (weight_hash(model), 0.0)


def test_bitnet_is_refused_by_name() -> None:
    model = small.decoder("BitNet")
    with pytest.raises(UnsupportedError, match="attn_sub_norm"):
        prune(model, {"model.layers.0.self_attn": [0]}, repair="none")


def test_one_impossible_part_refuses_the_whole_plan() -> None:
    """Before anything is changed: the original has every weight, attribute, hook and config value that it had."""
    model = small.decoder("BitNet")
    hashed, config = weight_hash(model), model.config.to_dict()
    before = {path: dict(vars(part)) for path, part in model.named_modules()}
    with pytest.raises(UnsupportedError):
        prune(model, {"model.layers.0.self_attn": [0], "model.layers.1.self_attn": [1]}, repair="none")
    assert weight_hash(model) == hashed
    assert model.config.to_dict() == config
    assert {path: dict(vars(part)) for path, part in model.named_modules()} == before


def test_case_25_the_original_is_the_same_afterwards() -> None:
    bert = small.bert()
    bert.train()
    bert.embeddings.word_embeddings.weight.requires_grad_(False)
    grads = {name: value.requires_grad for name, value in bert.named_parameters()}
    expected = outputs(bert, input_ids=IDS)
    pruned = prune(bert, {ATTENTION.format(0): [1]}, repair="none")
    assert bert.training
    assert {name: value.requires_grad for name, value in bert.named_parameters()} == grads
    assert {name: value.requires_grad for name, value in pruned.module.named_parameters()} == grads
    assert pruned.module.training
    assert all(value.grad is None for value in bert.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in bert.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in pruned.module.modules())
    assert bert.config._attn_implementation == "sdpa"
    assert apart(expected, outputs(bert, input_ids=IDS)) == 0


def test_empty_plan_is_the_identity() -> None:
    bert = small.bert()
    same = prune(bert, {}, repair="none")
    assert same.surgery is not None
    assert same.surgery.proof.identical
    assert same.surgery.blocks == ()
    assert weight_hash(same.module) == weight_hash(bert)
    assert apart(outputs(bert, input_ids=IDS), outputs(same.module, input_ids=IDS)) == 0


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (small.bert, {ATTENTION.format(0): [1]}),
        (lambda: small.decoder("Llama"), {"model.layers.0.self_attn": [1], "model.layers.1.self_attn": [0, 1, 2, 3]}),
        (lambda: small.decoder("Phi3"), {"model.layers.0.self_attn": [1]}),
        (small.t5, {"encoder.block.0.layer.0.SelfAttention": [1, 2]}),
    ],
)
def test_case_13_copies_and_pickles(make: Callable[[], Any], plan: dict[str, list[int]]) -> None:
    model = make()
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :3]} if model.config.is_encoder_decoder else {})
    pruned = prune(model, plan, repair="none").module
    expected = outputs(pruned, **inputs)
    other = copy.deepcopy(pruned)
    thawed = pickle.loads(pickle.dumps(pruned))
    assert apart(expected, outputs(other, **inputs)) == 0
    assert apart(expected, outputs(thawed, **inputs)) == 0
    with torch.no_grad():
        for value in other.parameters():
            value.add_(1.0)
    for part in other.modules():
        if cut_of(part) is not None:
            part.config.cut_attention = 1  # the copy has a config of its own
    assert apart(expected, outputs(pruned, **inputs)) == 0
    assert not hasattr(pruned.config, "cut_attention")


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ({"encoder.layer.7": [0]}, "no attention block"),
        ({"encoder": [0]}, "names 2 blocks"),
        ({ATTENTION.format(0): [4]}, "no head 4; it has the heads 0 to 3"),
        ({ATTENTION.format(0): [-1]}, "no head -1"),
        ({ATTENTION.format(0): [1, 1]}, "named twice"),
        ({ATTENTION.format(0): [1], "encoder.layer.0": [2]}, "named twice"),
        ({ATTENTION.format(0): ["1"]}, "indices"),
        ({ATTENTION.format(0): [True]}, "indices"),
        ({3: [1]}, "path of its attention module"),
        ([1, 2], "HeadPlan or a mapping"),
    ],
)
def test_plans_that_do_not_fit(plan: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        prune(small.bert(), plan, repair="none")


def test_weights_train_after_surgery() -> None:
    llama: Any = prune(small.decoder("Llama"), {"model.layers.0.self_attn": [1]}, repair="none").module
    llama.train()
    llama(input_ids=IDS, labels=IDS).loss.backward()
    assert all(value.grad is not None and bool(torch.isfinite(value.grad).all()) for value in llama.parameters())

"""Weights go to torch's layer and to three modules of transformers and come back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from headwise.errors import InputError, UnsupportedError
from headwise.nn import MultiHeadAttention, Rotary, from_torch, from_transformers, to_torch, to_transformers


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.eval()


def same_numbers(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_self_attention_there_and_back(bias, dtype):
    theirs = filled(nn.MultiheadAttention(35, 5, bias=bias, batch_first=True, dtype=dtype))
    ours, x = from_torch(theirs), torch.randn(3, 11, 35, dtype=dtype)
    padding = torch.arange(11) < torch.tensor([11, 7, 3])[:, None]
    hidden = torch.ones(11, 11, dtype=torch.bool).triu(1)
    torchs = theirs(x, x, x, key_padding_mask=~padding, attn_mask=hidden, need_weights=False)[0]
    out = ours(x, causal=True, key_padding=padding)
    truth = from_torch(theirs).double()(x.double(), causal=True, key_padding=padding)
    error, torchs_error = ((each.double() - truth).abs().max() for each in (out, torchs))
    assert error <= 2 * torchs_error + 1e-12
    same_numbers(to_torch(ours), theirs)
    same_numbers(MultiHeadAttention.from_torch(ours.to_torch()), ours)


def test_torch_output_is_the_same_bits():
    theirs = filled(nn.MultiheadAttention(64, 4, batch_first=True))
    x = torch.randn(3, 16, 64)
    with torch.enable_grad():  # torch's slow path, which is ours step by step
        truth = theirs(x, x, x, need_weights=False)[0]
    assert torch.equal(from_torch(theirs)(x), truth)


def test_torch_cross_attention_there_and_back():
    theirs = filled(nn.MultiheadAttention(35, 5, kdim=13, vdim=13, batch_first=True, dropout=0.25))
    ours = from_torch(theirs)
    x, context = torch.randn(3, 7, 35), torch.randn(3, 11, 13)
    assert_close(ours(x, context), theirs(x, context, context, need_weights=False)[0])
    back = to_torch(ours)
    same_numbers(back, theirs)
    assert back.dropout == 0.25


def test_mode_and_freezing_come_along():
    theirs = nn.MultiheadAttention(8, 2).train()
    theirs.out_proj.weight.requires_grad_(False)
    ours = from_torch(theirs)
    assert ours.training
    assert not ours.W_O.requires_grad
    assert ours.W_Q.requires_grad
    assert ours.W_O.data_ptr() != theirs.out_proj.weight.data_ptr()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"add_bias_kv": True}, "add_bias_kv=True"), ({"add_zero_attn": True}, "add_zero_attn=True"),
     ({"kdim": 3, "vdim": 5}, "kdim=3 and vdim=5")],
)  # fmt: skip
def test_what_the_layer_has_no_place_for_is_refused(options, named):
    with pytest.raises(UnsupportedError, match=named):
        from_torch(nn.MultiheadAttention(8, 2, **options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_kv_heads": 1}, "n_kv_heads=1"), ({"d_k": 3}, "d_k=3"), ({"d_v": 3}, "d_v=3"),
        ({"rotary": True}, "rotary=Rotary"),
        ({"window": 3}, "window=3"), ({"softcap": 3.0}, "softcap=3.0"), ({"qk_norm": True}, "qk_norm=True"),
        ({"sinks": True}, "sinks=Parameter"), ({"combine": "mean"}, "combine='mean'"),
        ({"softmax": "summed"}, "softmax='summed'"), ({"scale": 0.3}, "scale=0.3"),
    ],
)  # fmt: skip
def test_what_torch_has_no_place_for_is_refused(options, named):
    with pytest.raises(UnsupportedError, match=named):
        to_torch(MultiHeadAttention(8, 2, **options))


def bert(cross: bool = False, **config: Any) -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertAttention

    made = BertConfig(hidden_size=20, num_attention_heads=5, **config)
    made._attn_implementation = "eager"
    return filled(BertAttention(made, is_cross_attention=cross, layer_idx=0))


def gpt2(cross: bool = False, layer_idx: int = 0, **config: Any) -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    made = GPT2Config(n_embd=20, n_head=5, **config)
    made._attn_implementation = "eager"
    return filled(GPT2Attention(made, is_cross_attention=cross, layer_idx=layer_idx))


def llama(**config: Any) -> tuple[nn.Module, nn.Module]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8} | config
    made = LlamaConfig(**sizes)
    made._attn_implementation = "eager"
    return filled(LlamaAttention(made, layer_idx=0)), LlamaRotaryEmbedding(made)


@pytest.mark.parametrize("cross", [False, True])
def test_bert_there_and_back(cross):
    theirs, x, context = bert(cross), torch.randn(3, 11, 20), torch.randn(3, 7, 20)
    ours = from_transformers(theirs)
    given = {"encoder_hidden_states": context} if cross else {}
    truth = theirs.output.dense(theirs.self(x, **given)[0])
    assert_close(ours(x, context) if cross else ours(x), truth)
    assert ours.cross is cross
    same_numbers(to_transformers(ours, theirs), theirs)
    anew = to_transformers(ours, "bert")
    assert_close(anew.output.dense(anew.self(x, **given)[0]), truth)
    same_numbers(MultiHeadAttention.from_transformers(anew), ours)


def test_bert_in_training_has_its_own_dropout_rate():
    ours = from_transformers(bert(attention_probs_dropout_prob=0.3))
    assert ours.dropout == 0.3
    assert to_transformers(ours, "bert").self.dropout.p == 0.3


@pytest.mark.parametrize("config", [{}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_gpt2_there_and_back(config):
    theirs, x = gpt2(layer_idx=2, **config), torch.randn(3, 11, 20)
    ours = from_transformers(theirs)
    hidden = torch.full((11, 11), torch.finfo(torch.float32).min).triu(1)[None, None]
    truth = theirs(x, attention_mask=hidden)[0]
    assert_close(ours(x, causal=True), truth)
    same_numbers(to_transformers(ours, theirs), theirs)
    assert torch.equal(ours.W_K, theirs.c_attn.weight[:, 20:40])


def test_gpt2_cross_attention_and_anew():
    theirs, x, context = gpt2(cross=True), torch.randn(3, 11, 20), torch.randn(3, 7, 20)
    ours = from_transformers(theirs)
    assert_close(ours(x, context), theirs(x, encoder_hidden_states=context)[0])
    same_numbers(to_transformers(ours, "gpt2"), theirs)


ROPES = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("bias", [False, True])
def test_llama_there_and_back(rope, bias):
    theirs, angles = llama(rope_parameters=rope, attention_bias=bias, max_position_embeddings=256)
    ours, x = from_transformers(theirs), torch.randn(3, 11, 24)
    hidden = torch.full((11, 11), torch.finfo(torch.float32).min).triu(1)[None, None]
    places = torch.arange(11)[None].expand(3, 11)
    truth = theirs(x, position_embeddings=angles(x, places), attention_mask=hidden)[0]
    assert_close(ours(x, causal=True), truth)
    same_numbers(to_transformers(ours, theirs), theirs)
    far = places + 101
    truth = theirs(x, position_embeddings=angles(x, far), attention_mask=hidden)[0]
    assert_close(ours(x, causal=True, positions=far), truth)


def test_llama_rotary_is_the_same_bits():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    _, angles = llama(rope_parameters=ROPES[0])
    x, places = torch.randn(2, 3, 11, 8), torch.arange(90, 101)[None].expand(2, 11)
    cos, sin = angles(x, places)
    assert torch.equal(Rotary(8, theta=500.0)(x, places), apply_rotary_pos_emb(x, x, cos, sin)[0])


def test_llama_anew():
    ours = from_transformers(llama(rope_parameters=ROPES[0])[0])
    anew = to_transformers(ours, "llama")
    same_numbers(from_transformers(anew), ours)
    assert from_transformers(anew).rotary.theta == 500.0


def test_other_modules_and_parts_are_refused_by_name():
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Subclass(LlamaAttention):
        pass

    module = llama()[0]
    sub = Subclass(module.config, 0)
    with pytest.raises(UnsupportedError, match="Subclass is none of"):
        from_transformers(sub)
    with pytest.raises(InputError, match="Give the BertAttention"):
        from_transformers(bert().self)
    with pytest.raises(UnsupportedError, match="'dynamic' changes its frequencies"):
        from_transformers(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})[0])
    with pytest.raises(InputError, match="use from_transformers"):
        from_torch(module)


def test_a_module_that_differs_is_refused_with_both_numbers():
    ours = from_transformers(llama(rope_parameters=ROPES[0])[0])
    other = llama(rope_parameters=ROPES[0], num_key_value_heads=2)[0]
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(UnsupportedError, match="n_kv_heads 3 and 2"):
        to_transformers(ours, other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(UnsupportedError, match="rotary"):
        to_transformers(ours, llama(rope_parameters=ROPES[1])[0])
    biased = from_transformers(llama(rope_parameters=ROPES[0], attention_bias=True)[0])
    with pytest.raises(UnsupportedError, match="bias True and False"):
        to_transformers(biased, llama(rope_parameters=ROPES[0])[0])
    with pytest.raises(UnsupportedError, match="plain rotary"):
        to_transformers(MultiHeadAttention(20, 5), "llama")
    with pytest.raises(UnsupportedError, match=r"d_k=3"):
        to_transformers(MultiHeadAttention(20, 5, d_k=3), "bert")

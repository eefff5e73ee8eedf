"""A plan is told early of heads that the model's code does not run without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import InputError, UnsupportedError
from headwise.surgery import prune
from headwise.surgery.trial import tried
from tests.surgery import small


def doge() -> Any:
    """Its mask of every head is made of the values of all of them, so none can go."""
    from transformers import DogeConfig, DogeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DogeConfig(**sizes, num_key_value_heads=2, intermediate_size=29, pad_token_id=0)
    return small.noisy(DogeForCausalLM(config))


def test_it_says_what_surgery_would_say_and_changes_nothing() -> None:
    module = doge()
    model = hw.wrap(module)
    before = {name: (id(value), value.clone()) for name, value in module.named_parameters()}
    found = tried(model, {"model.layers.0.self_attn": (1,), "model.layers.1.self_attn": (1,)})
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    with pytest.raises(UnsupportedError) as refusal:
        prune(module, {"model.layers.0.self_attn": [1]}, repair="none")
    assert set(found.values()) == {str(refusal.value)}
    for name, value in module.named_parameters():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])


def test_a_plan_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(InputError, match=r"no head of the model may go: .*DogeAttention\): 1 of its 4 heads cannot"):
        hw.plan(doge(), criterion="weight-norm", keep=0.5)


def test_heads_that_can_go_and_blocks_that_are_not_reached() -> None:
    llama = hw.wrap(small.decoder("Llama"))
    assert tried(llama, {"model.layers.0.self_attn": (1,), "model.layers.1.self_attn": (0,)}) == {}
    assert tried(llama, {}) == {}
    plain = hw.wrap(small.bert(), example={"input_ids": small.IDS})
    assert tried(plain, {"encoder.layer.0.attention.self": (1,)}) == {}

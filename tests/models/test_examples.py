"""Small inputs that headwise makes for a model by itself."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

from headwise.models.examples import dummy_inputs

_GPT2 = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=31, bos_token_id=1, eos_token_id=1)
_VIT = ViTConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
)


def test_draws_do_not_depend_on_the_default_device() -> None:
    """A generator is of the CPU, so with another default device drawing would be refused."""
    for model in (GPT2LMHeadModel(_GPT2), ViTModel(_VIT)):
        expected = dummy_inputs(model)
        with torch.device("meta"):
            found = dummy_inputs(model)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert found[name].device.type == "cpu"
            assert torch.equal(found[name], value), name

"""Configs whose fields differ from layer to layer are read layer by layer."""

from __future__ import annotations

import pytest
import zoo
from torch import nn
from transformers import LlamaConfig

import headwise as hw
from headwise.errors import ModelError
from headwise.models.families import check_groups, field_of, layers_of, values_of


def uneven(**layer: int) -> LlamaConfig:
    """Three layers, of which the second says something else."""
    return LlamaConfig(
        hidden_size=24, intermediate_size=29, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, vocab_size=31, per_layer_config={1: layer},
    )  # fmt: skip


def test_transformers_refuses_what_these_read() -> None:
    config = uneven(num_key_value_heads=4)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        getattr(config, "num_key_value_heads", None)
    assert values_of(config, "num_key_value_heads") == (2, 4)
    assert field_of(config, "num_key_value_heads", kind=int) == 4
    assert len(layers_of(config)) == 3


def test_plain_configs_give_their_one_value() -> None:
    config = LlamaConfig(num_attention_heads=4)
    assert layers_of(config) == (config,)
    assert values_of(config, "num_attention_heads") == (4,)
    assert values_of(config, "no_such_field") == ()
    assert field_of(config, "no_such_field", "num_attention_heads", kind=int) == 4
    assert field_of(config, "use_cache", kind=int) is None  # True is no number
    assert field_of(config, "use_cache") is True
    assert field_of(None, "num_attention_heads") is None


def test_a_model_with_uneven_layers_is_measured_and_priced() -> None:
    """Gemma 4: full attention has wider heads than the layers with a window."""
    model = hw.wrap(zoo.build("gemma4_text"))
    assert len({block.d_k for block in model.layout.blocks.values()}) == 2
    table = hw.scan(model, inputs=[{"input_ids": [3, 5, 7, 5]}])
    assert len(table) == 8
    assert hw.cost(model, batch=1, context=64) is not None


def test_each_layer_must_divide() -> None:
    module = nn.Module()
    module.config = uneven(num_key_value_heads=3)
    with pytest.raises(ModelError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        check_groups(module)

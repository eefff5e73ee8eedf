"""The ledger of pruned models, in memory and from their folders (cases 35, 39, 42)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import headwise as hw
from headwise.surgery import prune
from tests.surgery import small

MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "albert": (small.albert, "encoder.albert_layer_groups.0.albert_layers.0"),
    "bert": (small.bert, "encoder.layer.1"),
    "gpt2": (small.gpt2, "transformer.h.1"),
    "grouped": (lambda: small.decoder("Llama"), "model.layers.1"),
    "normed": (lambda: small.decoder("Qwen3", head_dim=8), "model.layers.1"),
    "fused": (lambda: small.decoder("Phi3"), "model.layers.1"),
    "cross": (small.t5, "decoder.block.1.layer.1"),
    "whisper": (small.whisper, "model.decoder.layers.0.self_attn"),
}


@pytest.mark.parametrize("heads", [[1], [0, 3], [0, 1, 2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_the_folder_costs_what_the_model_costs(name: str, heads: list[int], tmp_path: Path) -> None:
    make, where = MODELS[name]
    whole = make()
    pruned = prune(whole, {where: heads}, repair="none")
    assert pruned.surgery is not None
    memory, folder = (hw.cost(one, context=8) for one in (pruned, pruned.save(tmp_path / "small")))
    true = sum(weight.numel() for weight in pruned.module.parameters())
    assert memory.parameters.total == folder.parameters.total == true
    assert memory.parameters.attention == folder.parameters.attention
    assert hw.cost(whole).parameters.attention - memory.parameters.attention == pruned.surgery.blocks[0].parameters
    assert memory.prefill is not None
    assert folder.prefill is not None
    assert memory.prefill.full == folder.prefill.full
    assert memory.cache.bytes == folder.cache.bytes
    left = {site.site.block: site.site.query_heads for site in folder.sites}
    assert left[pruned.surgery.blocks[0].module] == 4 - len(heads)


def test_case_35_cache_bytes_of_uneven_layers() -> None:
    """The sum over layers is what the cache of transformers holds, heads read in groups of different sizes included."""
    pruned = prune(
        small.decoder("Llama", num_hidden_layers=3),
        {"model.layers.0": [1], "model.layers.1": [2, 3], "model.layers.2": [0, 1, 2, 3]},
        repair="none",
    )
    cache = DynamicCache(config=pruned.module.config)
    with torch.no_grad():
        pruned.module(input_ids=small.IDS, cache=cache)
    held = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    assert hw.cost(pruned, batch=2, context=5).cache.bytes == held > 0


def test_case_42_gpt2_small_without_one_head(tmp_path: Path) -> None:
    """The folder says what was removed; its config alone would not."""
    config = GPT2Config(n_layer=1, vocab_size=31, n_positions=8)
    pruned = prune(GPT2LMHeadModel(config).eval(), {"transformer.h.0": [1]}, repair="none")
    whole = hw.cost(config).parameters.total or 0
    folder = pruned.save(tmp_path / "small")
    assert hw.cost(folder).parameters.total == hw.cost(folder / "config.json").parameters.total == whole - 196_800

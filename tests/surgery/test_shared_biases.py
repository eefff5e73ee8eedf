"""Biases that a model computes once, for every head, and hands to all its layers: a layer that lost heads has its own.

MPNet's table of relative positions, and the slopes of ALiBi in BLOOM, MPT and Falcon.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headwise.layout import HeadId
from headwise.models import discover, gate, load
from headwise.models.arguments import of_heads
from headwise.models.cut_modules import cut_of
from headwise.surgery import prune
from tests.surgery import small

IDS = torch.tensor([[3, 5, 7, 11, 13], [17, 19, 23, 29, 2], [2, 3, 5, 8, 13]])
PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
NO_END = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}


def mpnet() -> nn.Module:
    from transformers import MPNetConfig, MPNetModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return small.noisy(MPNetModel(MPNetConfig(**sizes, intermediate_size=23, max_position_embeddings=64)))


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    return small.noisy(BloomForCausalLM(BloomConfig(vocab_size=31, hidden_size=20, n_layer=2, n_head=4, **NO_END)))


def mpt() -> nn.Module:
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    return small.noisy(MptForCausalLM(MptConfig(vocab_size=31, d_model=20, n_layers=2, n_heads=4, **NO_END)))


def falcon(**extra: Any) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    return small.noisy(FalconForCausalLM(FalconConfig(**(sizes | NO_END | extra))))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mpnet": (mpnet, "encoder.layer.{}.attention.attn"),
    "bloom": (bloom, "transformer.h.{}.self_attention"),
    "mpt": (mpt, "transformer.blocks.{}.attn"),
    "falcon": (falcon, "transformer.h.{}.self_attention"),
    "falcon, a key and value per head": (lambda: falcon(multi_query=False), "transformer.h.{}.self_attention"),
    "falcon, groups": (
        lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
        "transformer.h.{}.self_attention",
    ),
}
PLANS = {"one": {0: [1]}, "uneven": {0: [0, 2], 1: [0, 1, 3]}, "layer": {0: [0, 1, 2, 3]}}
GROUPS = {"one": {0: [2, 3]}, "uneven": {0: [1, 2], 1: [0, 1]}, "layer": {0: [0, 1, 2, 3]}}
WRITERS = [name for name in MODELS if name != "mpnet"]


def made(name: str, plan: str) -> tuple[Any, dict[str, list[int]]]:
    make, path = MODELS[name]
    heads = (GROUPS if "groups" in name else PLANS)[plan]
    return make(), {path.format(layer): which for layer, which in heads.items()}


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", list(MODELS))
def test_removed_is_gated_also_with_padding_and_after_loading(name: str, plan: str, tmp_path: Path) -> None:
    model, heads = made(name, plan)
    cut = prune(model, heads, repair="none")
    again = load(cut.save(tmp_path / "small"))
    for given in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": PADDED}, {"input_ids": IDS.repeat(4, 1)}):
        truth = small.masked(model, heads, **given)
        assert small.apart(truth, small.outputs(cut.module, **given)) < 1e-4
        assert small.apart(small.outputs(cut.module, **given), small.outputs(again.module, **given)) == 0


@pytest.mark.parametrize("name", list(MODELS))
def test_the_patterns_that_are_left_are_the_original_ones(name: str) -> None:
    """With output_attentions the code takes its other road, which adds the slopes itself."""
    model, heads = made(name, "one")
    model.set_attn_implementation("eager")
    whole = small.outputs(model, input_ids=IDS, output_attentions=True)
    found = small.outputs(prune(model, heads, repair="none").module, input_ids=IDS, output_attentions=True)
    gone = next(iter(heads.values()))
    left = [head for head in range(4) if head not in gone]
    first = next(at for at, one in enumerate(whole) if one.shape == (3, 4, 5, 5))
    torch.testing.assert_close(found[first], whole[first][:, left], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none", "beams"])
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", WRITERS)
def test_tokens_with_every_cache_and_padding(name: str, plan: str, cache: str) -> None:
    if cache == "static" and "falcon" in name:
        pytest.skip("transformers' Falcon with ALiBi does not run with a static cache, cut or not")
    model, heads = made(name, plan)
    options = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "none": {"use_cache": False},
        "beams": {"num_beams": 3},
    }[cache]
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": PADDED, **options}
    with gate(model, [HeadId(site.key, head) for site in discover(model).sites for head in heads.get(site.block, ())]):
        truth = model.generate(IDS, **asked).tolist()
    found: Any = prune(model, heads, repair="none").module
    assert found.generate(IDS, **asked).tolist() == truth


@pytest.mark.parametrize("name", ["mpnet", "bloom", "mpt", "falcon"])
def test_a_second_cut_counts_from_the_first_model(name: str) -> None:
    model, _ = made(name, "one")
    path = MODELS[name][1].format(0)
    twice = prune(prune(model, {path: [0]}, repair="none"), {path: [1]}, repair="none")
    told = cut_of(twice.module.get_submodule(path))
    assert told is not None
    assert told.heads == (1, 3)
    assert (
        small.apart(small.masked(model, {path: [0, 2]}, input_ids=IDS), small.outputs(twice.module, input_ids=IDS))
        < 1e-4
    )


def test_a_batch_of_as_many_rows_as_heads_is_no_argument_of_heads() -> None:
    """It seems to be one; the proof leaves it out."""
    model, heads = made("bloom", "one")
    ids = torch.cat([IDS, IDS[:1]])
    module = model.transformer.h[0].self_attention
    hidden = torch.zeros(4, 5, 20)
    assert list(of_heads(module, (hidden, hidden), {"alibi": torch.zeros(16, 1, 5)}, 4)) == [
        "hidden_states",
        "residual",
        "alibi",
    ]
    cut = prune(model, heads, repair="none", example={"input_ids": ids})
    told = cut_of(cut.module.get_submodule(next(iter(heads))))
    assert told is not None
    assert told.narrow == ("alibi",)
    assert small.apart(small.masked(model, heads, input_ids=ids), small.outputs(cut.module, input_ids=ids)) < 1e-4

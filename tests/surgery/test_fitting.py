"""Code that lays its heads side by side as wide as its input: a view that is impossible gets the width that fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headwise.layout import HeadId
from headwise.models import discover, gate, load
from headwise.models.cut_modules import cut_of
from headwise.models.fitting import fit_views, fitted
from headwise.surgery import prune
from tests.surgery import small

LONG = torch.arange(2, 26).remainder(29)[None].repeat(4, 1) + torch.arange(4)[:, None]  # as many rows as heads,
IDS = LONG[:2, :5]  # and as many tokens as the model is wide


def trocr() -> nn.Module:
    from transformers import TrOCRConfig, TrOCRForCausalLM

    torch.manual_seed(0)
    config = TrOCRConfig(
        vocab_size=37, d_model=24, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=29,
        max_position_embeddings=64, eos_token_id=None, bos_token_id=1, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    return small.noisy(TrOCRForCausalLM(config))


def blip() -> nn.Module:
    from transformers import BlipVisionConfig, BlipVisionModel

    torch.manual_seed(0)
    config = BlipVisionConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=29, image_size=8, patch_size=4
    )
    return small.noisy(BlipVisionModel(config))


def pixels(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))


MODELS: dict[str, tuple[Callable[[], nn.Module], str, list[dict[str, Any]]]] = {
    "trocr": (trocr, "model.decoder.layers.{}.self_attn", [{"input_ids": IDS}, {"input_ids": LONG}]),
    "blip": (blip, "encoder.layers.{}.self_attn", [{"pixel_values": pixels(rows)} for rows in (1, 2, 3, 4)]),
}
PLANS: dict[str, dict[int, list[int]]] = {
    "one": {0: [1]},
    "uneven": {0: [0, 2], 1: [0, 1, 3]},
    "layer": {1: [0, 1, 2, 3]},
}


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", list(MODELS))
def test_removed_is_gated_whatever_the_sizes(name: str, plan: str, tmp_path: Path) -> None:
    make, path, inputs = MODELS[name]
    model = make()
    heads = {path.format(layer): which for layer, which in PLANS[plan].items()}
    found = prune(model, heads, repair="none")
    assert any(cut is not None and cut.fit for cut in map(cut_of, found.module.modules()))
    again = load(found.save(tmp_path / "small"))
    for given in inputs:
        result = small.outputs(found.module, **given)
        assert small.apart(small.masked(model, heads, **given), result) < 1e-4
        assert small.apart(result, small.outputs(again.module, **given)) == 0


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 3}])
def test_tokens_with_every_cache(options: dict[str, Any]) -> None:
    model: Any = trocr()
    heads = {f"model.decoder.layers.{layer}.self_attn": which for layer, which in PLANS["uneven"].items()}
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **options}
    with gate(model, [HeadId(site.key, head) for site in discover(model).sites for head in heads.get(site.block, ())]):
        truth = model.generate(IDS, **asked).tolist()
    found: Any = prune(model, heads, repair="none").module
    assert found.generate(IDS, **asked).tolist() == truth


def test_only_an_impossible_view_without_an_unknown_is_touched() -> None:
    assert fitted(24, (2, 4, 4)) == (2, 4, 3)
    for count, asked in ((32, (2, 4, 4)), (24, (2, -1, 4)), (24, (5, 8)), (24, (2, 3, 3)), (0, (2, 4)), (24, ())):
        assert fitted(count, asked) is None


def test_a_module_can_be_let_go() -> None:
    class Joins(nn.Module):
        def forward(self, heads: torch.Tensor) -> torch.Tensor:
            return heads.reshape(2, 8)

    module = Joins()
    fit_views(module, on=True)
    assert module(torch.zeros(2, 3, 2)).shape == (2, 6)
    fit_views(module, on=False)
    with pytest.raises(RuntimeError, match="invalid for input of size 12"):
        module(torch.zeros(2, 3, 2))

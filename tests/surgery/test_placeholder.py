"""Layers without heads whose code does not run on nothing: it runs on one head of zeros that nobody reads (case 30)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from headwise.layout import HeadId
from headwise.models import discover, gate, load
from headwise.models.cut_modules import cut_of
from headwise.models.headless import HeadlessLayer
from headwise.surgery import prune
from tests.surgery import small

ALL = [0, 1, 2, 3]
IDS = torch.tensor([[3, 5, 7, 11], [13, 17, 19, 23]])
PADDED = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
NO_END = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}


def made(name: str, kind: str, **sizes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=31, **sizes, **NO_END)
    return small.noisy(getattr(transformers, name + kind)(config))


def falcon() -> nn.Module:
    return made("Falcon", "ForCausalLM", hidden_size=24, num_hidden_layers=2, num_attention_heads=4)


def neox() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_multiple_size": 1}
    return made("GPTNeoXJapanese", "ForCausalLM", **sizes)


def openai() -> nn.Module:
    return made("OpenAIGPT", "LMHeadModel", n_embd=24, n_layer=2, n_head=4)


def xglm() -> nn.Module:
    return made("XGLM", "ForCausalLM", d_model=24, num_layers=2, attention_heads=4, ffn_dim=29)


def deberta() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29}
    return made("DebertaV2", "Model", **sizes, relative_attention=True, pos_att_type=["c2p", "p2c"])


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "falcon": (falcon, "transformer.h.{}.self_attention"),
    "gpt_neox_japanese": (neox, "gpt_neox_japanese.layers.{}.attention"),
    "openai-gpt": (openai, "transformer.h.{}.attn"),
    "xglm": (xglm, "model.layers.{}.self_attn"),
    "deberta-v2": (deberta, "encoder.layer.{}.attention.self"),
}
PLANS: dict[str, dict[int, list[int]]] = {
    "first": {0: ALL},
    "last, and one of the first": {0: [1], 1: ALL},
    "all": {0: ALL, 1: ALL},
}
WRITERS = ["falcon", "gpt_neox_japanese", "xglm"]


def cut(name: str, plan: str) -> tuple[Any, dict[str, list[int]], Any]:
    make, path = MODELS[name]
    model = make()
    heads = {path.format(layer): which for layer, which in PLANS[plan].items()}
    return model, heads, prune(model, heads, repair="none")


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", list(MODELS))
def test_removed_is_gated_and_stays_so_after_loading(name: str, plan: str, tmp_path: Path) -> None:
    model, heads, found = cut(name, plan)
    emptied = [path for path, which in heads.items() if which == ALL]
    told = [cut_of(found.module.get_submodule(path)) for path in emptied]
    assert all(one is not None and one.placeholder and not one.heads for one in told)
    again = load(found.save(tmp_path / "small"))
    for given in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": PADDED}, {"input_ids": IDS.repeat(2, 2)}):
        truth, result = small.masked(model, heads, **given), small.outputs(found.module, **given)
        assert small.apart(truth, result) < 1e-4
        assert small.apart(result, small.outputs(again.module, **given)) == 0
    assert [found.layout.blocks[path].query_heads for path in emptied] == [0] * len(emptied)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none", "beams"])
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", WRITERS)
def test_tokens_with_every_cache(name: str, plan: str, cache: str) -> None:
    model, heads, found = cut(name, plan)
    options: dict[str, Any] = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "none": {"use_cache": False},
        "beams": {"num_beams": 3},
    }[cache]
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "attention_mask": PADDED, **options}
    with gate(model, [HeadId(site.key, head) for site in discover(model).sites for head in heads.get(site.block, ())]):
        truth = model.generate(IDS, **asked).tolist()
    assert found.module.generate(IDS, **asked).tolist() == truth


@pytest.mark.parametrize("name", WRITERS)
def test_a_growing_cache_keeps_nothing_of_it(name: str) -> None:
    _, _, found = cut(name, "first")
    cache = DynamicCache(config=found.module.config)
    with torch.no_grad():
        found.module(input_ids=IDS, cache=cache)
        stepwise = found.module(input_ids=IDS[:, :1], cache=cache).logits[:, -1]
        whole = found.module(input_ids=torch.cat([IDS, IDS[:, :1]], 1)).logits[:, -1]
    assert isinstance(cache.layers[0], HeadlessLayer)
    assert cache.layers[0].keys.untyped_storage().nbytes() == 0
    assert cache.get_seq_length() == 5
    assert float((stepwise - whole).abs().max()) < 1e-4


def test_gradients_reach_what_is_left() -> None:
    _, _, found = cut("openai-gpt", "first")
    found.module(input_ids=IDS).logits.square().mean().backward()
    gradients = [value.grad for value in found.module.parameters() if value.numel()]
    assert all(gradient is not None and bool(torch.isfinite(gradient).all()) for gradient in gradients)


@pytest.mark.parametrize("name", WRITERS)
def test_two_calls_at_once_keep_their_caches_apart(name: str) -> None:
    """Another thread runs the same module, with a cache of its own, while its code runs on the placeholder."""
    _, heads, pruned = cut(name, "all")
    part = pruned.module.get_submodule(next(iter(heads)))
    assert cut_of(part).placeholder
    own, other = DynamicCache(), DynamicCache()
    entered: list[int] = []

    def run(ids: Tensor, cache: DynamicCache) -> None:
        pruned.module(input_ids=ids, cache=cache, use_cache=True)

    def meanwhile(*_: object) -> None:
        if not entered:
            entered.append(1)
            thread = Thread(target=run, args=(IDS[:, :3], other))
            thread.start()
            thread.join()

    handle = next(part.children()).register_forward_hook(meanwhile)
    run(IDS, own)
    handle.remove()
    assert entered
    for cache, length in ((own, IDS.shape[1]), (other, 3)):
        assert [tuple(layer.keys.shape[1:3]) for layer in cache.layers] == [(0, length)] * 2

"""Generation after surgery: with every cache the tokens are those of the gated original (case 35)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from headwise.layout import HeadId
from headwise.models import discover, gate
from headwise.models.headless import HeadlessLayer
from headwise.surgery import prune, verify
from tests.surgery import small

PROMPT = torch.tensor([[3, 5, 7, 11], [13, 17, 19, 23]])
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "beams": {"num_beams": 3},
}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: small.decoder("Llama"), "model.layers.{}.self_attn"),
    "window": (lambda: small.decoder("Mistral", sliding_window=3), "model.layers.{}.self_attn"),
    "phi3": (lambda: small.decoder("Phi3"), "model.layers.{}.self_attn"),
    "gpt2": (small.gpt2, "transformer.h.{}.attn"),
    "t5": (small.t5, "decoder.block.{}.layer.0.SelfAttention"),
    "t5 cross": (small.t5, "decoder.block.{}.layer.1.EncDecAttention"),
}
PLANS: dict[str, dict[int, list[int]]] = {
    "uneven": {0: [1], 1: [0, 1, 2]},
    "first empty": {0: [0, 1, 2, 3]},
    "all empty": {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]},
}


def tokens(model: Any, **options: Any) -> list[list[int]]:
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    found: list[list[int]] = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **asked).tolist()
    return found


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", list(MODELS))
def test_case_35_tokens_with_every_cache(name: str, plan: str, cache: str) -> None:
    make, path = MODELS[name]
    model = make()
    named = {path.format(layer): heads for layer, heads in PLANS[plan].items()}
    layout = discover(model)
    heads = [HeadId(site.key, head) for site in layout.sites for head in named.get(site.block, ())]
    with gate(model, heads):
        truth = tokens(model, **CACHES[cache])
    assert tokens(prune(model, named, repair="none").module, **CACHES[cache]) == truth


def test_case_35_attributes_and_cache_bytes() -> None:
    """Layers of 4 and 3 heads say so, and the cache holds no more than that."""
    gpt2: Any = prune(small.gpt2(), {"transformer.h.1.attn": [2]}, repair="none").module
    assert [layer.attn.num_heads for layer in gpt2.transformer.h] == [4, 3]
    cache = DynamicCache(config=gpt2.config)
    with torch.no_grad():
        gpt2(input_ids=PROMPT, cache=cache)
    sizes = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    assert sizes == [2 * heads * 2 * 4 * 4 for heads in (4, 3)]


def test_case_30_an_empty_layer_caches_nothing() -> None:
    llama: Any = prune(small.decoder("Llama"), {"model.layers.0.self_attn": [0, 1, 2, 3]}, repair="none").module
    cache = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(input_ids=PROMPT, cache=cache)
    first = cache.layers[0]
    assert isinstance(first, HeadlessLayer)
    assert first.keys.numel() == 0
    assert cache.get_seq_length() == 4
    with torch.no_grad():
        stepwise = llama(input_ids=PROMPT[:, :1], cache=cache).logits[:, -1]
        whole = llama(input_ids=torch.cat([PROMPT, PROMPT[:, :1]], 1)).logits[:, -1]
    assert float((stepwise - whole).abs().max()) < 1e-4


def test_left_padding_after_an_uneven_cut() -> None:
    """A prompt in a batch behaves as if alone."""
    llama: Any = prune(small.decoder("Llama"), {"model.layers.0.self_attn": [1]}, repair="none").module
    alone = llama.generate(PROMPT[:1, 1:], max_new_tokens=5, min_new_tokens=5, do_sample=False)[:, 3:]
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    both = llama.generate(PROMPT, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False)[:1, 4:]
    assert alone.tolist() == both.tolist()


EXAMPLES = {
    "llama": (lambda: small.decoder("Llama"), "model.layers.{}.self_attn", ()),
    "gpt2": (small.gpt2, "transformer.h.{}.attn", ()),
    "t5": (small.t5, "decoder.block.{}.layer.0.SelfAttention", ("decoder",)),
    "t5 cross": (small.t5, "decoder.block.{}.layer.1.EncDecAttention", ("decoder",)),
}


def with_cache(model: Any, *, decoder: bool) -> dict[str, Any]:
    """The input of a second step of generation: one token, and a cache that holds a prompt."""
    prompt = {"decoder_input_ids": PROMPT[:, :3], "input_ids": PROMPT} if decoder else {"input_ids": PROMPT}
    with torch.no_grad():
        held = model(**prompt, use_cache=True)
    cache = held.cache
    assert cache.get_seq_length() == 3 + (not decoder)
    step = {"decoder_input_ids": PROMPT[:, 3:], "input_ids": PROMPT} if decoder else {"input_ids": PROMPT[:, :1]}
    return {**step, "cache": cache, "use_cache": True}


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_example_with_a_cache(name: str, plan: str) -> None:
    """The proof runs on a step of generation; the cache that was given stays as it was."""
    make, path, decoder = EXAMPLES[name]
    model = make()
    example = with_cache(model, decoder=bool(decoder))
    before = example["cache"].get_seq_length()
    named = {path.format(layer): heads for layer, heads in PLANS[plan].items()}
    pruned = prune(model, named, repair="none", example=example)
    assert example["cache"].get_seq_length() == before
    assert pruned.surgery is not None
    largest = max(one.largest for one in pruned.surgery.proof.layers)
    assert all(one.difference <= 1e-5 * largest for one in pruned.surgery.proof.layers)
    assert verify(model, pruned, example=example).removed == {path: tuple(heads) for path, heads in named.items()}

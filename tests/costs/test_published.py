"""Well-known models, from their published numbers alone: totals, heads and caches as published."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from headwise.costs import block_parameters
from headwise.verbs import cost

_spec = importlib.util.spec_from_file_location("published_models", Path(__file__).with_name("published.py"))
assert _spec is not None
assert _spec.loader is not None
published: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(published)


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_published_totals(name: str) -> None:
    config, expected = published.PUBLISHED[name]
    book = cost(config, context=1024, dtype="bfloat16")
    assert book.parameters.total == expected
    if name in published.HEADS:
        site = book.numbers.attention[0]
        assert (site.query_heads, site.kv_heads, site.d_k, len(book.sites)) == published.HEADS[name]
    if name in published.CACHE:
        assert book.cache.token_bytes == published.CACHE[name]
    if name in published.ACTIVE:
        tables = book.parameters.embedding - book.parameters.tied
        assert book.parameters.active is not None
        in_billions = ((book.parameters.active) / 1e9, (book.parameters.active + tables) / 1e9)
        assert min(abs(value - published.ACTIVE[name]) for value in in_billions) < 0.06 * published.ACTIVE[name]
    assert all(cost.site.others >= 0 for cost in book.sites)


def test_more_than_twenty_models_of_more_than_twelve_families() -> None:
    assert len(published.PUBLISHED) >= 20
    assert len({type(config) for config, _ in published.PUBLISHED.values()}) >= 12


def test_case_42_gpt2_on_the_meta_device() -> None:
    book = cost(published.PUBLISHED["GPT-2"][0])
    assert book.parameters.total == 124_439_808
    assert book.parameters.tied == book.numbers.rest.head == 38_597_376
    assert [cost.parameters.total for cost in book.sites] == [2_362_368] * 12
    assert book.sites[0].parameters.per_head == 196_800
    assert book.parameters.total - book.sites[0].parameters.per_head == 124_243_008
    assert book.prefill is not None
    assert book.prefill.output == 2 * 2048 * 38_597_376


def test_case_42_llama_2_70b_attention_layer() -> None:
    book = cost(published.PUBLISHED["Llama-2-70B"][0])
    assert book.sites[0].parameters.total == 150_994_944


def test_windows_of_published_models() -> None:
    sites = cost(published.PUBLISHED["Gemma-2-2B"][0]).numbers.attention
    assert [site.window for site in sites[:4]] == [4096, None, 4096, None]
    assert {site.window for site in cost(published.PUBLISHED["Mistral-7B"][0]).numbers.attention} == {4096}
    gemma = [site.window for site in cost(published.PUBLISHED["Gemma-3-1B"][0]).numbers.attention]
    assert gemma[:6] == [512] * 5 + [None]
    assert [site.window for site in cost(published.PUBLISHED["gpt-oss-20B"][0]).numbers.attention[:2]] == [128, None]


def test_deepseek_v3_is_latent() -> None:
    site = cost(published.PUBLISHED["DeepSeek-V3"][0]).numbers.attention[0]
    assert site.latent is not None
    assert (site.latent.kv_rank, site.latent.rope, site.latent.q_rank, site.d_k, site.d_v) == (512, 64, 1536, 192, 128)
    assert block_parameters(site).total == 187_107_328


def test_whisper_has_1500_positions_on_the_encoders_side() -> None:
    book = cost(published.PUBLISHED["Whisper tiny"][0], context=100)
    assert book.source == 1500
    assert {(cost.site.stack, cost.site.kind) for cost in book.sites} == {
        ("encoder", "self"),
        ("decoder", "self"),
        ("decoder", "cross"),
    }
    assert book.cache.bytes == 4 * 2 * 384 * 4 * (100 + 1500)


def test_flan_t5_has_an_output_matrix_of_its_own(tmp_path: Path) -> None:
    """transformers' T5Config ties it whatever config.json says; the released checkpoint has 76,961,152."""
    fields = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 32128}
    fields |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "model_type": "t5"}
    fields |= {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert cost(tmp_path).parameters.total == 76_961_152

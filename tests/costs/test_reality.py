"""The ledger against models that run: parameters, operations, caches, and the time of a decode step."""

from __future__ import annotations

import importlib.util
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AlbertConfig,
    AlbertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from headwise.costs import ledger
from headwise.errors import UnsupportedError
from headwise.models import Model, discover
from headwise.verbs import cost, sweep
from headwise.verbs.bandwidth import measure_bandwidth
from headwise.verbs.cost import numbers
from headwise.verbs.cost_model import numbers_of

_spec = importlib.util.spec_from_file_location("zoo", Path(__file__).parents[1] / "models" / "zoo.py")
assert _spec is not None
assert _spec.loader is not None
zoo: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

BATCH, LENGTH, SOURCE = 2, 11, 7

DECODERS = (
    "bloom",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "mpt",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "stablelm",
)
TWO_SIDED = ("bart", "m2m_100", "marian", "mbart", "pegasus", "t5", "t5gemma", "umt5")
ENCODERS = ("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta")
#: Kinds of attention that torch's counter sees only in part (states, or convolutions beside attention).
NOT_MATRIX_PRODUCTS = ("kimi_linear", "lfm2", "qwen3_next", "llama4_text")


def built(name: str, **more: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = zoo.build(name, **more)
    assert isinstance(model, nn.Module)
    return model


def ids(length: int) -> Tensor:
    return torch.randint(10, 90, (BATCH, length), generator=torch.Generator().manual_seed(0))


def inputs_for(model: nn.Module) -> dict[str, Tensor]:
    if getattr(model.config, "is_encoder_decoder", False):
        return {"input_ids": ids(SOURCE), "decoder_input_ids": ids(LENGTH)}
    return {"input_ids": ids(LENGTH)}


def run(model: nn.Module, **more: Any) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(**inputs_for(model), **more)


def book_of(model: nn.Module) -> Any:
    read = numbers_of(model)
    source = SOURCE if any(site.kind == "cross" for site in read.attention) else None
    return ledger(read, batch=BATCH, context=LENGTH, source=source, dtype="float32")


# Parameters


@pytest.mark.parametrize("name", [*DECODERS, *TWO_SIDED, *ENCODERS])
def test_total_is_numel_and_attention_is_its_modules(name: str) -> None:
    model = built(name)
    book = book_of(model)
    assert book.parameters.total == sum(weight.numel() for weight in model.parameters())
    named = dict(model.named_modules())
    for cost_of in book.sites:
        module = named[cost_of.site.block]
        inside = sum(weight.numel() for weight in module.parameters())
        outer = sum(
            weight.numel()
            for child, part in module.named_children()
            if child in ("LayerNorm", "layer_norm")
            for weight in part.parameters()
        )
        missing = cost_of.parameters.total - (inside - outer)
        # BERT keeps W_O in a module of its own.
        assert missing in (0, cost_of.parameters.o + cost_of.site.written), (cost_of.site.name, missing)


# Operations


def counted(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        run(model)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [*sorted(set(DECODERS) - set(NOT_MATRIX_PRODUCTS)), *TWO_SIDED, *ENCODERS])
def test_operations_equal_torchs_counter_with_eager_attention(name: str) -> None:
    model = built(name, attention="eager")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # the fused one is not counted
    book = book_of(model)
    assert counted(model) == book.prefill.full


def test_case_41_torchs_counter_sees_no_attention_on_the_cpu() -> None:
    """The same model with sdpa: the counter misses exactly our scores and mixing."""
    model = built("llama", attention="sdpa")
    book = book_of(model)
    attention = book.prefill.attention.scores + book.prefill.attention.mixing
    assert attention > 0
    assert counted(model) == book.prefill.full - attention


@pytest.mark.parametrize("shape", [(12, 12, 64, 64), (8, 2, 16, 64)])
def test_case_41_sdpa_alone_counts_zero(shape: tuple[int, int, int, int]) -> None:
    heads, groups, length, width = shape
    q, k = torch.zeros(1, heads, length, width), torch.zeros(1, groups, length, width)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=heads != groups)
    assert counter.get_total_flops() == 0


# Caches


def held(cache: Any) -> int:
    if hasattr(cache, "self_attention_cache"):
        return held(cache.self_attention_cache) + held(cache.cross_attention_cache)
    tensors = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def cache_of(output: Any) -> Any:
    return output.cache if getattr(output, "cache", None) is not None else output.past_key_values


@pytest.mark.parametrize("name", [*DECODERS, *TWO_SIDED])
def test_case_39_bytes_equal_the_real_cache(name: str) -> None:
    model = built(name)
    book = book_of(model)
    assert held(cache_of(run(model, use_cache=True))) == book.cache.transformers_bytes
    assert book.cache.bytes >= book.cache.transformers_bytes > 0


def test_what_a_window_keeps_is_said() -> None:
    """Mistral with a window of 5: ours is 5 keys, transformers' cache holds 4."""
    book = book_of(built("mistral"))
    assert book.cache.bytes * 4 == book.cache.transformers_bytes * 5
    assert any("W - 1" in note for note in book.notes)


@pytest.mark.slow
def test_every_model_type_that_keeps_a_cache() -> None:
    """All types of transformers that can be built small and run on ids alone."""
    same, different = [], []
    for name in sorted(set(CONFIG_MAPPING) - set(ODD)):
        try:
            model = built(name)
            book = book_of(model)
            output = run(model, use_cache=True)
            real = held(cache_of(output))
        except Exception:  # noqa: BLE001  (types that do not build or run are not this test's subject)
            continue
        if book.numbers.decodes:
            (same if real == book.cache.transformers_bytes else different).append(
                (name, real, book.cache.transformers_bytes)
            )
    assert different == []
    assert len(same) > 120


#: Types whose cache is of something else than the tokens given: one without its encoder, one that calls its layers
#: several times a token (see :func:`test_repeated_calls_come_from_the_layout`), two that cache what the image became.
ODD = ("trocr", "hrm_text", "git", "unlimited_ocr")


# Layouts


@pytest.mark.parametrize(
    "name", ["albert", "bart", "bert", "cohere2", "gemma2", "gpt2", "llama", "modernbert", "qwen3", "t5"]
)
def test_reading_shapes_agrees_with_the_forward_pass(name: str) -> None:
    """Order, stack, kind, mask, window and heads of every attention layer."""
    model = built(name)
    read = [
        (
            site.block,
            site.stack,
            site.kind,
            site.causal,
            site.window,
            site.query_heads,
            site.kv_heads,
            site.d_k,
            site.d_v,
        )
        for site in numbers_of(model).attention
    ]
    layout = discover(model)
    seen = []
    for site in layout.sites:
        block = layout.blocks[site.block]
        heads = (block.query_heads, block.kv_heads, block.d_k, block.d_v)
        seen.append((site.block, site.key.stack, site.key.kind, site.causal, site.window, *heads))
    assert sorted(read, key=str) == sorted(seen, key=str)


def test_repeated_calls_come_from_the_layout() -> None:
    config = AlbertConfig(
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=19,
        vocab_size=23,
    )
    book = cost(AlbertModel(config), context=5)
    assert len(book.sites) == 3
    assert book.sites[0].parameters.per_head == 268
    assert book.parameters.attention == book.sites[0].parameters.total


def test_a_model_outside_the_seam_is_read_from_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_model: Model) -> None:
        raise UnsupportedError("BloomModel computes its attention elsewhere; looked for much")

    monkeypatch.setattr(Model, "layout", property(refuse))
    book = cost(built("bloom"), context=5)
    assert len(book.sites) == 2
    assert (
        "heads are read from the shapes of the weights alone: BloomModel computes its attention elsewhere" in book.notes
    )


def pruned_gpt2() -> GPT2LMHeadModel:
    """Layer 1 has three of its four heads left; everything else is as it was."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=31, n_positions=23)).eval()
    attention: Any = model.transformer.h[1].attn
    keep = torch.tensor([row for row in range(16) if not 4 <= row < 8])
    columns = torch.cat([keep, keep + 16, keep + 32])
    attention.c_attn.weight = nn.Parameter(attention.c_attn.weight[:, columns].detach())
    attention.c_attn.bias = nn.Parameter(attention.c_attn.bias[columns].detach())
    attention.c_attn.nf = 36
    attention.c_proj.weight = nn.Parameter(attention.c_proj.weight[keep].detach())
    attention.num_heads, attention.split_size = 3, 12
    return model


def test_uneven_layers_of_a_pruned_model() -> None:
    whole = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=31, n_positions=23))
    model = pruned_gpt2()
    with torch.no_grad():
        model(ids(5) % 31)
    before, after = numbers_of(whole), numbers_of(model)
    assert [site.query_heads for site in after.attention] == [4, 3]
    book, old = ledger(after, context=5, dtype="float32"), ledger(before, context=5, dtype="float32")
    assert old.parameters.total is not None
    assert book.parameters.total == old.parameters.total - old.sites[1].parameters.per_head
    assert book.cache.bytes == 5 * 2 * 4 * (4 + 3) * 4
    assert 4 * book.sites[1].prefill.scores == 3 * book.sites[0].prefill.scores  # type: ignore[union-attr]


def test_gates_save_nothing() -> None:
    """Case 41: three of twelve heads switched off cost what they cost before."""
    from headwise.models import gate

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=12, n_embd=24, vocab_size=31, n_positions=23)).eval()
    before = cost(model, context=5)
    with gate(model, {"transformer.h.0.attn": [0, 1, 2]}):
        model(ids(5) % 31)
        assert numbers(model).attention == before.numbers.attention


def test_whisper_encoder_and_decoder_lengths() -> None:
    config = WhisperConfig(
        vocab_size=53,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=19,
        decoder_ffn_dim=19,
        num_mel_bins=5,
        max_source_positions=29,
        max_target_positions=17,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    model = WhisperForConditionalGeneration(config).eval()
    book = ledger(numbers_of(model), batch=BATCH, context=LENGTH, dtype="float32")
    assert book.source == 29
    features = torch.zeros(BATCH, 5, 58)
    with torch.no_grad():
        output = model(input_features=features, decoder_input_ids=ids(LENGTH) % 53, use_cache=True)
    assert held(cache_of(output)) == book.cache.bytes


# Scale


def test_scale_of_the_input_is_measured_in_a_live_model() -> None:
    """Behind a norm whose weights are 3 the input's rms is 3, and scores spread nine times as far as behind 1."""
    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=19, num_hidden_layers=2, num_attention_heads=4, head_dim=8
    )
    model = LlamaForCausalLM(config).eval()
    before = model.state_dict()
    spreads = []
    for scale in (1.0, 3.0):
        for layer in model.model.layers:
            nn.init.constant_(layer.input_layernorm.weight, scale)
        table = sweep(model, "heads", context=7)
        spreads.append(table.column("logit_std")[0])
        assert spreads[-1] == pytest.approx(scale**2 * 32 * 0.02**2, rel=0.02)
    assert list(model.state_dict()) == list(before)
    assert not any(module._forward_pre_hooks for module in model.modules())


# Time


def decode_seconds(model: nn.Module, cached: int, repeats: int) -> float:
    """The fastest decode step of one token over ``cached`` tokens."""
    best = float("inf")
    with torch.no_grad():
        for _ in range(repeats):
            cache = cache_of(model(torch.zeros(1, cached, dtype=torch.int64), use_cache=True))
            start = time.perf_counter()
            model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)
            best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*past_key_values.*")
def test_a_decode_step_takes_no_less_than_the_bandwidth_bound() -> None:
    """A model of some 200 MB, too large for caches: the fastest step measured is not below the bound."""
    config = LlamaConfig(
        vocab_size=2003,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    bound = ledger(numbers_of(model), context=65, bandwidth=measure_bandwidth(seconds=1.0)).traffic
    assert bound is not None
    assert bound.seconds is not None
    measured = decode_seconds(model, 64, 7)
    assert measured > 0.8 * bound.seconds, (measured, bound.seconds)  # the bandwidth is measured, too

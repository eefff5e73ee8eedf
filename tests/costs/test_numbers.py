"""Parameters, operations and cache bytes from plain numbers, with exact values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from headwise.costs import (
    AttentionNumbers,
    Latent,
    ModelNumbers,
    attention_work,
    block_parameters,
    bytes_of,
    dtype_name,
    grid,
    ledger,
    site_cache,
    token_elements,
    visible_pairs,
)
from headwise.errors import InputError

# Cache (case 39)

CACHES = {
    "Llama-3-8B": (grid(4096, 32, 32, kv_heads=8), 131_072),
    "Llama-3-8B with query heads": (grid(4096, 32, 32), 524_288),
    "Qwen3-4B": (grid(2560, 32, 36, kv_heads=8, head_dim=128), 147_456),
    "Qwen3-4B with a derived width": (grid(2560, 32, 36, kv_heads=8), 92_160),
    "Mistral-Small-24B": (grid(5120, 32, 40, kv_heads=8, head_dim=128), 163_840),
    "Mistral-Small-24B with a derived width": (grid(5120, 32, 40, kv_heads=8), 204_800),
    "santacoder": (grid(2048, 16, 24, kv_heads=1), 12_288),
}


@pytest.mark.parametrize("name", CACHES)
def test_case_39_cache_bytes_per_token(name: str) -> None:
    numbers, expected = CACHES[name]
    book = ledger(numbers, context=1000, batch=3, dtype="float16")
    assert book.cache.token_bytes == expected
    assert book.cache.bytes == 3 * 1000 * expected
    assert book.cache.dtype == "float16"
    assert ledger(numbers, context=7, dtype="float16", cache_dtype="float8").cache.token_bytes == expected // 2


def deepseek_v3(layers: int = 61) -> ModelNumbers:
    site = AttentionNumbers(7168, 128, 128, 192, 128, latent=Latent(kv_rank=512, rope=64, q_rank=1536))
    return ModelNumbers("DeepSeek-V3", tuple(replace(site, block=str(at)) for at in range(layers)))


def test_case_39_latent_with_its_rotary_part() -> None:
    book = ledger(deepseek_v3(), dtype="bfloat16")
    assert book.cache.token_bytes == 70_272
    assert book.cache.token_bytes != 2 * 61 * 512 * 2
    assert any("latent" in note for note in book.notes)


def test_windows_count_per_layer() -> None:
    """A window of W keeps W keys; transformers' DynamicCache keeps W - 1, which is said."""
    full = grid(64, 4, 1).attention[0]
    sites = (replace(full, window=5, block="a"), replace(full, block="b"))
    book = ledger(ModelNumbers("m", sites), context=11, batch=2, dtype="float32")
    token = 2 * 64 * 4
    assert book.cache.bytes == 2 * token * (5 + 11)
    assert book.cache.transformers_bytes == 2 * token * (4 + 11)
    assert "transformers' DynamicCache keeps W - 1 keys of a window of W; ours is the window itself" in book.notes
    short = ledger(ModelNumbers("m", sites), context=3, dtype="float32")
    assert short.cache.bytes == short.cache.transformers_bytes == token * 6
    assert not any("DynamicCache" in note for note in short.notes)


def test_layers_without_a_cache_of_their_own() -> None:
    full = grid(64, 4, 1).attention[0]
    assert token_elements(replace(full, shares_cache=True)) == 0
    assert token_elements(replace(full, cached=False)) == 0
    assert site_cache(replace(full, kind="cross"), 1, 7, 13, 2).bytes == 13 * 2 * 64 * 2
    encoder = ledger(grid(64, 4, 2, causal=False), context=9)
    assert (encoder.cache.bytes, encoder.decode, encoder.traffic) == (0, None, None)


# Operations (case 41)


def test_case_41_scores_and_mixing() -> None:
    work = attention_work(grid(768, 12, 1).attention[0], 1, 64, 64)
    assert work.scores + work.mixing == 12_582_912
    assert work.visible_scores + work.visible_mixing == 6_389_760


def test_case_41_grouped_heads_count_query_heads() -> None:
    work = attention_work(grid(512, 8, 1, kv_heads=2).attention[0], 1, 16, 16)
    assert work.scores + work.mixing == 524_288


def test_case_41_length_doubled_is_four_times() -> None:
    site = grid(512, 8, 1).attention[0]
    once, twice = attention_work(site, 1, 16, 16), attention_work(site, 1, 32, 32)
    assert (twice.scores, twice.mixing) == (4 * once.scores, 4 * once.mixing)


def test_case_41_removed_heads_save() -> None:
    """Nine of twelve heads: 9/12 of the attention term; nothing here knows of heads that are only switched off."""
    whole = attention_work(grid(768, 12, 1).attention[0], 1, 64, 64)
    cut = attention_work(grid(768, 9, 1, head_dim=64).attention[0], 1, 64, 64)
    assert 12 * (cut.scores + cut.mixing) == 9 * (whole.scores + whole.mixing)


@pytest.mark.parametrize("causal", [True, False])
def test_visible_pairs_equal_a_count(causal: bool) -> None:
    for queries, keys, window, chunk in itertools.product(
        (1, 2, 5, 7), (1, 2, 5, 7), (None, 1, 2, 3, 11), (None, 1, 3)
    ):
        count = 0
        for query in range(queries):
            at = keys - queries + query
            for key in range(keys):
                count += (
                    (not causal or key <= at)
                    and (window is None or abs(at - key) < window)
                    and (chunk is None or at // chunk == key // chunk)
                )
        assert visible_pairs(queries, keys, causal=causal, window=window, chunk=chunk) == count, (
            queries,
            keys,
            window,
            chunk,
        )


def test_pieces_of_a_prompt_add_up() -> None:
    """Reading 13 tokens at once or as 5 and 8 visits the same pairs."""
    for window, chunk in ((None, None), (4, None), (None, 3)):
        whole = visible_pairs(13, 13, window=window, chunk=chunk)
        assert whole == visible_pairs(5, 5, window=window, chunk=chunk) + visible_pairs(
            8, 13, window=window, chunk=chunk
        )


def test_prefill_and_decode_of_a_whole_model() -> None:
    numbers = grid(64, 4, 2, kv_heads=2, d_ff=100, vocab=31)
    book = ledger(numbers, batch=3, context=11)
    assert book.prefill is not None
    assert book.decode is not None
    matrices = 2 * (64 * 64 * 2 + 2 * 64 * 32)
    assert book.prefill.attention.projections == 2 * 3 * 11 * matrices
    assert book.prefill.rest == 2 * 3 * 11 * 2 * 3 * 64 * 100
    assert book.prefill.output == 2 * 3 * 11 * 64 * 31
    assert book.decode.attention.projections == 2 * 3 * matrices
    assert book.decode.attention.scores == 2 * 3 * 2 * 4 * 11 * 16
    assert book.decode.full == book.decode.visible == book.decode.attention.full + book.decode.rest + book.decode.output
    assert book.prefill.attention.exponentials == 3 * 2 * 4 * 66


def test_a_decode_step_with_a_window_sees_the_window() -> None:
    book = ledger(grid(64, 4, 1, window=5), context=11)
    assert book.decode is not None
    assert book.decode.attention.scores == book.decode.attention.visible_scores == 2 * 4 * 5 * 16


def test_latent_decoding_expands_or_absorbs() -> None:
    book = ledger(deepseek_v3(1), context=100)
    assert book.decode is not None
    up = 512 * 128 * (128 + 128)
    assert book.decode.attention.expansion == 2 * 99 * up
    fixed = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + up + 128 * 128 * 7168
    assert book.decode.absorbed == 2 * (fixed + 100 * 128 * (2 * 512 + 64))
    assert book.decode.absorbed < book.decode.attention.full


def test_case_9_score_tensor() -> None:
    assert ledger(grid(128, 8, 3), context=2048, dtype="float32").scores.largest == 134_217_728
    assert ledger(grid(128, 8, 3), context=2048, dtype="float32").scores.all == 3 * 134_217_728


def test_traffic_of_a_decode_step() -> None:
    numbers = grid(64, 4, 2, kv_heads=2, d_ff=100, vocab=31, tied=True)
    book = ledger(numbers, batch=3, context=11, dtype="float16", bandwidth=1e6)
    assert book.traffic is not None
    assert book.traffic.weight_bytes == 2 * (2 * (64 * 64 * 2 + 2 * 64 * 32) + 2 * 3 * 64 * 100 + 64 * 31)
    token = 2 * 2 * 2 * 16 * 2
    assert book.traffic.cache_read_bytes == 3 * 10 * token
    assert book.traffic.cache_write_bytes == 3 * token
    assert book.traffic.seconds == pytest.approx(book.traffic.bytes / 1e6)
    assert book.decode is not None
    assert book.traffic.intensity == pytest.approx(book.decode.full / book.traffic.bytes)
    assert ledger(numbers).traffic.seconds is None  # type: ignore[union-attr]


def test_a_shared_cache_is_read_but_not_kept() -> None:
    site = grid(64, 4, 1).attention[0]
    giver, taker = replace(site, block="a"), replace(site, block="b", shares_cache=True)
    alone, both = (ledger(ModelNumbers("m", sites), context=9, dtype="float16") for sites in ((giver,), (giver, taker)))
    assert both.cache.bytes == alone.cache.bytes
    assert both.traffic is not None
    assert alone.traffic is not None
    assert both.traffic.cache_read_bytes == 2 * alone.traffic.cache_read_bytes
    assert both.traffic.cache_write_bytes == alone.traffic.cache_write_bytes


# Parameters (case 42)


def test_case_42_gpt2_attention_and_one_head() -> None:
    block = block_parameters(grid(768, 12, 12, bias=True).attention[0])
    assert (block.total, block.per_head, block.per_group) == (2_362_368, 196_800, 196_800)


def test_case_42_removing_a_head_takes_what_was_said() -> None:
    site = grid(768, 12, 1, bias=True).attention[0]
    cut = replace(site, query_heads=11, kv_heads=11)
    assert block_parameters(site).total - block_parameters(cut).total == block_parameters(site).per_head


@pytest.mark.parametrize("qk_norm", [None, "head", "layer"])
def test_removing_a_group_takes_what_was_said(qk_norm: str | None) -> None:
    site = AttentionNumbers(96, 6, 2, 13, 11, biases=(True, False, True, True), qk_norm=qk_norm)
    cut = replace(site, query_heads=3, kv_heads=1)
    assert block_parameters(site).total - block_parameters(cut).total == block_parameters(site).per_group


def test_case_42_llama_2_70b() -> None:
    assert block_parameters(grid(8192, 64, 80, kv_heads=8).attention[0]).total == 150_994_944


def test_case_42_key_norm_has_the_width_of_the_keys() -> None:
    plain = AttentionNumbers(5120, 40, 8, 128, 128)
    normed = replace(plain, qk_norm="layer")
    assert block_parameters(normed).norms == 40 * 128 + 1024
    assert block_parameters(replace(plain, qk_norm="head")).norms == 2 * 128


def test_case_31_shared_blocks_count_once() -> None:
    """ALBERT: three layers, one block; one head is 268 parameters, not 804."""
    site = replace(grid(16, 4, 1, bias=True, causal=False).attention[0], block="shared")
    numbers = ModelNumbers("albert", tuple(replace(site, layer=at) for at in range(3)))
    book = ledger(numbers)
    assert block_parameters(site).per_head == 268
    assert book.parameters.attention == block_parameters(site).total
    assert "3 attention layers share 1 block of weights, counted once" in book.notes
    assert book.prefill is not None
    assert book.prefill.attention.projections == 3 * ledger(grid(16, 4, 1, causal=False)).prefill.attention.projections  # type: ignore[union-attr]


def test_case_30_a_layer_without_heads_costs_nothing() -> None:
    empty = AttentionNumbers(16, 0, 0, 4, 4, biases=(False, False, False, True))
    book = ledger(ModelNumbers("m", (empty,)), context=7)
    assert (book.parameters.attention, book.cache.bytes, book.scores.largest) == (16, 0, 0)


def test_uneven_layers_add_up() -> None:
    first, second = grid(64, 4, 1).attention[0], replace(grid(64, 3, 1, head_dim=16).attention[0], block="b")
    book = ledger(ModelNumbers("m", (first, second)), context=5, dtype="float32")
    assert book.cache.bytes == 5 * 2 * 16 * (4 + 3) * 4
    assert book.parameters.attention == 4 * 64 * 64 + 4 * 64 * 48


def test_totals_of_a_grid() -> None:
    numbers = grid(4096, 32, 32, kv_heads=8, d_ff=14336, vocab=128256)
    book = ledger(numbers)
    norms = 65 * 4096
    assert book.parameters.total == 8_030_261_248 - norms
    tied = ledger(grid(4096, 32, 32, kv_heads=8, d_ff=14336, vocab=128256, tied=True)).parameters
    assert book.parameters.total - (tied.total or 0) == 4096 * 128256
    assert tied.active == book.parameters.active
    assert tied.embedding == tied.tied == 4096 * 128256


# Bad input

REFUSED = {
    "heads 12 is not a multiple of kv_heads 5": lambda: grid(768, 12, 1, kv_heads=5),
    "heads 4 is not a multiple of kv_heads 8": lambda: grid(64, 4, 1, kv_heads=8),
    "d_model 100 is not a multiple of heads 12": lambda: grid(100, 12, 1),
    "d_model must be at least 1, got -4": lambda: grid(-4, 2, 1),
    "layers must be at least 1, got 0": lambda: grid(64, 4, 0),
    "heads must be an integer, got 4.0": lambda: grid(64, 4.0, 1),  # type: ignore[arg-type]
    "head_dim must be at least 1, got 0": lambda: grid(64, 4, 1, head_dim=0),
    "window must be at least 1, got 0": lambda: grid(64, 4, 1, window=0),
    "vocab must be at least 1, got -1": lambda: grid(64, 4, 1, vocab=-1),
    "batch must be a positive integer, got 0": lambda: ledger(grid(64, 4, 1), batch=0),
    "context must be a positive integer, got -3": lambda: ledger(grid(64, 4, 1), context=-3),
    "source must be a positive integer, got 0": lambda: ledger(grid(64, 4, 1), source=0),
    "bandwidth must be a positive number of bytes per second, got -1.0": lambda: ledger(grid(64, 4, 1), bandwidth=-1.0),
    "phase must be 'prefill', 'decode' or 'both', got 'train'": lambda: ledger(grid(64, 4, 1), phase="train"),  # type: ignore[arg-type]
    "has no causal decoder, so there is no decode step": lambda: ledger(grid(64, 4, 1, causal=False), phase="decode"),
    "dtype 'bloat16' is not known; did you mean 'bfloat16'?": lambda: bytes_of("bloat16"),
    "dtype 'x' is not known; known are float64": lambda: dtype_name("x"),
    "no attention layer": lambda: ModelNumbers("m", ()),
    "qk_norm must be None, 'head' or 'layer'": lambda: AttentionNumbers(8, 1, 1, 8, 8, qk_norm="rms"),
    "must both be 0 or both be positive, got 0 and 2": lambda: AttentionNumbers(8, 0, 2, 8, 8),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words: str) -> None:
    with pytest.raises(InputError) as caught:
        REFUSED[words]()
    assert words in str(caught.value)


def test_phases_leave_out_what_was_not_asked_for() -> None:
    numbers = grid(64, 4, 1)
    assert ledger(numbers, phase="prefill").decode is None
    assert ledger(numbers, phase="decode").prefill is None
    assert bytes_of("torch.bfloat16") == 2
    assert bytes_of("int4") == 0.5

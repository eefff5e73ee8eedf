"""What changes along a sweep, and what must not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from headwise.costs import Latent, ModelNumbers, grid, ledger, logit_spread, sweep
from headwise.errors import InputError

GPT2 = grid(768, 12, 12, bias=True)
LLAMA = grid(4096, 32, 32, kv_heads=8, d_ff=14336, vocab=128256)


def test_heads_from_one_to_an_eighth_of_d_model() -> None:
    table = sweep(GPT2, "heads", context=1024)
    heads = table.column("heads")
    assert heads == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
    assert table.own == heads.index(12)
    assert [h * d for h, d in zip(heads, table.column("d_k"), strict=True)] == [768] * len(heads)
    for constant in ("projections", "scores_and_mixing", "cache_bytes", "parameters"):
        assert len(set(table.column(constant))) == 1, constant
    for growing in ("exponentials", "score_bytes"):
        values = table.column(growing)
        assert [value / values[0] for value in values] == heads
    assert table.column("rank_bound") == [min(768 // h, 1024) for h in heads]
    assert [h for h, usual in zip(heads, table.column("usual"), strict=True) if usual] == [6, 8, 12]
    assert table.rows[table.own][3] == ledger(GPT2).parameters.attention


def test_rank_is_bounded_by_the_context_too() -> None:
    assert sweep(GPT2, "heads", context=100).column("rank_bound")[:3] == [100, 100, 100]


def test_spread_of_scores_along_heads() -> None:
    table = sweep(GPT2, "heads", input_rms=2.0, init_std=0.02)
    scaled, unscaled = table.column("logit_std"), table.column("unscaled_logit_std")
    assert scaled == pytest.approx([4 * 768 * 0.0004] * len(scaled))
    assert unscaled == pytest.approx([s * math.sqrt(d) for s, d in zip(scaled, table.column("d_k"), strict=True)])
    own = sweep(replace(GPT2, input_rms=2.0, init_std=0.02), "heads")
    assert own.column("logit_std") == scaled


@pytest.mark.parametrize("scaled", [True, False])
def test_spread_of_scores_is_what_a_draw_gives(scaled: bool) -> None:
    rng = np.random.default_rng(11)
    d_model, d_k, rms, std, draws = 97, 31, 1.7, 0.05, 400
    x, y = (rng.normal(0, rms, (draws, d_model)) for _ in range(2))
    scores = []
    for _ in range(40):
        w_q, w_k = (rng.normal(0, std, (d_model, d_k)) for _ in range(2))
        scores.append(((x @ w_q) * (y @ w_k)).sum(-1) * (d_k**-0.5 if scaled else 1.0))
    expected = logit_spread(d_model, d_k, input_rms=rms, init_std=std, scaled=scaled)
    assert np.std(scores) == pytest.approx(expected, rel=0.03)


def test_grouped_heads_keep_the_width_of_the_keys() -> None:
    table = sweep(LLAMA, "heads", context=64)
    assert len(set(table.column("parameters"))) == 1
    assert len(set(table.column("cache_bytes"))) == 1
    assert table.column("heads")[table.own or 0] == 32
    assert table.column("heads")[0] == 4  # one key-value head of width 1,024


def test_kv_heads() -> None:
    table = sweep(LLAMA, "kv-heads", context=8192, dtype="float16", bandwidth=1e11)
    groups = table.column("kv_heads")
    assert groups == [1, 2, 4, 8, 16, 32]
    assert groups[table.own or 0] == 8
    assert table.column("cache_bytes_per_token") == [g * 16_384 for g in groups]
    assert len(set(table.column("scores_and_mixing"))) == 1
    intensity = table.column("attention_intensity")
    assert [i * g for i, g in zip(intensity, groups, strict=True)] == pytest.approx([intensity[0]] * 6)
    assert table.column("decode_seconds") == pytest.approx([b / 1e11 for b in table.column("decode_bytes")])
    grown = [after - before for before, after in itertools.pairwise(table.column("parameters"))]
    assert grown == [32 * 2 * 4096 * 128 * (b - a) for a, b in itertools.pairwise(groups)]


def test_context() -> None:
    table = sweep(LLAMA, "context", context=1_000, dtype="float16")
    assert table.column("context") == [128, 256, 512, 1000]
    assert table.own == 3
    work = table.column("scores_and_mixing")
    assert work[1] == 4 * work[0]
    assert table.column("projections")[1] == 2 * table.column("projections")[0]
    assert table.column("share") == sorted(table.column("share"))
    assert len(set(table.column("decode_weight_bytes"))) == 1
    assert table.column("decode_seconds") == [None] * 4


def test_context_where_the_cache_outgrows_the_weights() -> None:
    """At a batch of 16 the cache of Llama-3-8B passes its 15 GB of weights between 7,000 and 8,000 tokens."""
    table = sweep(LLAMA, "context", contexts=[8_000, 7_000], batch=16, dtype="float16")
    assert table.column("context") == [7_000, 8_000]
    assert "from a context of 8,000 on, a decode step reads more cache than weights" in table.notes


def test_encoders_have_no_decode_columns() -> None:
    table = sweep(grid(64, 4, 2, causal=False), "kv-heads", context=7)
    assert set(table.column("decode_bytes")) == {None}


def test_document_and_frame() -> None:
    table = sweep(GPT2, "heads")
    document = table.to_document()
    assert [column["name"] for column in document["columns"]][:2] == ["heads", "d_k"]
    assert document["rows"][0][:2] == [1, 768]
    assert table.to_pandas()["d_k"].tolist() == table.column("d_k")


def uneven() -> ModelNumbers:
    first, second = GPT2.attention[:2]
    return ModelNumbers("m", (first, replace(second, query_heads=9, kv_heads=9)))


def latent() -> ModelNumbers:
    return ModelNumbers("m", (replace(GPT2.attention[0], latent=Latent(64, 32)),))


REFUSED = {
    "there is no sweep over 'head'; did you mean 'heads'?": lambda: sweep(GPT2, "head"),
    "there is no sweep over 'xyz'; known are heads, kv-heads, context": lambda: sweep(GPT2, "xyz"),
    "layers of different shapes (layers.0: 12 query and 12 key-value heads of width 64; layers.1: 9": lambda: sweep(
        uneven(), "heads"
    ),
    "has latent attention (layers.0): there is no sweep over kv-heads": lambda: sweep(latent(), "kv-heads"),
    "contexts belong to a sweep over 'context'": lambda: sweep(GPT2, "heads", contexts=[1]),
    "context must be a positive integer, got 0": lambda: sweep(GPT2, "context", contexts=[0]),
    "input_rms must be a positive number, got 0.0": lambda: sweep(GPT2, "heads", input_rms=0.0),
    "there is no column 'x'": lambda: sweep(GPT2, "heads").column("x"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words: str) -> None:
    with pytest.raises(InputError) as caught:
        REFUSED[words]()
    assert words in str(caught.value)

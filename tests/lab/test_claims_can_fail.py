"""For every experiment: the claim is made false, or true without its condition, and the verdict follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import lab
from headwise.lab import Verdict
from headwise.lab.experiments import (
    cache,
    head_count,
    rank,
    redundancy,
    saturation,
    several_reads,
    specialisation,
    sum_of_scores,
    tiling,
    uniform_head,
    worked_split,
)
from headwise.nn import MultiHeadAttention


def verdict(name: str) -> Verdict:
    return lab.run(name, size="small").verdict


def test_sum_of_scores_fails_if_all_heads_score_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict("sum-of-scores") is Verdict.HOLDS
    scores_of_heads = sum_of_scores.scores_of_heads

    def alike(seed: int) -> tuple[Tensor, Tensor]:
        one = scores_of_heads(seed)[0][:1]
        return one.expand(sum_of_scores.HEADS, -1, -1), one[0] * sum_of_scores.HEADS

    monkeypatch.setattr(sum_of_scores, "scores_of_heads", alike)
    assert verdict("sum-of-scores") is Verdict.FAILS


def test_sum_of_scores_fails_if_scores_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scores_of_heads = sum_of_scores.scores_of_heads
    monkeypatch.setattr(
        sum_of_scores, "scores_of_heads", lambda seed: (scores_of_heads(seed)[0], scores_of_heads(seed)[1].sin())
    )
    assert verdict("sum-of-scores") is Verdict.FAILS


@pytest.mark.slow
def test_several_reads_fails_if_all_reads_are_used_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_reads, "STEPS", {"small": 200})
    assert verdict("several-reads") is not Verdict.FAILS
    monkeypatch.setitem(several_reads.USES, "apart", several_reads.USES["mix"])
    assert verdict("several-reads") is Verdict.FAILS


@pytest.mark.slow
def test_several_reads_holds_without_condition_if_mixing_too_keeps_them_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_reads, "STEPS", {"small": 200})
    monkeypatch.setitem(several_reads.USES, "mix", several_reads.USES["apart"])
    assert verdict("several-reads") is Verdict.HOLDS


def test_saturation_fails_if_it_is_not_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict("saturation") is Verdict.CONDITION
    monkeypatch.setattr(saturation, "saturated_heads", lambda arm: 1 if arm == "wide" else saturation.HEADS)
    assert verdict("saturation") is Verdict.FAILS


def test_saturation_holds_without_condition_if_not_all_heads_ever_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturation, "saturated_heads", lambda arm: 1)
    assert verdict("saturation") is Verdict.HOLDS


def test_saturation_fails_if_nothing_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturation, "ADVANTAGES", (0.0, 0.5, 1.0))
    assert verdict("saturation") is Verdict.FAILS


def test_rank_fails_if_the_mean_gets_a_projection_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "FIT_STEPS", {"small": 2})
    assert verdict("rank") is Verdict.HOLDS
    build = rank.build
    monkeypatch.setattr(rank, "build", lambda seed, combine: build(seed, "concat"))
    assert verdict("rank") is Verdict.FAILS


def test_rank_fails_if_a_head_is_wider_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "FIT_STEPS", {"small": 2})

    def wide(seed: int, combine: str) -> MultiHeadAttention:
        torch.manual_seed(seed)
        return MultiHeadAttention(
            rank.D_MODEL, rank.HEADS, d_k=2 * rank.D_K, d_v=rank.D_K, combine=combine, dtype=torch.float64
        )

    monkeypatch.setattr(rank, "build", wide)
    assert verdict("rank") is Verdict.FAILS


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_head_count_fails_with_another_factor(monkeypatch: pytest.MonkeyPatch, power: float) -> None:
    monkeypatch.setattr(head_count, "HEAD_COUNTS", (2, 8, 32))
    monkeypatch.setattr(head_count, "WIDTHS", (256, 64, 16))
    assert verdict("head-count") is Verdict.CONDITION
    monkeypatch.setattr(head_count, "scale", lambda d_k: d_k**-power)
    assert verdict("head-count") is Verdict.FAILS


def test_head_count_fails_if_heads_cost_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_count, "HEAD_COUNTS", (2, 8, 32))
    monkeypatch.setattr(head_count, "WIDTHS", (256, 64, 16))
    costs = head_count.costs
    monkeypatch.setattr(head_count, "costs", lambda heads: {**costs(heads), "parameters": 1000 + heads})
    assert verdict("head-count") is Verdict.FAILS


def test_worked_split_fails_if_both_halves_prefer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict("worked-split") is Verdict.HOLDS
    monkeypatch.setattr(worked_split, "QUERY", (0.9, 0.1, 0.8, 0.2))
    assert verdict("worked-split") is Verdict.FAILS


def test_worked_split_fails_if_the_single_head_reads_two_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = worked_split.weights
    monkeypatch.setattr(worked_split, "weights", lambda heads, sharpness: weights(2, sharpness))
    assert verdict("worked-split") is Verdict.FAILS


def test_uniform_head_fails_if_it_is_not_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict("uniform-head") is Verdict.CONDITION
    monkeypatch.setattr(uniform_head, "NEARLY", 4.0)
    assert verdict("uniform-head") is Verdict.FAILS


def test_uniform_head_holds_without_condition_where_all_passages_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(uniform_head.SETTINGS["topics"], topic=0.0)
    monkeypatch.setattr(uniform_head, "SETTINGS", dict.fromkeys(uniform_head.SETTINGS, plain))
    assert verdict("uniform-head") is Verdict.HOLDS


def test_redundancy_holds_without_condition_if_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict("redundancy") is Verdict.CONDITION
    monkeypatch.setattr(redundancy, "plant_copy", lambda layer, random: None)
    assert verdict("redundancy") is Verdict.HOLDS


def test_redundancy_fails_if_there_are_copies_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    build = redundancy.build
    monkeypatch.setattr(
        redundancy, "build", lambda seed, planted: build(seed, "copy" if planted == "none" else planted)
    )
    assert verdict("redundancy") is Verdict.FAILS


@pytest.mark.slow
def test_specialisation_fails_without_training() -> None:
    assert verdict("specialisation") is Verdict.FAILS


def history(division: Tensor) -> specialisation.History:
    """A run at whose end the heads divide the jobs in a given way."""
    start = torch.full(division.shape, 0.1)
    patterns = torch.full((specialisation.LAYERS, 1, specialisation.HEADS, 3, 3), 1 / 3)
    without = (torch.eye(4) + 0.5).tolist()
    return specialisation.History([0, 10], [start, division], [[3.0] * 4, [0.1] * 4], patterns, without)


def test_specialisation_holds_if_each_head_gets_a_job_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(specialisation, "HEADS", 2)
    alone = torch.eye(4) * 0.9
    monkeypatch.setattr(specialisation, "train", lambda seed, steps: history(alone))
    assert verdict("specialisation") is Verdict.HOLDS


@pytest.mark.parametrize("gone", [0, 2])
def test_specialisation_fails_if_a_head_has_no_job(monkeypatch: pytest.MonkeyPatch, gone: int) -> None:
    monkeypatch.setattr(specialisation, "HEADS", 2)
    division = torch.eye(4) * 0.9
    division[gone, gone] = 0.4
    monkeypatch.setattr(specialisation, "train", lambda seed, steps: history(division))
    assert verdict("specialisation") is Verdict.FAILS


def test_specialisation_fails_if_two_heads_have_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialisation, "HEADS", 2)
    division = torch.eye(4) * 0.9
    division[0, 1] = 0.9
    monkeypatch.setattr(specialisation, "train", lambda seed, steps: history(division))
    assert verdict("specialisation") is Verdict.FAILS


def machine(bandwidth: float, peak: float) -> Any:
    """Times on a machine that does nothing but read and compute, whichever takes longer."""

    def one(kv_heads: int, context: int) -> dict[str, list[float]]:
        stream = cache.cache_bytes(kv_heads, context) / bandwidth
        return {"decode": [max(stream, cache.flops(context) / peak)], "stream": [stream]}

    def times(context: int, repeats: int, seed: int) -> dict[int, dict[str, list[float]]]:
        return {kv_heads: one(kv_heads, context) for kv_heads in cache.KV_HEADS}

    return times


@pytest.mark.parametrize(
    ("bandwidth", "peak", "expected"),
    [(1e10, 1e13, Verdict.HOLDS), (1e10, 3e10, Verdict.CONDITION), (1e13, 1e11, Verdict.FAILS)],
)
def test_cache_follows_the_machine(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float, peak: float, expected: Verdict
) -> None:
    monkeypatch.setattr(cache, "times", machine(bandwidth, peak))
    assert verdict("cache") is expected


def test_cache_fails_if_it_keeps_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "times", machine(1e10, 1e13))
    real = cache.KVCache
    monkeypatch.setattr(cache, "KVCache", lambda *a, n_kv_heads, **rest: real(*a, n_kv_heads=cache.HEADS, **rest))
    assert verdict("cache") is Verdict.FAILS


@pytest.mark.parametrize("road", ["tiled", "tiled, backward"])
def test_tiling_fails_if_the_scores_exist_after_all(monkeypatch: pytest.MonkeyPatch, road: str) -> None:
    assert verdict("tiling") is Verdict.HOLDS
    monkeypatch.setitem(tiling.ROADS, road, ("eager", *tiling.ROADS[road][1:]))
    assert verdict("tiling") is Verdict.FAILS


def test_tiling_fails_if_it_is_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "error", lambda road, tokens, seed: 1e-3)
    assert verdict("tiling") is Verdict.FAILS


def test_every_experiment_is_here() -> None:
    covered = {name.replace("_", "-") for name in globals() if isinstance(globals()[name], type(rank))}
    assert {entry.name for entry in lab.CATALOGUE} <= covered

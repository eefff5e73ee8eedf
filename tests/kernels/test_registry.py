"""Which backend runs, and what is said about the others."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import InputError, UnsupportedError
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, backends, choose, run

X = torch.randn(2, 4, 7, 3, generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(2, 7, dtype=torch.bool)
MASK = torch.ones(2, 1, 7, 7, dtype=torch.bool)
LONG = torch.randn(2, 4, 9, 3, generator=torch.Generator().manual_seed(0))


def problem(q=X, k=X, v=X, rule=None, **visible):
    return Problem(q, k, v, Visible(**visible), rule or ScoreRule())


@pytest.mark.parametrize(
    "given",
    [
        problem(),
        problem(causal=True),
        problem(key_padding=PADDING),
        problem(mask=MASK),
        problem(v=torch.randn(2, 4, 7, 5)),
        problem(q=X[:, :, :1], causal=True),
        problem(q=X[:, :, :1], causal=True, key_padding=PADDING),
        problem(k=X[:, :2], v=X[:, :2], causal=True),
        problem(k=X[:, :2], v=X[:, :2], mask=torch.ones(1, 4, 7, 7, dtype=torch.bool)),
    ],
)
def test_the_plain_case_runs_on_sdpa(given, no_native):
    choice = choose(given)
    assert choice.backend == "sdpa"
    assert dict(choice.reasons) == {
        "cpu": "the native kernel is not built",
        "tiled": "sdpa comes first",
        "eager": "sdpa comes first",
        "reference": "sdpa comes first",
    }
    assert torch.allclose(run(given).z, run(given, backend="reference").z, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "wanted", "reason"),
    [
        (problem(), Wanted(rows=True), "no row statistics"),
        (problem(), Wanted(distance=True), "no row statistics"),
        (problem(), Wanted(pairs=torch.zeros(1, 1, 7, dtype=torch.int64)), "no row statistics"),
        (problem(rule=ScoreRule(softcap=3.0)), Wanted(), "a soft cap"),
        (problem(rule=ScoreRule(bias=torch.zeros(1, 1, 7, 7))), Wanted(), "a bias"),
        (problem(rule=ScoreRule(sinks=torch.zeros(4))), Wanted(), "sinks"),
        (problem(rule=ScoreRule(additive_mask=torch.zeros(1, 1, 7, 7))), Wanted(), "an additive mask"),
        (problem(causal=True, window=3), Wanted(), "a sliding window"),
        (problem(predicate=lambda b, h, i, j: j <= i), Wanted(), "a predicate"),
        (problem(k=LONG, v=LONG, causal=True), Wanted(), "top left corner"),
        (problem(causal=True, offset=1), Wanted(), "top left corner"),
        (problem(causal=True, key_padding=PADDING), Wanted(), "the problem has both"),
        (problem(mask=MASK, key_padding=PADDING), Wanted(), "it takes one mask"),
        (problem(q=X[:, :, :0]), Wanted(), "no queries or no keys"),
        (problem(k=X[:, :, :0], v=X[:, :, :0]), Wanted(), "no queries or no keys"),
        (problem(v=X.index_fill(2, torch.tensor([5]), torch.nan), causal=True), Wanted(), "NaN or infinity"),
        (problem(k=X.index_fill(2, torch.tensor([5]), torch.inf), mask=MASK), Wanted(), "NaN or infinity"),
    ],
)
def test_everything_else_runs_on_tiled_and_says_why_not_sdpa(given, wanted, reason, no_native):
    choice = choose(given, wanted)
    assert choice.backend == "tiled"
    assert reason in dict(choice.reasons)["sdpa"]
    with pytest.raises(UnsupportedError, match=r"backend='sdpa' cannot compute this: .*it would be 'tiled'"):
        run(given, wanted, backend="sdpa")


def test_the_answer_says_what_ran(no_native):
    answer = run(problem(), Wanted(rows=True))
    assert answer.choice.backend == "tiled"
    assert [name for name, _ in answer.choice.reasons] == ["cpu", "sdpa", "eager", "reference"]
    asked = run(problem(), backend="eager").choice
    assert asked.backend == "eager"
    assert dict(asked.reasons)["tiled"] == "eager was asked for"


def test_without_the_native_kernel_its_place_is_kept(no_native):
    assert next(iter(backends())) == "cpu"
    with pytest.raises(UnsupportedError, match="backend='cpu' cannot compute this: the native kernel is not built"):
        run(problem(), backend="cpu")


def test_a_backend_that_does_not_exist_is_refused_with_the_list():
    with pytest.raises(
        InputError, match=r"backend must be one of cpu, sdpa, tiled, eager, reference, or None to choose; got 'fast'"
    ):
        run(problem(), backend="fast")


def test_statistics_of_every_kind_come_with_their_shape_and_dtype(backend, dtype):
    q, k = torch.randn(2, 4, 5, 3).to(dtype), torch.randn(2, 2, 7, 3).to(dtype)
    wanted = Wanted(rows=True, distance=True, pairs=torch.zeros(3, 1, 5, dtype=torch.int64), weights=True)
    if backend == "sdpa":
        with pytest.raises(UnsupportedError):
            run(Problem(q, k, k), wanted, backend=backend)
        return
    answer = run(Problem(q, k, k, rule=ScoreRule(sinks=torch.randn(4))), wanted, backend=backend)
    rows = answer.rows
    assert answer.z.dtype == answer.weights.dtype == dtype
    assert answer.weights.shape == (2, 4, 5, 7)
    for name in ("lse", "entropy", "max_weight", "sink", "distance"):
        assert getattr(rows, name).shape == (2, 4, 5), name
        assert getattr(rows, name).dtype == torch.float32, name
    assert rows.pairs.shape == (3, 2, 4, 5)
    assert rows.argmax.shape == rows.visible.shape == (2, 4, 5)
    assert rows.argmax.dtype == rows.visible.dtype == torch.int64


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("queries", [0, 1, 5])
@pytest.mark.parametrize("keys", [0, 1, 5])
def test_lengths_of_zero_and_one_work(backend, batch, queries, keys):
    q, k, v = torch.randn(batch, 2, queries, 3), torch.randn(batch, 1, keys, 3), torch.randn(batch, 1, keys, 4)
    try:
        answer = run(Problem(q, k, v, Visible(causal=True)), Wanted(weights=True), backend=backend)
    except UnsupportedError:
        assert backend == "sdpa"
        return
    assert answer.z.shape == (batch, 2, queries, 4)
    assert answer.weights.shape == (batch, 2, queries, keys)
    assert answer.z.isfinite().all()

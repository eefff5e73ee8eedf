"""The native kernel against the float64 reference: every option, every target, lengths around the vector width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.kernels import Problem, ScoreRule, Visible, Wanted, alibi, alibi_slopes, native, reference, run

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))

ROWS = ("lse", "entropy", "max_weight", "sink", "distance", "pairs", "classes")


def assert_same(problem, wanted, tolerance, *, exact_argmax=True):
    want, got = run(problem, wanted, backend="reference"), run(problem, wanted, backend="cpu")
    torch.testing.assert_close(got.z.double(), want.z.double(), atol=tolerance, rtol=tolerance)
    for name in ROWS:
        truth, found = getattr(want.rows, name), getattr(got.rows, name)
        assert (truth is None) == (found is None), name
        if truth is not None:
            scale = 1.0 if name != "distance" else max(1.0, problem.k.shape[2])
            torch.testing.assert_close(found.double(), truth.double(), atol=tolerance * scale, rtol=tolerance)
    assert torch.equal(got.rows.visible, want.rows.visible)
    if exact_argmax:
        assert torch.equal(got.rows.argmax, want.rows.argmax)
    assert (got.rows.entropy >= 0).all()
    return got


def randn(generator, *shape):
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("keys", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1031])
@pytest.mark.parametrize("queries", [1, 2, 3, 8, 9, 11, 13, 25])
def test_lengths_around_the_widths_of_vectors_tiles_and_blocks(target, queries, keys):
    q, k, v = torch.randn(1, 2, queries, 19), torch.randn(1, 2, keys, 19), torch.randn(1, 2, keys, 21)
    for visible in (Visible(), Visible(causal=True), Visible(causal=True, window=5)):
        assert_same(Problem(q, k, v, visible), Wanted(rows=True, distance=True), 3e-6)


@pytest.mark.parametrize("d_v", [1, 2, 15, 16, 17, 31, 33, 48, 65, 80, 130])
@pytest.mark.parametrize("d_k", [1, 5, 16, 23, 64, 72, 257])
def test_any_widths(target, d_k, d_v):
    for queries in (2, 29):
        q, k, v = torch.randn(1, 3, queries, d_k), torch.randn(1, 1, 71, d_k), torch.randn(1, 1, 71, d_v)
        assert_same(Problem(q, k, v), Wanted(rows=True), 4e-6)


def test_very_wide_heads_take_smaller_blocks(target):
    q, k, v = torch.randn(1, 1, 14, 1031), torch.randn(1, 1, 601, 1031), torch.randn(1, 1, 601, 523)
    assert_same(Problem(q, k, v), Wanted(rows=True), 6e-6)


options = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "batch": st.integers(1, 3),
        "share": st.integers(1, 5),
        "groups": st.integers(1, 3),
        "queries": st.integers(0, 61) | st.just(1),
        "keys": st.integers(0, 90) | st.integers(500, 1100),
        "d_k": st.integers(1, 40),
        "d_v": st.integers(1, 40),
        "causal": st.booleans(),
        "window": st.none() | st.integers(1, 70),
        "offset": st.none() | st.integers(-7, 130),
        "padding": st.booleans(),
        "mask": st.sampled_from([None, None, "BHQK", "QK", "K", "Q"]),
        "bias": st.sampled_from([None, None, "HQK", "K", "Q"]),
        "additive": st.booleans(),
        "softcap": st.none() | st.just(3.0),
        "sinks": st.booleans(),
        "alibi": st.booleans(),
        "shuffled": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "strided": st.booleans(),
        "threads": st.integers(1, 3),
    }
)


def build(o):
    g = torch.Generator().manual_seed(o["seed"])
    b, groups, nq, nk, heads = o["batch"], o["groups"], o["queries"], o["keys"], o["share"] * o["groups"]

    def projected(n, count, width):
        if o["strided"]:
            return randn(g, b, n, count, width).to(o["dtype"]).transpose(1, 2)
        return randn(g, b, count, n, width).to(o["dtype"])

    def coin(*shape, share=0.6):
        return torch.rand(shape, generator=g) < share

    shapes = {"BHQK": (b, heads, nq, nk), "QK": (1, 1, nq, nk), "K": (b, 1, 1, nk), "Q": (1, heads, nq, 1)}
    shapes["HQK"] = (1, heads, nq, nk)
    mask = None if o["mask"] is None else coin(*shapes[o["mask"]])
    bias = None if o["bias"] is None else randn(g, *shapes[o["bias"]]).to(o["dtype"])
    additive = None
    if o["additive"]:
        hidden = coin(b, 1, nq, nk, share=0.3)
        additive = torch.zeros(b, 1, nq, nk).masked_fill(hidden, torch.finfo(torch.float32).min)
    table, zero = alibi(alibi_slopes(heads), nq, nk, offset=o["offset"]) if o["alibi"] else (None, 0)
    visible = Visible(o["causal"], o["window"], o["offset"], coin(b, nk, share=0.8) if o["padding"] else None, mask)
    sinks = randn(g, heads) * 2 if o["sinks"] else None
    rule = ScoreRule(None, o["softcap"], bias, sinks, additive, table, zero)
    kv_map = tuple(torch.randint(groups, (heads,), generator=g).tolist()) if o["shuffled"] else None
    q, k, v = projected(nq, heads, o["d_k"]), projected(nk, groups, o["d_k"]), projected(nk, groups, o["d_v"])
    pairs = torch.randint(-1, max(nk, 1), (2, b, nq), generator=g) if nk else None
    classes = torch.randint(0, 6, (b, nk), generator=g, dtype=torch.uint8)
    wanted = Wanted(rows=True, distance=True, pairs=pairs, classes=classes, n_classes=5)
    return Problem(q, k, v, visible, rule, kv_map), wanted


def check_options(o):
    problem, wanted = build(o)
    before = torch.get_num_threads()
    torch.set_num_threads(o["threads"])
    try:
        # Half precision input: compared with the reference on the same rounded values; z is rounded once at the end.
        tolerance = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[o["dtype"]]
        want, got = run(problem, wanted, backend="reference"), run(problem, wanted, backend="cpu")
        torch.testing.assert_close(got.z.double(), want.z.double(), atol=tolerance, rtol=tolerance)
        wide = Problem(
            *(x.float() for x in (problem.q, problem.k, problem.v)), problem.visible, problem.rule, problem.kv_map
        )
        assert_same(wide, wanted, 6e-6, exact_argmax=False)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=150, deadline=None)
@given(options)
def test_all_options_at_once(o):
    check_options(o)


@pytest.mark.slow
@pytest.mark.parametrize("name", native.core().targets() if native.core() else [])
def test_fuzz_over_shapes_and_options(name):
    @settings(max_examples=1500, deadline=None)
    @given(options)
    def fuzz(o):
        with native.forced(name):
            check_options(o)

    fuzz()


@pytest.mark.parametrize("peak", [1.0, 30.0], ids=["unit-normal", "peaked"])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_at_most_twice_those_of_plain_torch(target, dtype, peak, causal):
    q, k, v = (torch.randn(1, 4, 701, 48).to(dtype) for _ in range(3))
    q = (q * peak).to(dtype)
    truth = reference.attend(Problem(q, k, v, Visible(causal=causal)), Wanted(rows=True))
    scores = (q * 48**-0.5) @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(701, 701, dtype=torch.bool).triu(1), -torch.inf)
    pattern = torch.softmax(scores, dim=-1, dtype=torch.float32)
    plain = {
        "lse": torch.logsumexp(scores.float(), -1),
        "entropy": torch.special.entr(pattern).sum(-1),
        "max_weight": pattern.amax(-1),
    }
    got = run(Problem(q, k, v, Visible(causal=causal)), Wanted(rows=True), backend="cpu")

    def error(found, want):
        return (found.double() - want).abs().max().item()

    assert error(got.z, truth.z) <= 2 * error(pattern.to(dtype) @ v, truth.z) + torch.finfo(dtype).eps
    for name, found in plain.items():
        want = getattr(truth.rows, name)
        floor = 1e-6 * max(1.0, want.abs().max().item())
        assert error(getattr(got.rows, name), want) <= 2 * error(found, want) + floor, name
    rows = truth.rows
    if dtype == torch.float32:
        differ = got.rows.argmax != rows.argmax
        assert differ.float().mean() <= 0.001  # ties up to rounding


def test_one_hot_rows_have_an_entropy_of_exactly_zero(target):
    q = torch.eye(40)[None, None] * 1000.0
    rows = run(Problem(q, q, q), Wanted(rows=True), backend="cpu").rows
    assert (rows.entropy == 0).all()
    assert (rows.max_weight == 1).all()
    assert rows.argmax.flatten().tolist() == list(range(40))


def test_what_is_wanted_beside_z_does_not_change_it(target):
    q, k, v = torch.randn(2, 4, 83, 24), torch.randn(2, 2, 601, 24), torch.randn(2, 2, 601, 24)
    for queries in (2, 83):
        problem = Problem(q[:, :, :queries], k, v, Visible(causal=True))
        plain = run(problem, backend="cpu").z
        for wanted in (Wanted(rows=True), Wanted(distance=True), Wanted(weights=True)):
            assert torch.equal(run(problem, wanted, backend="cpu").z, plain)


def test_a_call_is_repeatable_to_the_bit_and_threads_change_rounding_at_most(target):
    q, k, v = torch.randn(2, 3, 601, 24), torch.randn(2, 3, 601, 24), torch.randn(2, 3, 601, 24)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 5, 5):
            torch.set_num_threads(threads)
            found.append(run(Problem(q, k, v, Visible(causal=True)), Wanted(rows=True), backend="cpu"))
    finally:
        torch.set_num_threads(before)
    for a, b in ((1, 2), (3, 4)):
        assert torch.equal(found[a].z, found[b].z)
        assert torch.equal(found[a].rows.entropy, found[b].rows.entropy)
    for other in found[1:]:
        torch.testing.assert_close(other.z, found[0].z)
        torch.testing.assert_close(other.rows.entropy, found[0].rows.entropy)


def test_lists_of_pairs_of_any_length(target):
    q, k, v = torch.randn(2, 4, 13, 6), torch.randn(2, 2, 17, 6), torch.randn(2, 2, 17, 6)
    counts = torch.randint(0, 5, (26,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    keys = torch.randint(-2, 20, (int(offsets[-1]),))
    problem = Problem(q, k, v, Visible(causal=True), ScoreRule(softcap=2.0, sinks=torch.randn(4)))
    pairs = torch.randint(-1, 17, (2, 1, 13))
    for wanted in (Wanted(pair_lists=(offsets, keys)), Wanted(pair_lists=(offsets, keys), pairs=pairs)):
        got, want = (run(problem, wanted, backend=name).rows for name in ("cpu", "reference"))
        torch.testing.assert_close(got.pair_lists, want.pair_lists, atol=1e-6, rtol=1e-5)
        assert (got.pairs is None) == (wanted.pairs is None)
    weights = run(problem, Wanted(weights=True), backend="reference").weights
    flat = weights.transpose(0, 1).reshape(4, 26, 17)
    row = torch.repeat_interleave(torch.arange(26), counts)
    there = (keys >= 0) & (keys < 17)
    truth = torch.where(there, flat[:, row, keys.clamp(0, 16)], 0.0)
    torch.testing.assert_close(got.pair_lists, truth, atol=1e-6, rtol=1e-5)

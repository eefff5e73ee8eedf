"""Every backend against the float64 reference, over all options at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise.errors import UnsupportedError
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, reference, run

FLOATS = ("lse", "entropy", "max_weight", "sink", "distance", "pairs")


@dataclass(frozen=True)
class Options:
    """Everything that a problem may combine."""

    batch: int
    share: int
    groups: int
    queries: int
    keys: int
    d_k: int
    d_v: int
    causal: bool
    window: int | None
    offset: int | None
    padding: bool
    mask: str | None
    predicate: bool
    softcap: float | None
    bias: str | None
    additive: bool
    sinks: bool
    shuffled_kv: bool
    seed: int


options = st.builds(
    Options,
    batch=st.integers(1, 3),
    share=st.integers(1, 3),
    groups=st.integers(1, 3),
    queries=st.integers(0, 37),
    keys=st.integers(0, 41),
    d_k=st.integers(1, 7),
    d_v=st.integers(1, 7),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 23),
    offset=st.none() | st.integers(-5, 45),
    padding=st.booleans(),
    mask=st.sampled_from([None, None, "QK", "HQK", "K"]),
    predicate=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    bias=st.sampled_from([None, None, "HQK", "HK", "Q"]),
    additive=st.booleans(),
    sinks=st.booleans(),
    shuffled_kv=st.booleans(),
    seed=st.integers(0, 2**20),
)


def build(o: Options, dtype=torch.float32) -> tuple[Problem, Wanted]:
    g = torch.Generator().manual_seed(o.seed)

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    def coin(*shape, share=0.6):
        return torch.rand(shape, generator=g) < share

    heads = o.share * o.groups
    mask = {
        None: lambda: None,
        "QK": lambda: coin(1, 1, o.queries, o.keys),
        "HQK": lambda: coin(o.batch, heads, o.queries, o.keys),
        "K": lambda: coin(o.batch, 1, 1, o.keys),
    }[o.mask]()
    bias = {
        None: lambda: None,
        "HQK": lambda: randn(1, heads, o.queries, o.keys),
        "HK": lambda: randn(1, heads, 1, o.keys),
        "Q": lambda: randn(o.batch, 1, o.queries, 1),
    }[o.bias]()
    additive = None
    if o.additive:
        additive = torch.zeros(o.batch, 1, o.queries, o.keys, dtype=dtype)
        additive = additive.masked_fill(coin(*additive.shape, share=0.3), torch.finfo(dtype).min)
    visible = Visible(
        causal=o.causal,
        window=o.window,
        offset=o.offset,
        key_padding=coin(o.batch, o.keys, share=0.7) if o.padding else None,
        mask=mask,
        predicate=(lambda b, h, i, j: (i + j + h) % 3 != b % 3) if o.predicate else None,
    )
    rule = ScoreRule(
        scale=None if o.seed % 2 else 0.7,
        softcap=o.softcap,
        bias=bias,
        sinks=randn(heads) if o.sinks else None,
        additive_mask=additive,
    )
    kv_map = None
    if o.shuffled_kv:
        kv_map = tuple(torch.randint(o.groups, (heads,), generator=g).tolist())
    q, k, v = randn(o.batch, heads, o.queries, o.d_k), randn(o.batch, o.groups, o.keys, o.d_k), None
    v = randn(o.batch, o.groups, o.keys, o.d_v)
    pairs = torch.randint(-1, max(o.keys, 1), (2, o.batch, o.queries), generator=g) if o.keys else None
    return Problem(q, k, v, visible, rule, kv_map), Wanted(rows=True, distance=True, pairs=pairs)


def assert_same(want, got, tolerance):
    assert torch.allclose(want.z, got.z.double(), atol=tolerance)
    if want.rows is None:
        return
    for name in FLOATS:
        truth, found = getattr(want.rows, name), getattr(got.rows, name)
        assert (truth is None) == (found is None), name
        if truth is not None:
            assert truth.shape == found.shape, name
            scale = max(1.0, truth[truth.isfinite()].abs().max().item()) if truth.isfinite().any() else 1.0
            assert torch.allclose(truth, found.double(), atol=tolerance * scale), name
    assert torch.equal(want.rows.visible, got.rows.visible)
    assert got.rows.visible.dtype == got.rows.argmax.dtype == torch.int64
    assert (got.rows.entropy >= 0).all()
    assert ((got.rows.max_weight >= 0) & (got.rows.max_weight <= 1 + 1e-6)).all()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options)
def test_tiled_and_eager_equal_the_reference(small_blocks, o):
    small_blocks()
    problem, wanted = build(o)
    want = reference.attend(problem, wanted)
    for backend in ("tiled", "eager"):
        got = run(problem, wanted, backend=backend)
        assert_same(want, got, 3e-6)
        assert torch.equal(want.rows.argmax, got.rows.argmax)
        assert got.z.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(options)
def test_sdpa_equals_the_reference_wherever_it_does_not_decline(o):
    plain = Options(**{**vars(o), "predicate": False, "softcap": None, "bias": None, "additive": False, "sinks": False})
    problem, _ = build(plain)
    try:
        got = run(problem, backend="sdpa")
    except UnsupportedError:
        return
    assert torch.allclose(reference.attend(problem).z, got.z.double(), atol=3e-6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options)
def test_float64_stays_float64(small_blocks, o):
    small_blocks()
    problem, wanted = build(o, torch.float64)
    got = run(problem, wanted, backend="tiled")
    assert got.z.dtype == got.rows.lse.dtype == torch.float64
    assert_same(reference.attend(problem, wanted), got, 1e-12)


@pytest.mark.parametrize("peak", [1.0, 30.0], ids=["unit-normal", "peaked"])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_at_most_twice_those_of_plain_torch(dtype, peak, causal):
    q, k, v = (torch.randn(1, 4, 301, 48).to(dtype) for _ in range(3))
    q = (q * peak).to(dtype)
    problem = Problem(q, k, v, Visible(causal=causal))
    truth = reference.attend(problem, Wanted(rows=True))
    scores = (q * 48**-0.5) @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(301, 301, dtype=torch.bool).triu(1), -torch.inf)
    pattern = torch.softmax(scores, dim=-1, dtype=torch.float32)
    plain = {
        "lse": torch.logsumexp(scores.float(), -1),
        "entropy": torch.special.entr(pattern).sum(-1),
        "max_weight": pattern.amax(-1),
    }
    plain_z = pattern.to(dtype) @ v
    answer = run(problem, Wanted(rows=True), backend="tiled")
    floor = torch.finfo(dtype).eps

    def error(found, want):
        return (found.double() - want).abs().max().item()

    assert error(answer.z, truth.z) <= 2 * error(plain_z, truth.z) + floor
    assert error(run(problem).z, truth.z) <= 2 * error(plain_z, truth.z) + floor
    for name, found in plain.items():
        want = getattr(truth.rows, name)
        small = 1e-6 * max(1.0, want.abs().max().item())
        assert error(getattr(answer.rows, name), want) <= 2 * error(found, want) + small, name
    if dtype == torch.float32:
        assert torch.equal(answer.rows.argmax, truth.rows.argmax)


@pytest.mark.parametrize("visible", [Visible(causal=True), Visible(window=300), Visible(causal=True, offset=-20)])
@pytest.mark.parametrize("groups", [1, 3])
def test_blocks_of_the_usual_size_with_a_bias_that_hides_nothing(visible, groups):
    q, k, v = torch.randn(2, 9, 601, 8), torch.randn(2, groups, 1301, 8), torch.randn(2, groups, 1301, 4)
    problem = Problem(q, k, v, visible, ScoreRule(bias=torch.randn(1, 9, 601, 1301), sinks=torch.randn(9)))
    wanted = Wanted(rows=True, distance=True, pairs=torch.randint(-1, 1301, (2, 1, 601)))
    want, got = reference.attend(problem, wanted), run(problem, wanted, backend="tiled")
    assert_same(want, got, 5e-6)
    assert torch.equal(want.rows.argmax, got.rows.argmax)


def test_strides_do_not_matter(backend):
    q, k, v = torch.randn(2, 7, 4, 6), torch.randn(2, 11, 2, 6), torch.randn(6, 11, 2, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.permute(3, 2, 1, 0)
    want = run(Problem(q.contiguous(), k.contiguous(), v.contiguous()), backend=backend).z
    assert torch.allclose(run(Problem(q, k, v), backend=backend).z, want, atol=1e-6)


def test_ties_go_to_the_lowest_key(backend, small_blocks):
    if backend == "sdpa":
        pytest.skip("it has no statistics")
    small_blocks()
    q, k = torch.zeros(1, 1, 50, 3), torch.randn(1, 1, 50, 3)
    rows = run(Problem(q, k, k, Visible(causal=True, window=20)), Wanted(rows=True), backend=backend).rows
    assert rows.argmax.flatten().tolist() == [max(0, i - 19) for i in range(50)]


def test_a_causal_prefix_is_not_touched_by_what_follows(backend):
    q, k, v = (torch.randn(1, 2, 23, 5) for _ in range(3))
    whole = run(Problem(q, k, v, Visible(causal=True)), backend=backend).z
    prefix = run(Problem(q[:, :, :13], k[:, :, :13], v[:, :, :13], Visible(causal=True)), backend=backend).z
    assert torch.allclose(whole[:, :, :13], prefix, atol=1e-6)


def test_permuting_heads_permutes_the_answer(backend):
    q, k, v = (torch.randn(1, 5, 9, 4) for _ in range(3))
    order = [3, 0, 4, 1, 2]
    permuted = run(Problem(q[:, order], k[:, order], v[:, order]), backend=backend).z
    assert torch.allclose(permuted, run(Problem(q, k, v), backend=backend).z[:, order], atol=1e-7)


def test_grouped_heads_equal_repeated_keys_and_values(backend):
    q, k, v = torch.randn(2, 6, 9, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    repeated = run(Problem(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)), backend=backend).z
    assert torch.allclose(run(Problem(q, k, v), backend=backend).z, repeated, atol=1e-6)


def test_pairs_are_the_weights_there(backend):
    if backend == "sdpa":
        pytest.skip("it has no statistics")
    q, k, v = torch.randn(2, 4, 9, 5), torch.randn(2, 2, 11, 5), torch.randn(2, 2, 11, 5)
    pairs = torch.randint(-1, 11, (3, 1, 9))
    rule = ScoreRule(softcap=3.0, sinks=torch.randn(4), bias=torch.randn(1, 4, 9, 11))
    answer = run(Problem(q, k, v, Visible(causal=True), rule), Wanted(pairs=pairs, weights=True), backend=backend)
    want = answer.weights.gather(
        -1, pairs.clamp(min=0)[..., None].expand(3, 1, 9, 1).permute(1, 3, 2, 0).expand(2, 4, 9, 3)
    )
    want = want.permute(3, 0, 1, 2).masked_fill((pairs < 0)[:, :, None], 0.0)
    assert torch.allclose(answer.rows.pairs, want, atol=1e-6)


def test_with_a_sink_entropy_is_over_the_keys_and_weights_are_the_patterns(backend):
    if backend == "sdpa":
        pytest.skip("it declines sinks")
    q, v = torch.zeros(1, 1, 1, 2), torch.tensor([4.0, 8.0, 12.0]).view(1, 1, 3, 1)
    rule = ScoreRule(sinks=torch.zeros(1))  # four equal logits, of which one has no value
    answer = run(Problem(q, torch.zeros(1, 1, 3, 2), v, rule=rule), Wanted(rows=True, weights=True), backend=backend)
    assert answer.z.item() == pytest.approx(6.0)
    assert answer.rows.max_weight.item() == pytest.approx(0.25)
    assert answer.rows.sink.item() == pytest.approx(0.25)
    assert answer.rows.entropy.item() == pytest.approx(1.0986, abs=5e-5)
    assert answer.rows.lse.item() == pytest.approx(1.0986, abs=5e-5)
    assert answer.weights.flatten().tolist() == pytest.approx([0.25] * 3)


def test_the_order_of_the_rules_is_scale_cap_bias_mask(backend):
    if backend == "sdpa":
        pytest.skip("it declines soft caps")
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[2.0], [5.0]]]])
    rule = ScoreRule(scale=3.0, softcap=4.0, bias=torch.tensor([[[[0.5, -0.25]]]]))
    want = (4.0 * torch.tanh(torch.tensor([6.0, 15.0]) / 4.0) + torch.tensor([0.5, -0.25])).logsumexp(0)
    got = run(Problem(q, k, k, rule=rule), Wanted(rows=True), backend=backend).rows.lse
    assert got.item() == pytest.approx(want.item(), abs=1e-6)

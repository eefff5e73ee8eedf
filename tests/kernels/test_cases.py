"""The published cases about masks, weights, windows, grouped heads and entropy, with their exact values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, attention, run

MIN = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def run_or_skip(problem, backend, wanted=None):
    try:
        return run(problem, wanted or Wanted(), backend=backend)
    except UnsupportedError as refusal:
        assert backend == "sdpa"  # the only one that may decline
        pytest.skip(f"declined: {refusal}")


def rows_one_empty(kind, dtype):
    if kind == "bool":
        return {"visible": Visible(mask=torch.tensor([[True] * 3, [False] * 3]).view(1, 1, 2, 3))}
    hide = -math.inf if kind == "-inf" else MIN[dtype]
    return {"rule": ScoreRule(bias=torch.tensor([[0.0] * 3, [hide] * 3], dtype=dtype).view(1, 1, 2, 3))}


@pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min"])
def test_case_1_a_query_that_sees_no_key_gives_zero_and_finite_gradients(backend, dtype, kind):
    q = torch.zeros(1, 1, 2, 2, dtype=dtype, requires_grad=True)
    k = torch.ones(1, 1, 3, 2, dtype=dtype, requires_grad=True)
    v = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], dtype=dtype).view(1, 1, 3, 2).requires_grad_()
    problem = Problem(q, k, v, **rows_one_empty(kind, dtype))
    z = run_or_skip(problem, backend).z
    assert z[0, 0, 0].tolist() == pytest.approx([2.0, 3.0], abs=1e-2)
    assert z[0, 0, 1].tolist() == [0.0, 0.0]
    gradients = torch.autograd.grad(z[0, 0].sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[2][0, 0].float().flatten().tolist() == pytest.approx([1 / 3] * 6, abs=2e-3)
    weights = run(problem, Wanted(weights=True), backend=backend)
    assert weights.weights[0, 0, 1].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(weights.z, z)


@pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min"])
def test_case_1_statistics_of_a_query_that_sees_no_key(backend, dtype, kind):
    q = torch.zeros(1, 1, 2, 2, dtype=dtype, requires_grad=True)
    k, v = torch.ones(1, 1, 3, 2, dtype=dtype), torch.ones(1, 1, 3, 2, dtype=dtype)
    answer = run_or_skip(Problem(q, k, v, **rows_one_empty(kind, dtype)), backend, Wanted(rows=True, distance=True))
    rows = answer.rows
    assert rows.entropy[0, 0].tolist() == pytest.approx([math.log(3), 0.0])
    assert rows.max_weight[0, 0].tolist() == pytest.approx([1 / 3, 0.0])
    assert rows.argmax[0, 0].tolist() == [0, -1]
    assert rows.visible[0, 0].tolist() == [3, 0]
    assert rows.lse[0, 0, 1] == -math.inf
    assert rows.distance[0, 0, 1] == 0.0
    (gradient,) = torch.autograd.grad(rows.entropy.sum() + rows.max_weight.sum() + rows.distance.sum(), q)
    assert gradient.isfinite().all()


def test_case_1_other_rows_do_not_change_when_one_sees_nothing(backend):
    q, k, v = torch.randn(1, 1, 5, 3), torch.randn(1, 1, 7, 3), torch.randn(1, 1, 7, 2)
    mask = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    full = run(Problem(q, k, v, Visible(mask=mask)), backend=backend).z
    mask[..., 2, :] = False
    less = run(Problem(q, k, v, Visible(mask=mask)), backend=backend).z
    kept = [0, 1, 3, 4]
    assert torch.allclose(full[:, :, kept], less[:, :, kept], atol=1e-7)
    assert (less[:, :, 2] == 0).all()


def test_case_2a_causal_and_padding_both_as_the_smallest_number(backend):
    low = MIN[torch.bfloat16]
    causal = torch.tensor([[0.0, low], [0.0, 0.0]], dtype=torch.bfloat16)
    padding = torch.tensor([[low, 0.0]], dtype=torch.bfloat16)
    q, k, v = (torch.randn(1, 1, 2, 4, dtype=torch.bfloat16) for _ in range(3))
    apart = ScoreRule(bias=causal.view(1, 1, 2, 2), additive_mask=padding.view(1, 1, 1, 2))
    for rule in (apart, ScoreRule(bias=(causal + padding).view(1, 1, 2, 2))):
        answer = run_or_skip(Problem(q, k, v, rule=rule), backend, Wanted(weights=True))
        assert answer.weights[0, 0].tolist() == [[0.0, 0.0], [0.0, 1.0]]
        assert answer.z[0, 0, 0].tolist() == [0.0] * 4
        assert torch.equal(answer.z[0, 0, 1], v[0, 0, 1])


def test_case_2b_the_scale_comes_before_the_product(backend):
    q = torch.full((1, 1, 1, 128), 64.0, dtype=torch.float16)
    k = torch.full((1, 1, 2, 128), 64.0, dtype=torch.float16)
    v = torch.tensor([1.0, 3.0], dtype=torch.float16).view(1, 1, 2, 1)
    assert run(Problem(q, k, v), backend=backend).z.item() == 2.0


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_case_2c_a_mask_of_another_dtype_is_accepted(dtype, mask_dtype):
    q, k, v = (torch.zeros(1, 1, 3, 2, dtype=dtype), torch.zeros(1, 1, 3, 2, dtype=dtype), torch.ones(1, 1, 3, 2))
    v = (v * torch.tensor([1.0, 3.0, 8.0])[:, None]).to(dtype)
    mask = torch.tensor([0.0, 0.0, torch.finfo(mask_dtype).min], dtype=mask_dtype).view(1, 1, 1, 3)
    z = attention(q, k, v, mask=mask)
    assert z.dtype == dtype
    assert z.flatten().tolist() == [2.0] * 6


def test_case_3_true_means_may_attend(dtype, backend):
    q, k = torch.zeros(1, 1, 1, 2, dtype=dtype), torch.randn(1, 1, 3, 2).to(dtype)
    v = torch.tensor([1.0, 3.0, 8.0], dtype=dtype).view(1, 1, 3, 1)
    keep = torch.tensor([[True, True, False]])
    assert attention(q, k, v, mask=keep, backend=backend).item() == 2.0
    assert attention(q, k, v, key_padding=keep, backend=backend).item() == 2.0


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.int32, torch.float32, torch.float16])
def test_case_3_numbers_as_masks_are_refused_with_the_fix(kind):
    q, v = torch.zeros(1, 1, 1, 2), torch.tensor([1.0, 3.0, 8.0]).view(1, 1, 3, 1)
    with pytest.raises(InputError, match=r"mask\.bool\(\)"):
        attention(q, torch.zeros(1, 1, 3, 2), v, mask=torch.tensor([[1, 1, 0]], dtype=kind))
    with pytest.raises(InputError, match=r"key_padding\.bool\(\)"):
        attention(q, torch.zeros(1, 1, 3, 2), v, key_padding=torch.tensor([[1, 1, 0]], dtype=kind))
    with pytest.raises(InputError, match=r"mask\.bool\(\)"):
        attention(q.expand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), v[:, :, :2], mask=torch.tril(torch.ones(2, 2)))


def test_case_3_a_float_mask_of_zeros_adds_nothing():
    q, v = torch.zeros(1, 1, 1, 2), torch.tensor([1.0, 3.0, 8.0]).view(1, 1, 3, 1)
    assert attention(q, torch.zeros(1, 1, 3, 2), v, mask=torch.zeros(1, 3)).item() == 4.0


@pytest.mark.parametrize(
    ("values", "queries", "want"),
    [([1, 2, 3, 4, 5], 2, [2.5, 3.0]), ([1, 2, 3, 4, 5], 1, [3.0]), ([1, 2], 5, [0.0, 0.0, 0.0, 1.0, 1.5])],
)
def test_case_5_the_causal_triangle_hangs_from_the_bottom_right(backend, dtype, uniform, values, queries, want):
    problem = uniform([float(x) for x in values], queries, dtype=dtype, visible=Visible(causal=True))
    assert run_or_skip(problem, backend).z.flatten().tolist() == want


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 2}, {"softcap": 2.0}])
def test_case_6_asking_for_weights_or_rows_does_not_change_the_answer(backend, options):
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    try:
        z = attention(q, k, v, backend=backend, **options)
    except UnsupportedError:
        pytest.skip("declined")
    with_weights, weights = attention(q, k, v, backend=backend, weights=True, **options)
    assert torch.equal(z, with_weights)
    assert weights.shape == (1, 2, 3, 3)
    assert weights.sum(-1).flatten().tolist() == pytest.approx([1.0] * 6, abs=1e-6)
    assert torch.allclose(weights @ v, z, atol=1e-6)
    if options.get("causal"):
        assert (weights.triu(1) == 0).all()
    if backend != "sdpa":
        assert torch.equal(attention(q, k, v, backend=backend, rows=True, **options)[0], z)


def test_case_8_a_window_of_two_sees_two_keys(backend, dtype, uniform):
    problem = uniform([1.0, 2.0, 3.0, 4.0], 4, dtype=dtype, visible=Visible(causal=True, window=2))
    answer = run_or_skip(problem, backend, Wanted(rows=True))
    assert answer.z.flatten().tolist() == [1.0, 1.5, 2.5, 3.5]
    assert answer.rows.visible.flatten().tolist() == [1, 2, 2, 2]


def test_case_8_one_more_token_sees_exactly_the_window(backend, uniform):
    problem = uniform([float(x) for x in range(11)], 1, visible=Visible(causal=True, window=4))
    answer = run_or_skip(problem, backend, Wanted(rows=True))
    assert answer.z.item() == (7 + 8 + 9 + 10) / 4
    assert answer.rows.visible.item() == 4


def test_case_8_a_window_without_causal_reaches_both_ways(backend, uniform):
    problem = uniform([1.0, 2.0, 3.0, 4.0, 5.0], 5, visible=Visible(window=2))
    answer = run_or_skip(problem, backend, Wanted(rows=True))
    assert answer.rows.visible.flatten().tolist() == [2, 3, 3, 3, 2]
    assert answer.z.flatten().tolist() == [1.5, 2.0, 3.0, 4.0, 4.5]


def test_case_8_a_window_of_zero_is_refused():
    x = torch.zeros(1, 1, 3, 2)
    with pytest.raises(InputError, match="Use None for no window"):
        attention(x, x, x, causal=True, window=0)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 129, 130, 1025])
def test_case_9_tiles_equal_the_dense_result_for_any_length(small_blocks, n):
    small_blocks(keys=64, scores=64 * 64)
    q, k, v = (torch.randn(2, 2, n, 16) for _ in range(3))
    padding = torch.ones(2, n, dtype=torch.bool)
    padding[1, : min(n - 1, 70)] = False  # the first tile is wholly hidden from every later row
    problem = Problem(q, k, v, Visible(causal=True, key_padding=padding))
    want, got = (run(problem, Wanted(rows=True), backend=name) for name in ("reference", "tiled"))
    assert (want.z - got.z).abs().max() <= 1e-5
    assert (want.rows.entropy - got.rows.entropy).abs().max() <= 1e-5
    assert torch.equal(want.rows.argmax, got.rows.argmax)
    assert torch.equal(want.rows.visible, got.rows.visible)


def test_case_11_a_query_head_reads_the_key_value_head_of_its_group(backend, dtype, uniform):
    problem = uniform([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], 2, heads=4, dtype=dtype)
    assert run(problem, backend=backend).z[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    tiled = replace(problem, kv_map=(0, 1, 0, 1))
    assert run(tiled, backend=backend).z[0, :, 0, 0].tolist() == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(("heads", "groups"), [(6, 4), (4, 3)])
def test_case_11_head_counts_that_do_not_divide_are_refused_with_both_numbers(heads, groups):
    with pytest.raises(ShapeError, match=f"{heads} query heads and {groups} key-value heads"):
        attention(torch.zeros(1, heads, 2, 4), torch.zeros(1, groups, 2, 4), torch.zeros(1, groups, 2, 4))


def test_case_18_the_entropy_of_a_one_hot_row_is_exactly_zero(backend, dtype):
    k = torch.eye(5, dtype=dtype).view(1, 1, 5, 5)
    q = (k * 30000 if dtype == torch.float16 else k * 1e6).requires_grad_()
    rows = run_or_skip(Problem(q, k, k), backend, Wanted(rows=True)).rows
    assert rows.entropy.flatten().tolist() == [0.0] * 5
    assert not torch.signbit(rows.entropy).any()
    assert rows.max_weight.flatten().tolist() == [1.0] * 5
    (gradient,) = torch.autograd.grad(rows.entropy.sum(), q)
    assert gradient.isfinite().all()


def test_case_18_uniform_rows_under_a_causal_mask(backend, dtype, uniform):
    rows = run_or_skip(
        uniform([1.0] * 4, 4, dtype=dtype, visible=Visible(causal=True)), backend, Wanted(rows=True)
    ).rows
    entropy = rows.entropy.flatten()
    assert entropy.tolist() == pytest.approx([0.0, 0.6931, 1.0986, 1.3863], abs=5e-5)
    assert entropy[0] == 0.0
    assert entropy.mean().item() == pytest.approx(0.7945, abs=5e-5)
    several = rows.visible.flatten() > 1
    assert (entropy[several] / rows.visible.flatten()[several].log()).mean().item() == pytest.approx(1.0)

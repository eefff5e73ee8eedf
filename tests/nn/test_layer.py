"""The layer against its formulas, and the exact values of the cases."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from headwise.nn import KVCache, MultiHeadAttention

BACKENDS = ("tiled", "eager", "reference")
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def uniform(d: int, n_heads: int = 1, *, n_kv_heads: int | None = None, **options: Any) -> MultiHeadAttention:
    """A layer whose queries are 0 and whose values and output are its input: every row is the mean of visible rows."""
    layer = MultiHeadAttention(d, n_heads, n_kv_heads=n_kv_heads, **options).eval()
    with torch.no_grad():
        layer.W_Q.zero_()
        layer.W_V.copy_(torch.eye(d)[:, : layer.W_V.shape[1]])
        layer.W_O.copy_(torch.eye(layer.W_O.shape[0], d))
    return layer


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[None, :, None]


@pytest.fixture(params=[None, *BACKENDS], ids=str)
def backend(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def finite_gradients(layer: MultiHeadAttention, out: torch.Tensor) -> bool:
    out.float().sum().backward()
    return all(p.grad is None or bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_every_option_is_its_formula(option, make, formulas, causal, padded):
    layer, x = make(**option), torch.randn(3, 11, 7, dtype=torch.float64)
    padding = torch.ones(3, 11, dtype=torch.bool)
    padding[1, 7:] = False
    padding[2, 2:] = False
    call: dict[str, Any] = {"causal": causal, "key_padding": padding if padded else None}
    real = padding if padded else torch.ones_like(padding)  # what comes out at padding means nothing
    truth = formulas(layer, x, **call)
    out, rows, weights = layer(x, **call, rows=True, weights=True)
    assert_close(out[real], truth.out[real])
    assert_close(layer(x, **call), out)
    by_token = (t.movedim(2, 1) for t in (layer.results(x, **call), truth.terms, weights, truth.patterns))
    terms, true_terms, pattern, true_pattern = (t[real] for t in by_token)
    assert_close(terms, true_terms)
    assert_close(pattern, true_pattern)
    entropy, largest = (t.movedim(2, 1)[real] for t in (rows.entropy, rows.max_weight))
    assert_close(entropy, truth.entropy.movedim(2, 1)[real], atol=1e-9, rtol=1e-9)
    assert_close(largest, true_pattern.amax(-1))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_backend_and_dtype(make, formulas, options, backend, dtype):
    for name in ("all", "summed", "mean"):
        layer = make(**options[name]).to(dtype)
        x = torch.randn(2, 11, 7).to(dtype)
        out = layer(x, causal=True, backend=backend)
        assert out.dtype == dtype
        truth = formulas(layer, x, causal=True).out
        assert_close(out.double(), truth, atol=DTYPES[dtype] * float(truth.abs().max().clamp(min=1)), rtol=0)


def test_mask_and_bias_and_gates(make, formulas):
    layer, x = make(d_k=5, n_kv_heads=3), torch.randn(2, 11, 7, dtype=torch.float64)
    mask = torch.rand(2, 1, 11, 11) > 0.3
    bias = torch.randn(1, 6, 11, 11)
    gates = torch.randn(2, 6)
    truth = formulas(layer, x, mask=mask[:, 0], bias=bias, gates=gates)
    assert_close(layer(x, mask=mask, bias=bias.double(), gates=gates.double()), truth.out)
    assert_close(layer.results(x, mask=mask, bias=bias, gates=gates), truth.terms, atol=1e-6, rtol=1e-6)
    assert_close(layer(x, gates=gates[1].double()), formulas(layer, x, gates=gates[1]).out)


def test_cross_attention_with_a_context_of_its_own_width(make, formulas):
    layer = make(d_k=5, d_context=3, n_kv_heads=2, bias=True)
    x, context = torch.randn(2, 5, 7, dtype=torch.float64), torch.randn(2, 11, 3, dtype=torch.float64)
    padding = torch.rand(2, 11) > 0.3
    truth = formulas(layer, x, context, key_padding=padding)
    assert_close(layer(x, context, key_padding=padding), truth.out)
    assert_close(layer(x, layer.encode_context(context, padding)), truth.out)
    memory = layer.encode_context(context, padding)
    steps = [layer(x[:, i : i + 1], memory) for i in range(5)]
    assert_close(torch.cat(steps, dim=1), truth.out)
    assert isinstance(memory, KVCache)
    assert memory.length == 11


def test_context_of_a_layer_without_d_context(make, formulas):
    layer, x, context = make(d_k=5), torch.randn(2, 5, 7).double(), torch.randn(2, 3, 7).double()
    assert_close(layer(x, context), formulas(layer, x, context).out)


def test_cross_attention_with_rotary_and_its_own_positions(make):
    layer, x = make(d_k=4, rotary=True), torch.randn(2, 5, 7).double()
    places = torch.arange(5)
    assert_close(layer(x, x.clone(), positions=places, context_positions=places), layer(x))
    memory = layer.encode_context(x, context_positions=places)
    assert_close(layer(x, memory, positions=places), layer(x))
    assert_close(layer(x, positions=places + 17), layer(x), atol=1e-6, rtol=1e-6)  # only distances count


def test_head_views_are_the_same_storage(make):
    layer = make(d_k=5, d_v=3, n_kv_heads=3, bias=True)
    assert len(layer.heads) == 6
    assert [head.kv_head for head in layer.heads] == [0, 0, 1, 1, 2, 2]
    shapes = {"W_Q": (7, 5), "W_K": (7, 5), "W_V": (7, 3), "W_O": (3, 7), "b_Q": (5,), "b_K": (5,), "b_V": (3,)}
    for name, shape in shapes.items():
        view = getattr(layer.heads[-1], name)
        assert tuple(view.shape) == shape
        assert view.untyped_storage().data_ptr() == getattr(layer, name).untyped_storage().data_ptr()
    with torch.no_grad():
        layer.heads[4].W_K.fill_(3.0)
    assert bool((layer.W_K[:, 10:] == 3).all())
    assert not bool((layer.W_K[:, :10] == 3).any())
    x = torch.randn(2, 5, 7).double()
    q, k, v = layer.project(x)
    assert_close(q[:, 4], x @ layer.heads[4].W_Q + layer.heads[4].b_Q)
    assert_close(k[:, 2], x @ layer.heads[4].W_K + layer.heads[4].b_K)
    assert_close(v[:, 2], x @ layer.heads[4].W_V + layer.heads[4].b_V)


def test_head_views_follow_the_layer_to_another_dtype(make):
    layer = make(d_k=5)
    head = layer.heads[1]
    layer.float()
    assert head.W_Q.dtype == torch.float32
    assert repr(head) == "HeadView(head 1 of 6, key-value head 1)"


@pytest.mark.parametrize("masked", [None, "-inf", "finfo.min"])
def test_case_1_a_query_that_sees_nothing(masked, backend, dtype):
    layer, x = (
        uniform(2).to(dtype),
        torch.tensor([[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]], dtype=dtype, requires_grad=True),
    )
    mask = torch.tensor([[True, True, True], [False, False, False], [True, True, True]])
    if masked is not None:
        low = -torch.inf if masked == "-inf" else torch.finfo(dtype).min
        mask = torch.zeros(3, 3, dtype=dtype).masked_fill(~mask, low)
    out, weights = layer(x, mask=mask, weights=True, backend=backend)
    assert out[0, :2].tolist() == [[2.0, 3.0], [0.0, 0.0]]
    assert weights[0, 0, 1].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(layer(x, mask=mask, backend=backend), out)
    out[0, 0].sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *layer.parameters()))


def test_case_2_bf16_masks_do_not_overflow(backend):
    layer = uniform(2).bfloat16()
    x = torch.tensor([[[5.0, 7.0], [1.0, 3.0]]], dtype=torch.bfloat16)  # [pad, tok]
    low = torch.finfo(torch.bfloat16).min
    padding = torch.tensor([[low, 0.0]], dtype=torch.bfloat16)[:, None, None].expand(1, 1, 2, 2)
    triangle = torch.tensor([[0.0, low], [0.0, 0.0]], dtype=torch.bfloat16)
    out, weights = layer(x, mask=triangle, bias=padding, weights=True, backend=backend)
    assert weights[0, 0].tolist() == [[0.0, 0.0], [0.0, 1.0]]
    assert out[0].tolist() == [[0.0, 0.0], [1.0, 3.0]]


def test_case_2_fp16_scores_do_not_overflow(backend):
    layer = MultiHeadAttention(128, 1, d_v=1, dtype=torch.float16).eval()
    with torch.no_grad():
        for W in (layer.W_Q, layer.W_K):
            W.copy_(torch.eye(128) * 64)
        layer.W_V.zero_()
        layer.W_V[0] = 1.0
        layer.W_O.fill_(1.0)
    x = torch.ones(1, 2, 128, dtype=torch.float16)
    out, weights = layer(x, weights=True, backend=backend)
    assert weights.flatten().tolist() == [0.5] * 4
    assert bool((out == 1).all())
    assert finite_gradients(layer, out)


def test_case_2_mask_of_another_dtype(backend):
    layer, x = uniform(1), column(1.0, 3.0)
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]], dtype=torch.bfloat16)
    assert layer(x, mask=mask, backend=backend).flatten().tolist() == [1.0, 2.0]


def test_case_3_true_means_may_attend(backend, dtype):
    layer, x = uniform(1).to(dtype), column(1.0, 3.0, 8.0).to(dtype)
    keep = torch.tensor([[True, True, False]])
    assert layer(x, key_padding=keep, backend=backend).flatten().tolist() == [2.0] * 3
    assert layer(x, mask=keep.expand(3, 3), backend=backend).flatten().tolist() == [2.0] * 3
    for wrong in (keep.long(), keep.to(torch.uint8), keep.float()):
        with pytest.raises(ValueError, match="bool"):
            layer(x, key_padding=wrong)
        with pytest.raises(ValueError, match="bool"):
            layer(x, mask=wrong.expand(3, 3))
    with pytest.raises(ValueError, match="0 and 1"):
        layer(column(1.0, 3.0).to(dtype), mask=torch.tril(torch.ones(2, 2)))


def test_case_5_the_triangle_hangs_from_the_bottom_right(backend, dtype):
    layer, how = uniform(1).to(dtype), {"causal": True, "backend": backend}
    five, two = column(1.0, 2.0, 3.0, 4.0, 5.0).to(dtype), column(1.0, 2.0).to(dtype)
    assert layer(two, five, **how).flatten().tolist() == [2.5, 3.0]
    assert layer(two[:, :1], five, **how).flatten().tolist() == [3.0]
    out = layer(five, two, **how)
    assert out.flatten().tolist() == [0.0, 0.0, 0.0, 1.0, 1.5]
    assert finite_gradients(layer, out)


def test_case_6_asking_for_weights_changes_nothing():
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(8, 2, dropout=0.5).eval(), torch.randn(1, 3, 8)
    plain, (out, weights) = layer(x, causal=True), layer(x, causal=True, weights=True)
    assert torch.equal(plain, layer(x, causal=True))
    assert_close(out, plain, atol=1e-6, rtol=0)
    assert weights.shape == (1, 2, 3, 3)
    assert bool((weights.triu(1) == 0).all())
    assert_close(weights.sum(-1), torch.ones(1, 2, 3))
    layer.train()
    torch.manual_seed(1)
    without = layer(x, causal=True)
    torch.manual_seed(1)
    out, rows, weights = layer(x, causal=True, weights=True, rows=True)
    assert torch.equal(out, without)
    assert not torch.allclose(out, plain)
    assert_close(weights.sum(-1), torch.ones(1, 2, 3))
    assert_close(rows.max_weight, weights.amax(-1))


def test_case_8_a_window_of_w_is_w_keys(backend, dtype):
    layer, x = uniform(1, window=2).to(dtype), column(1.0, 2.0, 3.0, 4.0).to(dtype)
    out, rows = layer(x, causal=True, rows=True, backend=backend)
    assert out.flatten().tolist() == [1.0, 1.5, 2.5, 3.5]
    assert rows.visible.flatten().tolist() == [1, 2, 2, 2]
    assert layer(x, backend=backend).flatten().tolist() == [1.5, 2.0, 3.0, 3.5]  # without causal |i - j| < 2
    assert finite_gradients(layer, out)


def test_case_8_a_window_with_a_cache():
    layer, x = uniform(1, window=4), torch.arange(11.0)[None, :, None]
    for cache in (layer.new_cache(1), layer.new_cache(1, 11), KVCache(1, 11, n_kv_heads=1, d_k=1)):
        layer(x[:, :10], cache=cache, update=True)
        out, rows = layer(x[:, 10:], cache=cache, update=True, rows=True)
        assert rows.visible.item() == 4
        assert out.item() == 8.5


def test_case_11_query_heads_read_their_group(backend, dtype):
    layer = uniform(4, 4, n_kv_heads=2).to(dtype)
    with torch.no_grad():
        layer.W_V.zero_()
        layer.W_V[0, 1] = 1.0
    x = torch.ones(1, 3, 4, dtype=dtype)
    assert layer(x, backend=backend)[0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    for heads, groups in ((6, 4), (4, 3)):
        with pytest.raises(ValueError, match=rf"{heads} query heads cannot share {groups} key-value heads"):
            MultiHeadAttention(12, heads, n_kv_heads=groups)


def test_eval_is_deterministic_and_dropout_is_training_only(make):
    layer, x = make(d_k=5, dtype=torch.float32), torch.randn(2, 11, 7)
    dropping = MultiHeadAttention(7, 6, d_k=5, dropout=0.5).eval()
    dropping.load_state_dict(layer.state_dict())
    assert torch.equal(dropping(x, causal=True), layer(x, causal=True))


def test_empty_and_single_inputs(make):
    layer = make(d_k=5)
    assert layer(torch.zeros(2, 0, 7).double()).shape == (2, 0, 7)
    one = torch.randn(2, 1, 7).double()
    assert_close(layer(one), layer(one, causal=True))
    assert layer(one, torch.zeros(2, 0, 7).double()).abs().max() == 0


def test_the_summed_layer_is_one_wide_head(make):
    summed = make(d_k=5, d_v=3, softmax="summed")
    wide = MultiHeadAttention(7, 1, d_k=30, d_v=18, dtype=torch.float64).eval()
    wide.load_state_dict(summed.state_dict())
    x = torch.randn(2, 11, 7).double()
    out, rows, weights = summed(x, causal=True, rows=True, weights=True)
    assert_close(out, wide(x, causal=True))
    assert rows.entropy.shape == (2, 1, 11)
    assert weights.shape == (2, 1, 11, 11)


def test_mean_has_one_shared_output_matrix(make):
    layer = make(d_k=5, d_v=3, combine="mean")
    assert tuple(layer.W_O.shape) == (3, 7)
    assert all(head.W_O.data_ptr() == layer.W_O.data_ptr() for head in layer.heads)


def test_printing_names_what_is_special(make):
    plain = repr(MultiHeadAttention(8, 2))
    assert plain == "MultiHeadAttention(d_model=8, n_heads=2, n_kv_heads=2, d_k=4, d_v=4)"
    assert "window=3" in repr(MultiHeadAttention(8, 2, window=3, rotary=True))


def test_help_speaks_of_this_layer_and_not_of_torchs_module():
    shown = inspect.getdoc(MultiHeadAttention.__init__)
    assert shown != inspect.getdoc(torch.nn.Module.__init__)
    assert shown is not None
    assert "the class says what each argument means" in shown

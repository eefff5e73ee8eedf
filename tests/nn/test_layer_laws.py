"""Laws that hold for every layer of this kind, on random sizes and options."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headwise.nn import MultiHeadAttention

D_MODEL = 7


@st.composite
def layers(draw: st.DrawFn, *, grouped: bool = True, summed: bool = True) -> MultiHeadAttention:
    groups = draw(st.sampled_from([1, 2, 3]))
    n_heads = groups * draw(st.sampled_from([1, 2, 3])) if grouped else groups
    options: dict[str, Any] = {
        "d_k": draw(st.sampled_from([2, 4])), "d_v": draw(st.sampled_from([1, 3, 5])),
        "window": draw(st.sampled_from([None, 1, 3])), "softcap": draw(st.sampled_from([None, 0.8])),
        "bias": draw(st.booleans()), "combine": draw(st.sampled_from(["concat", "mean"])),
    }  # fmt: skip
    if summed and (not grouped or groups == n_heads) and draw(st.booleans()):
        options["softmax"] = "summed"
    else:
        options |= {
            "n_kv_heads": groups, "rotary": draw(st.sampled_from([None, 100.0])), "qk_norm": draw(st.booleans()),
            "sinks": draw(st.booleans()),
        }  # fmt: skip
    torch.manual_seed(draw(st.integers(0, 10_000)))
    layer = MultiHeadAttention(D_MODEL, n_heads, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def inputs(layer: MultiHeadAttention, length: int = 11) -> torch.Tensor:
    return torch.randn(2, length, layer.d_model, dtype=torch.float64)


def blocks(layer: MultiHeadAttention) -> torch.Tensor:
    """W_O as (heads, d_v, d_model)."""
    return layer.W_O.view(layer.n_heads, layer.d_v, layer.d_model)


@settings(max_examples=40, deadline=None)
@given(layer=layers(), causal=st.booleans(), gated=st.booleans())
def test_the_sum_of_results_is_the_output(layer, causal, gated):
    x = inputs(layer)
    gates = torch.randn(2, layer.n_heads).double() if gated else None
    total = layer.results(x, causal=causal, gates=gates).sum(dim=1)
    bias = 0 if layer.b_O is None else layer.b_O
    assert_close(total + bias, layer(x, causal=causal, gates=gates))


@settings(max_examples=30, deadline=None)
@given(layer=layers(grouped=False), causal=st.booleans(), data=st.data())
def test_permuting_heads_changes_nothing(layer, causal, data):
    order = torch.tensor(data.draw(st.permutations(range(layer.n_heads))))
    x = inputs(layer)
    out, rows = layer(x, causal=causal, rows=True)
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "sinks"):
            parameter = getattr(layer, name)
            if parameter is not None:
                parameter.copy_(parameter.unflatten(-1, (layer.n_heads, -1))[..., order, :].flatten(-2))
        if layer.combine == "concat":
            layer.W_O.copy_(blocks(layer)[order].flatten(0, 1))
    permuted, permuted_rows = layer(x, causal=causal, rows=True)
    assert_close(permuted, out)
    if layer.softmax == "per_head":
        assert_close(permuted_rows.entropy, rows.entropy[:, order])


@settings(max_examples=30, deadline=None)
@given(layer=layers(), head=st.integers(0, 8))
def test_gate_0_is_the_block_of_w_o_zeroed(layer, head):
    head %= layer.n_heads
    x = inputs(layer)
    gates = torch.ones(layer.n_heads).double()
    gates[head] = 0.0
    gated = layer(x, causal=True, gates=gates)
    if layer.combine == "mean":
        terms = layer.results(x, causal=True)
        without = terms.sum(1) - terms[:, head] + (0 if layer.b_O is None else layer.b_O)
    else:
        with torch.no_grad():
            layer.heads[head].W_O.zero_()
        without = layer(x, causal=True)
    assert_close(gated, without)


@settings(max_examples=20, deadline=None)
@given(layer=layers(summed=False), causal=st.booleans())
def test_grouped_heads_equal_repeated_ones(layer, causal):
    share = layer.n_heads // layer.n_kv_heads
    full = MultiHeadAttention(
        D_MODEL, layer.n_heads, d_k=layer.d_k, d_v=layer.d_v, window=layer.window, softcap=layer.softcap,
        bias=layer.b_O is not None, combine=layer.combine, rotary=layer.rotary, qk_norm=layer.qk_norm,
        sinks=layer.sinks is not None, dtype=torch.float64,
    ).eval()  # fmt: skip
    state = layer.state_dict()
    for name, width in (("W_K", layer.d_k), ("W_V", layer.d_v), ("b_K", layer.d_k), ("b_V", layer.d_v)):
        if name in state:
            split = state[name].unflatten(-1, (layer.n_kv_heads, width))
            state[name] = split.repeat_interleave(share, dim=-2).flatten(-2)
    full.load_state_dict(state)
    x = inputs(layer)
    assert_close(layer(x, causal=causal), full(x, causal=causal))


@settings(max_examples=30, deadline=None)
@given(layer=layers(), cut=st.integers(1, 10))
def test_a_causal_prefix_is_unaffected_by_what_follows(layer, cut):
    x = inputs(layer)
    other = torch.cat((x[:, :cut], torch.full_like(x[:, cut:], torch.nan)), dim=1)
    assert_close(layer(other, causal=True)[:, :cut], layer(x, causal=True)[:, :cut])
    assert_close(layer(x[:, :cut], causal=True), layer(x, causal=True)[:, :cut])


@settings(max_examples=30, deadline=None)
@given(layer=layers(), causal=st.booleans(), pads=st.integers(0, 7))
def test_padding_and_batching_change_nothing(layer, causal, pads):
    x = inputs(layer)
    alone = layer(x[:1], causal=causal)
    padded = torch.cat((torch.full((2, pads, D_MODEL), torch.nan).double(), x), dim=1)
    keep = torch.arange(11 + pads).expand(2, -1) >= pads
    assert_close(layer(padded, causal=causal, key_padding=keep)[:1, pads:], alone)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), n_heads=st.sampled_from([1, 2, 5]), window=st.sampled_from([None, 3]))
def test_the_summed_layer_is_one_wide_head(seed, n_heads, window):
    torch.manual_seed(seed)
    summed = MultiHeadAttention(7, n_heads, d_k=3, d_v=2, softmax="summed", window=window, dtype=torch.float64)
    wide = MultiHeadAttention(7, 1, d_k=3 * n_heads, d_v=2 * n_heads, window=window, dtype=torch.float64)
    wide.load_state_dict(summed.state_dict())
    x = inputs(summed)
    assert_close(summed(x, causal=True), wide(x, causal=True))

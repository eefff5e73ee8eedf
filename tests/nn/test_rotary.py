"""Rotary positions: distances alone count, precision does not follow the layer's dtype, positions skip padding."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headwise.nn import MultiHeadAttention, Rotary, token_positions


def test_values_of_the_first_position():
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    c, s = math.cos(1.0), math.sin(1.0)
    c2, s2 = math.cos(0.01), math.sin(0.01)
    halves = [c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2]
    assert_close(Rotary(4)(x, torch.tensor([1])).flatten().tolist(), halves, atol=1e-9, rtol=1e-7)
    pairs = [c - 2 * s, 2 * c + s, 3 * c2 - 4 * s2, 4 * c2 + 3 * s2]
    turned = Rotary(4, interleaved=True)(x, torch.tensor([1]))
    assert_close(turned.flatten().tolist(), pairs, atol=1e-9, rtol=1e-7)


@settings(max_examples=25, deadline=None)
@given(shift=st.integers(0, 500), interleaved=st.booleans(), dims=st.sampled_from([2, 4, 6]))
def test_only_distances_count(shift, interleaved, dims):
    torch.manual_seed(0)
    rotary = Rotary(6, dims=dims, interleaved=interleaved).double()
    q, k = torch.randn(2, 1, 1, 5, 6, dtype=torch.float64)
    at = torch.arange(5)
    near = rotary(q, at) @ rotary(k, at).transpose(2, 3)
    far = rotary(q, at + shift) @ rotary(k, at + shift).transpose(2, 3)
    assert_close(near, far, atol=1e-9, rtol=1e-9)
    assert torch.equal(rotary(q, at)[..., dims:], q[..., dims:])


def test_half_precision_does_not_round_the_frequencies():
    layer = MultiHeadAttention(16, 2, rotary=True).half()
    assert layer.rotary.inv_freq.dtype == torch.float32
    x = torch.randn(1, 1, 1, 8)
    at = torch.tensor([30011])
    exact = Rotary(8)(x.double(), at)
    assert_close(layer.rotary(x.half(), at).double(), exact, atol=2e-3, rtol=2e-3)
    # the guard can fail: frequencies rounded to half give another angle altogether
    rounded = Rotary(8, frequencies=Rotary(8).inv_freq.half().float().tolist())
    assert (rounded(x.double(), at) - exact).abs().max() > 0.1


def test_to_empty_and_meta_keep_the_frequencies():
    with torch.device("meta"):
        layer = MultiHeadAttention(16, 2, rotary=500.0)
    assert layer.rotary.inv_freq.is_meta
    layer = layer.to_empty(device="cpu")
    assert torch.equal(layer.rotary.inv_freq, Rotary(8, theta=500.0).inv_freq)
    assert "rotary.inv_freq" not in layer.state_dict()


def test_pickle_keeps_it():
    rotary = pickle.loads(pickle.dumps(Rotary(4, frequencies=[0.5, 0.25], attention_scaling=1.5)))
    x = torch.ones(1, 1, 1, 4)
    assert_close(rotary(x, torch.tensor([0])), x * 1.5)
    assert rotary.scaled


def test_positions_count_real_tokens():
    padding = torch.tensor([[False, True, True, False, True], [True, True, True, True, True]])
    assert token_positions(padding).tolist() == [[0, 0, 1, 1, 2], [0, 1, 2, 3, 4]]
    assert token_positions(padding, torch.tensor([3, 0]))[0].tolist() == [2, 3, 4, 4, 5]
    assert token_positions(padding, 2)[1].tolist() == [2, 3, 4, 5, 6]


def test_partial_rotary_in_a_layer():
    layer = MultiHeadAttention(12, 2, rotary=Rotary(6, dims=2)).double()
    x = torch.randn(1, 5, 12).double()
    assert_close(layer(x, positions=torch.arange(5) + 7), layer(x))
    with pytest.raises(ValueError, match="made for d_k = 6"):
        MultiHeadAttention(12, 3, rotary=Rotary(6))

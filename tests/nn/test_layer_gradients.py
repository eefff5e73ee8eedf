"""Gradients: exact in float64 over a grid of options, and as good as plain torch's in lower precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional

from headwise.nn import MultiHeadAttention

GRID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal, bias": ({"bias": True}, {"causal": True}),
    "grouped, rotary": ({"n_kv_heads": 1, "rotary": 10.0}, {"causal": True}),
    "window, softcap": ({"window": 2, "softcap": 0.8}, {"causal": True}),
    "window both ways, sinks": ({"window": 2, "sinks": True}, {}),
    "qk_norm, widths": ({"qk_norm": True, "d_v": 3}, {"causal": True}),
    "mean": ({"combine": "mean", "d_v": 3}, {"causal": True}),
    "summed": ({"softmax": "summed"}, {"causal": True}),
    "padding": ({}, {"key_padding": torch.tensor([[False, True, True, True]])}),
    "a row without keys": ({"sinks": True}, {"mask": torch.tensor([[True] * 4, [False] * 4, [True] * 4, [True] * 4])}),
    "everything": (
        {"n_kv_heads": 1, "rotary": 10.0, "window": 3, "softcap": 0.9, "qk_norm": True, "sinks": True, "bias": True},
        {"causal": True, "key_padding": torch.tensor([[False, True, True, True]])},
    ),
}


@pytest.mark.parametrize("backend", ["tiled", "eager"])
@pytest.mark.parametrize("name", list(GRID))
def test_gradcheck(name, backend):
    options, call = GRID[name]
    torch.manual_seed(1)
    layer = MultiHeadAttention(3, 2, **({"d_k": 2} | options), dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    gates = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    if layer.softmax == "summed":
        bias = bias[:, :1].detach().requires_grad_()

    def run(x: Tensor, gates: Tensor, bias: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(
            layer, given, (x,), {"gates": gates, "bias": bias, "backend": backend, **call}
        )

    assert gradcheck(run, (x, gates, bias, *parameters), eps=1e-6, atol=1e-6)


def plain_torch(layer: MultiHeadAttention, x: Tensor) -> Tensor:
    """The same layer written with torch's own functions, in x's dtype."""
    heads = []
    for W, count in ((layer.W_Q, layer.n_heads), (layer.W_K, layer.n_kv_heads), (layer.W_V, layer.n_kv_heads)):
        heads.append((x @ W).unflatten(-1, (count, -1)).transpose(1, 2))
    k, v = (t.repeat_interleave(layer.n_heads // layer.n_kv_heads, dim=1) for t in heads[1:])
    scores = heads[0] @ k.transpose(2, 3) / math.sqrt(layer.d_k)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    pattern = functional.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return (pattern @ v).transpose(1, 2).flatten(2) @ layer.W_O


def gradients(out: Tensor, x: Tensor, layer: MultiHeadAttention) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [None, "tiled", "eager"])
def test_error_is_at_most_twice_plain_torchs(dtype, backend):
    torch.manual_seed(0)
    layer = MultiHeadAttention(62, 6, n_kv_heads=3, d_k=13, dtype=dtype)
    exact = MultiHeadAttention(62, 6, n_kv_heads=3, d_k=13, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 37, 62).to(dtype).requires_grad_()
    x_exact = x.detach().double().requires_grad_()
    truth = gradients(plain_torch(exact, x_exact), x_exact, exact)
    ours = gradients(layer(x, causal=True, backend=backend), x, layer)
    plain = gradients(plain_torch(layer, x), x, layer)
    for mine, theirs, true in zip(ours, plain, truth, strict=True):
        error, their_error = ((t.double() - true).abs().max() for t in (mine, theirs))
        assert error <= 2 * their_error + 1e-6 * true.abs().max()


def test_case_18_entropy_has_finite_gradients():
    layer = MultiHeadAttention(4, 2)
    x = torch.randn(1, 5, 4) * 100
    x.requires_grad_()
    _, rows = layer(x, causal=True, rows=True)
    rows.entropy.sum().backward()
    assert bool(x.grad.isfinite().all())
    assert bool((rows.entropy[..., 0] == 0).all())

"""What the tests of the layer share: the layer by its formulas, in float64, head by head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.nn import MultiHeadAttention


@dataclass(frozen=True)
class Formulas:
    """What a layer computes, from one loop over its heads."""

    out: Tensor
    terms: Tensor
    patterns: Tensor
    entropy: Tensor


def turned(x_BTD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotary as multiplication by complex numbers: channel i and i + D/2 are one number."""
    half = x_BTD.shape[-1] // 2
    frequency = (1.0 / theta ** (torch.arange(half, dtype=torch.float32) / half)).double()
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions_BT.double()[..., None] * frequency)
    number = torch.complex(x_BTD[..., :half], x_BTD[..., half:]) * turn
    return torch.cat((number.real, number.imag), dim=-1)


def seen_by(layer: MultiHeadAttention, q: int, k: int, causal: bool, key_padding: Tensor | None, batch: int) -> Tensor:
    """(B, Q, K) bool, one entry at a time."""
    seen = torch.zeros(batch, q, k, dtype=torch.bool)
    for b in range(batch):
        for i in range(q):
            for j in range(k):
                at = i + k - q
                ok = (j <= at) if causal else True
                if layer.window is not None:
                    ok = ok and (at - j < layer.window if causal else abs(at - j) < layer.window)
                seen[b, i, j] = ok and (key_padding is None or bool(key_padding[b, j]))
    return seen


def layer_by_formulas(
    layer: MultiHeadAttention,
    x: Tensor,
    context: Tensor | None = None,
    *,
    causal: bool = False,
    key_padding: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    positions: Tensor | None = None,
) -> Formulas:
    """softmax(scale * x W_Q^i (x W_K^i)^T) x W_V^i W_O^i for every head i, added up."""
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    x = x.detach().double()
    source = x if context is None else context.detach().double()
    batch, q, k = x.shape[0], x.shape[1], source.shape[1]
    seen = seen_by(layer, q, k, causal, key_padding, batch)
    if mask is not None:
        seen = seen & mask
    if positions is None:
        positions = torch.arange(q).expand(batch, q)
    scores, values = [], []
    for i in range(layer.n_heads):
        g = i // (layer.n_heads // layer.n_kv_heads)
        q_i = x @ p["W_Q"][:, i * layer.d_k : (i + 1) * layer.d_k]
        k_i = source @ p["W_K"][:, g * layer.d_k : (g + 1) * layer.d_k]
        v_i = source @ p["W_V"][:, g * layer.d_v : (g + 1) * layer.d_v]
        if "b_Q" in p:
            q_i = q_i + p["b_Q"][i * layer.d_k : (i + 1) * layer.d_k]
            k_i = k_i + p["b_K"][g * layer.d_k : (g + 1) * layer.d_k]
            v_i = v_i + p["b_V"][g * layer.d_v : (g + 1) * layer.d_v]
        if layer.qk_norm:
            q_i = q_i / (q_i.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["norm_Q"]
            k_i = k_i / (k_i.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["norm_K"]
        if layer.rotary is not None:
            q_i = turned(q_i, positions, layer.rotary.theta)
            k_i = turned(k_i, positions, layer.rotary.theta)
        scores.append(q_i @ k_i.transpose(1, 2))
        values.append(v_i)
    if layer.softmax == "summed":
        scores = [torch.stack(scores).sum(0)] * layer.n_heads
    terms, patterns, entropies = [], [], []
    for i, (score, v_i) in enumerate(zip(scores, values, strict=True)):
        score = score * layer.scale
        if layer.softcap is not None:
            score = layer.softcap * torch.tanh(score / layer.softcap)
        if bias is not None:
            score = score + bias.double().expand(batch, layer.n_heads, q, k)[:, i]
        weight = torch.exp(score) * seen
        keys = weight.sum(-1, keepdim=True)
        total = keys + torch.exp(p["sinks"][i]) if "sinks" in p else keys
        pattern = torch.where(total > 0, weight / total, 0.0)
        own = torch.where(keys > 0, weight / keys, 0.0)
        z_i = pattern @ v_i
        if gates is not None:
            z_i = z_i * gates.double().expand(batch, layer.n_heads)[:, i, None, None]
        if layer.combine == "mean":
            terms.append(z_i @ p["W_O"] / layer.n_heads)
        else:
            terms.append(z_i @ p["W_O"][i * layer.d_v : (i + 1) * layer.d_v])
        patterns.append(pattern)
        entropies.append(-torch.xlogy(own, own).sum(-1))
    out = torch.stack(terms, dim=1).sum(1) + p.get("b_O", torch.zeros((), dtype=torch.float64))
    heads = 1 if layer.softmax == "summed" else layer.n_heads
    return Formulas(
        out, torch.stack(terms, dim=1), torch.stack(patterns[:heads], dim=1), torch.stack(entropies[:heads], dim=1)
    )


#: Options that together touch every branch of the layer; sizes are distinct primes or their multiples.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"d_k": 5},
    "bias": {"d_k": 5, "bias": True},
    "widths": {"d_k": 5, "d_v": 3},
    "grouped": {"d_k": 5, "n_kv_heads": 3},
    "multi-query": {"d_k": 5, "n_kv_heads": 1},
    "rotary": {"d_k": 4, "rotary": 100.0},
    "window": {"d_k": 5, "window": 3},
    "softcap": {"d_k": 5, "softcap": 0.7},
    "qk_norm": {"d_k": 5, "qk_norm": True},
    "sinks": {"d_k": 5, "sinks": True},
    "mean": {"d_k": 5, "d_v": 3, "combine": "mean"},
    "summed": {"d_k": 5, "d_v": 3, "softmax": "summed"},
    "summed, window, softcap": {"d_k": 5, "softmax": "summed", "window": 3, "softcap": 0.7},
    "scale": {"d_k": 5, "scale": 0.31},
    "all": {
        "d_k": 4, "d_v": 3, "n_kv_heads": 2, "rotary": 100.0, "window": 4, "softcap": 0.9, "qk_norm": True,
        "sinks": True, "bias": True,
    },
}  # fmt: skip


@pytest.fixture
def options() -> dict[str, dict[str, Any]]:
    return OPTIONS


@pytest.fixture(params=list(OPTIONS))
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(OPTIONS[request.param])


def random_layer(d_model: int = 7, n_heads: int = 6, *, dtype: torch.dtype = torch.float64, seed: int = 0, **kw: Any):
    """A layer in eval mode whose every parameter is random."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(d_model, n_heads, dtype=dtype, **kw).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer


@pytest.fixture
def make() -> Callable[..., MultiHeadAttention]:
    return random_layer


@pytest.fixture
def formulas() -> Callable[..., Formulas]:
    return layer_by_formulas

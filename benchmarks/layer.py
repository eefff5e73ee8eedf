"""The layer against ``nn.MultiheadAttention`` with the same weights, forward and backward; a decoding step; the parts.

    python -m benchmarks.layer          (8, 512, 512), 8 heads, causal, fp32; where the time goes; one decoding step

Answers (output and the gradient of the input) are compared first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.pairs import Pairs, paired
from headwise.nn import MultiHeadAttention, from_torch

Step = Callable[[], object]


def training_steps(batch: int, length: int, width: int, heads: int) -> tuple[Step, Step]:
    """One forward and backward of each layer on the same input; the answers are compared first."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(width, heads, batch_first=True)
    ours = from_torch(theirs)
    x = torch.randn(batch, length, width, requires_grad=True)
    weight = torch.randn(batch, length, width)
    hidden = nn.Transformer.generate_square_subsequent_mask(length)

    def step_ours() -> Tensor:
        return finish(ours, ours(x, causal=True))

    def step_theirs() -> Tensor:
        return finish(theirs, theirs(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0])

    def finish(layer: nn.Module, out: Tensor) -> Tensor:
        layer.zero_grad()
        x.grad = None
        out.backward(weight)
        return out

    a, grad_a = step_ours().detach(), x.grad
    b, grad_b = step_theirs().detach(), x.grad
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grad_a, grad_b, atol=1e-4, rtol=1e-3)
    return step_ours, step_theirs


def parts(batch: int, length: int, width: int, heads: int, rounds: int = 7) -> dict[str, float]:
    """Milliseconds of the layer's parts, forward and backward, each alone."""
    layer = MultiHeadAttention(width, heads, bias=True)
    x = torch.randn(batch, length, width, requires_grad=True)
    q, k, v = (t.detach().requires_grad_() for t in layer.project(x))
    z = torch.randn(batch, length, width, requires_grad=True)
    into = ((layer.W_Q, layer.b_Q), (layer.W_K, layer.b_K), (layer.W_V, layer.b_V))

    def projections() -> None:
        made = [linear(x, W.t(), b) for W, b in into]
        torch.autograd.backward(made, [t.detach() for t in made])

    def attention() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(out.detach())

    def mixing() -> None:
        out = linear(z, layer.W_O.t(), layer.b_O)
        out.backward(out.detach())

    def once(step: Step) -> float:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3

    named = {"projections": projections, "attention": attention, "mixing by W_O": mixing}
    return {name: statistics.median(once(step) for _ in range(rounds)) for name, step in named.items()}


def decode_steps(length: int, width: int, heads: int, groups: int) -> tuple[Step, Step]:
    """One decoding step with a cache, and the same products on tensors that are there already."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(width, heads, n_kv_heads=groups, d_k=width // heads).eval()
    cache = layer.new_cache(1, length + 1)
    prompt, x = torch.randn(1, length, width), torch.randn(1, 1, width)
    with torch.no_grad():
        layer(prompt, cache=cache, update=True)
        full = layer(torch.cat((prompt, x), dim=1), causal=True)[:, -1:]

    @torch.no_grad()
    def ours() -> Tensor:
        out: Tensor = layer(x, cache=cache, update=True)
        cache.crop(drop=1)
        return out

    @torch.no_grad()
    def theirs() -> Tensor:
        q = linear(x, layer.W_Q.t()).view(1, groups, heads // groups, -1)
        linear(x, layer.W_K.t()), linear(x, layer.W_V.t())
        z = scaled_dot_product_attention(q, cache.keys, cache.values)
        return linear(z.reshape(1, 1, -1), layer.W_O.t())

    torch.testing.assert_close(ours(), full, atol=1e-4, rtol=1e-3)
    ours()  # the cache's last column is x's, so that both sides read the same keys
    torch.testing.assert_close(theirs(), full, atol=1e-4, rtol=1e-3)
    return ours, theirs


def cases(full: bool) -> list[Pairs]:
    """Ratios of the layer's time to that of torch's."""
    shapes = [(8, 512, 512, 8)] + ([(8, 128, 512, 8), (1, 2048, 512, 8), (8, 512, 256, 4)] if full else [])
    found = []
    for batch, length, width, heads in shapes:
        name = (
            f"layer / nn.MultiheadAttention, forward and backward, ({batch}, {length}, {width}), {heads} heads, causal"
        )
        found.append(paired(name, *training_steps(batch, length, width, heads), rounds=15))
    name = "decoding step of the layer / its bare products, 32 query and 8 key-value heads, 8192 keys"
    return [*found, paired(name, *decode_steps(8192, 4096, 32, 8), rounds=15)]


if __name__ == "__main__":
    for case in cases(full=False):
        print("  ".join(case.row()))
    shares = parts(8, 512, 512, 8)
    whole = sum(shares.values())
    print("of which " + ", ".join(f"{name} {ms:.1f} ms ({ms / whole:.0%})" for name, ms in shares.items()))

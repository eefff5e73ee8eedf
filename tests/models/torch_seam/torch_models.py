"""Models written in plain torch, as people write them, each able to say what its attention weights are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH = 31, 15, 3, 11


class Attention(nn.Module):
    """Causal self-attention in one of the usual ways of writing it."""

    def __init__(self, way: str, heads: int = HEADS, groups: int | None = None) -> None:
        super().__init__()
        self.way, self.heads, self.groups = way, heads, groups or heads
        self.width = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, heads * self.width)
        self.kv = nn.Linear(WIDTH, 2 * self.groups * self.width)
        self.out = nn.Linear(heads * self.width, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.patterns: list[Tensor] | None = None

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*x.shape[:2], -1, self.width)
        k, v = self.kv(x).chunk(2, dim=-1)
        return tuple(one.reshape(shape).transpose(1, 2) for one in (self.q(x), k, v))  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        batch, length = x.shape[:2]
        rate = self.drop.p if self.training else 0.0
        each = self.heads // self.groups
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.patterns is not None:
            scores = q @ k.repeat_interleave(each, 1).mT * self.width**-0.5
            self.patterns.append(scores.masked_fill(~seen, -torch.inf).softmax(-1))
        if self.way == "is_causal":
            z = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True, enable_gqa=each > 1)
        elif self.way == "boolean mask":
            k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
            z = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=rate)
        elif self.way == "float mask":
            mask = torch.zeros(length, length, dtype=x.dtype).masked_fill(~seen, -torch.inf)
            z = functional.scaled_dot_product_attention(q, k, v, mask, rate)
        elif self.way == "three axes":
            z = functional.scaled_dot_product_attention(
                *(one.flatten(0, 1) for one in (q, k, v)), is_causal=True, dropout_p=rate
            ).unflatten(0, (batch, self.heads))
        elif self.way == "softmax":
            scores = q @ k.transpose(-2, -1) / self.width**0.5
            z = self.drop(functional.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)) @ v
        elif self.way == "bmm":
            q, k, v = (one.reshape(-1, length, self.width) for one in (q, k, v))
            scores = torch.bmm(q * self.width**-0.5, k.transpose(1, 2))
            scores = scores + torch.zeros_like(scores[:1]).masked_fill(~seen, torch.finfo(scores.dtype).min)
            z = torch.bmm(self.drop(scores.softmax(-1)), v).view(batch, self.heads, length, self.width)
        elif self.way == "einsum":
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.width**-0.5
            weights = self.drop(torch.softmax(scores.masked_fill(~seen, -1e9), dim=-1))
            z = torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)
        else:
            raise AssertionError(self.way)
        return self.out(z.transpose(1, 2).reshape(batch, length, -1))


WAYS = ["is_causal", "boolean mask", "float mask", "three axes", "softmax", "bmm", "einsum"]


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention
        self.mix = nn.Sequential(nn.Linear(WIDTH, 23), nn.GELU(), nn.Linear(23, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mix(self.after(x))


class SmallGPT(nn.Module):
    """A decoder of two layers."""

    def __init__(self, *attention: nn.Module) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(one) for one in attention)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OneHead(nn.Module):
    """A head as a module of its own, as in lectures; its results are joined by whoever holds it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(LENGTH, LENGTH)))
        self.patterns: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        weights = weights.masked_fill(self.tril[:length, :length] == 0, float("-inf"))
        weights = functional.softmax(weights, dim=-1)
        if self.patterns is not None:
            self.patterns.append(weights)
        return weights @ self.value(x)


class JoinedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead(WIDTH // HEADS) for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


def small_gpt(way: str, **more: Any) -> SmallGPT:
    torch.manual_seed(0)
    return SmallGPT(Attention(way, **more), Attention(way, **more)).eval()


def lecture_gpt() -> SmallGPT:
    torch.manual_seed(0)
    return SmallGPT(JoinedHeads(), JoinedHeads()).eval()


def some_ids(batch: int = 2, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)

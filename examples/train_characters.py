"""Train a small character model twice, on this project's layer and on ``nn.MultiheadAttention``, from the same weights.

The two loss curves agree; the first one is then looked into: what its heads do, and what it writes.

    python examples/train_characters.py                       # examples/emma.txt, 200 steps
    python examples/train_characters.py my.txt --steps 1000
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headwise.nn import KVCache, MultiHeadAttention

TEXT = Path(__file__).with_name("emma.txt")
CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Attention(nn.Module):
    """Causal self-attention by headwise's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MultiHeadAttention(WIDTH, HEADS, bias=True)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        out: Tensor = self.layer(x, causal=True, cache=cache, update=None if cache is None else True)
        return out


class TorchAttention(nn.Module):
    """The same by torch's layer."""

    def __init__(self, ours: Attention) -> None:
        super().__init__()
        self.layer = ours.layer.to_torch()

    def forward(self, x: Tensor, cache: None = None) -> Tensor:
        assert cache is None, "torch's layer has no cache"
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return out


class Block(nn.Module):
    """Attention and a feed-forward net, each normed before and added after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention: nn.Module = Attention()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), cache)
        return x + self.net(self.norm_2(x))


class CharacterModel(nn.Module):
    """Characters in, logits of the next character out; positions are learned, so the model adds them itself."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        start = 0 if caches is None else caches[0].length
        x = self.letters(tokens) + self.places(torch.arange(start, start + tokens.shape[1]))
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        logits: Tensor = self.out(self.norm(x))
        return logits


def on_torch(model: CharacterModel) -> CharacterModel:
    """A copy whose attention is ``nn.MultiheadAttention`` with the same weights."""
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.attention, Attention)
        block.attention = TorchAttention(block.attention)
    return twin


def encode(text: str) -> tuple[Tensor, str]:
    """Each character's number in the sorted alphabet of the text."""
    alphabet = "".join(sorted(set(text)))
    number = {letter: i for i, letter in enumerate(alphabet)}
    return torch.tensor([number[letter] for letter in text]), alphabet


def passages(data: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Random stretches of the text, (batch, CONTEXT + 1)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (batch,), generator=generator)
        yield data[starts[:, None] + torch.arange(CONTEXT + 1)]


def train(model: CharacterModel, data: Tensor, steps: int, batch: int = 16, seed: int = 0) -> list[float]:
    """The loss of every step, nats per character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _, rows in zip(range(steps), passages(data, batch, seed), strict=False):
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def write(model: CharacterModel, prompt: Tensor, count: int) -> Tensor:
    """Greedy continuation of ``prompt`` (characters,), one cached step per character."""
    caches = [block.attention.layer.new_cache(1, CONTEXT) for block in model.blocks]
    tokens, new = prompt[None], prompt[None]
    for _ in range(min(count, CONTEXT - len(prompt))):
        new = model(new, caches)[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, new), dim=1)
    return tokens[0]


@torch.no_grad()
def entropies(model: CharacterModel, tokens: Tensor) -> list[Tensor]:
    """Mean entropy of every head of every layer on one passage, nats."""
    found, x = [], model.letters(tokens[None]) + model.places(torch.arange(len(tokens)))
    for block in model.blocks:
        _, rows = block.attention.layer(block.norm_1(x), causal=True, rows=True)
        found.append(rows.entropy.mean(dim=(0, 2)))
        x = block(x)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    data, alphabet = encode(options.text.read_text(encoding="utf-8"))
    torch.manual_seed(0)
    ours = CharacterModel(len(alphabet))
    theirs = on_torch(ours)
    curves = [train(model, data, options.steps) for model in (ours, theirs)]
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(f"step {step:5d}   headwise {curves[0][step]:.4f}   torch {curves[1][step]:.4f}")
    print(f"last         headwise {curves[0][-1]:.4f}   torch {curves[1][-1]:.4f}")
    for i, heads in enumerate(entropies(ours, data[:CONTEXT])):
        print(f"layer {i}: entropy of each head " + ", ".join(f"{value:.2f}" for value in heads.tolist()))
    print(repr("".join(alphabet[i] for i in write(ours, data[:16], 48).tolist())))


if __name__ == "__main__":
    main()

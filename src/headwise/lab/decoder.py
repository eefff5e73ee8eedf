"""A small decoder built on the project's own layer."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from headwise.lab.language import VOCABULARY
from headwise.nn import MultiHeadAttention

__all__ = ["D_MODEL", "HEADS", "LAYERS", "Block", "Transformer"]

D_MODEL: Final = 64
HEADS: Final = 4
LAYERS: Final = 2


class Block(nn.Module):
    """Attention and a small MLP, each after a layer norm, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(D_MODEL)
        self.attention = MultiHeadAttention(D_MODEL, HEADS, rotary=True)
        self.norm_mlp = nn.LayerNorm(D_MODEL)
        self.mlp = nn.Sequential(nn.Linear(D_MODEL, 2 * D_MODEL), nn.GELU(), nn.Linear(2 * D_MODEL, D_MODEL))

    def forward(self, x: Tensor, gates: Tensor | None = None) -> Tensor:
        """(B, N, E) to (B, N, E)."""
        x = x + self.attention(self.norm_attention(x), causal=True, gates=gates)
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Transformer(nn.Module):
    """A decoder of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D_MODEL)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(D_MODEL)
        self.unembed = nn.Linear(D_MODEL, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, gates: Tensor | None = None) -> Tensor:
        """Logits (B, N, V); ``gates`` (LAYERS, HEADS) multiply what heads read."""
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, None if gates is None else gates[layer])
        out: Tensor = self.unembed(self.norm(x))
        return out

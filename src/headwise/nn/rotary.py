"""Rotary position embedding: queries and keys turned by their position, so that scores see distances.

Source: Su et al. (2021), RoFormer, section 3.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError

__all__ = ["Rotary", "as_rotary", "token_positions"]


def token_positions(key_padding: Tensor, start: int | Tensor = 0) -> Tensor:
    """Position of every token of a padded batch, counted over real tokens only.

    A prompt then has the positions it would have alone: ``cumsum(mask) - 1`` (and 0 on padding, whose
    position never matters).

    Args:
        key_padding: (B, Q) bool, True = a real token.
        start: real tokens that came before, one number or (B,).

    Returns:
        int64 (B, Q), at least 0.

    Example:
        >>> token_positions(torch.tensor([[False, False, True, True], [True, True, True, True]])).tolist()
        [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    if key_padding.dtype != torch.bool or key_padding.ndim != 2:
        raise ShapeError(
            f"key_padding must be bool (batch, tokens) with True for a real token, but it is {key_padding.dtype} "
            f"{tuple(key_padding.shape)}. Convert it with key_padding.bool()."
        )
    offset = start[:, None] if isinstance(start, Tensor) else start
    return (key_padding.long().cumsum(dim=1) - 1 + offset).clamp(min=0)


class Rotary(nn.Module):
    """Turns pairs of channels of each head by ``position * frequency``.

    The angles are computed in float32 (float64 for float64 input), whatever the layer's dtype: frequencies
    in half precision would be wrong from a few hundred positions on. They follow the module to another device
    and are never cast, saved, or left empty by ``to_empty``.

    Args:
        d_k: width of a head.
        theta: base of the frequencies, ``theta ** (-2 i / dims)``.
        dims: how many leading channels are turned (even, at most d_k); None for all.
        interleaved: False pairs channel i with ``i + dims / 2`` (Llama, GPT-NeoX); True pairs 2i with 2i + 1
            (the original paper, GPT-J).
        frequencies: ``dims / 2`` numbers to use instead of those of theta (scaled variants such as Llama 3's).
        attention_scaling: factor on the turned channels of queries and of keys (YaRN); 1 changes nothing.

    Raises:
        InputError: an odd or too large ``dims``, a theta that is not positive, or a wrong number of frequencies.

    Example:
        >>> rotary = Rotary(4, theta=10000.0)
        >>> x = torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]])
        >>> [round(v, 4) for v in rotary(x, torch.tensor([1])).flatten().tolist()]
        [0.5403, 0.0, 0.8415, 0.0]
    """

    inv_freq: Tensor

    def __init__(
        self,
        d_k: int,
        *,
        theta: float = 10000.0,
        dims: int | None = None,
        interleaved: bool = False,
        frequencies: Sequence[float] | None = None,
        attention_scaling: float = 1.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dims = d_k if dims is None else dims
        if dims < 2 or dims % 2 or dims > d_k:
            raise InputError(
                f"rotary turns an even number of channels between 2 and d_k = {d_k}, but {dims} were asked for. "
                f"Use an even d_k, or name fewer channels with Rotary(d_k, dims=...)."
            )
        if not (math.isfinite(theta) and theta > 0):
            raise InputError(f"theta must be a positive finite number, but {theta!r} was given.")
        if frequencies is not None and len(frequencies) != dims // 2:
            raise InputError(f"frequencies must be {dims // 2} numbers (dims / 2), but {len(frequencies)} were given.")
        self.d_k, self.dims, self.theta, self.interleaved = d_k, dims, float(theta), interleaved
        self.attention_scaling = float(attention_scaling)
        self.scaled = frequencies is not None
        if frequencies is None:
            exponents = torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims
            frequencies = (1.0 / (self.theta**exponents)).tolist()
        self.frequencies = tuple(float(f) for f in frequencies)
        self.register_buffer("inv_freq", self._buffer(device), persistent=False)

    def _buffer(self, device: torch.device | str | None) -> Tensor:
        return torch.tensor(self.frequencies, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = self._buffer(self.inv_freq.device)
        return self

    def forward(self, x_BHQD: Tensor, positions: Tensor) -> Tensor:
        """Turn ``x`` (batch, heads, tokens, d_k) by ``positions`` (tokens,) or (batch, tokens)."""
        wide = torch.float64 if x_BHQD.dtype == torch.float64 else torch.float32
        angles = positions.to(wide)[..., None] * self.inv_freq.to(wide)
        if positions.ndim == 2:
            angles = angles[:, None]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        turned, kept = x_BHQD[..., : self.dims].to(wide), x_BHQD[..., self.dims :]
        if self.interleaved:
            even, odd = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        turned = turned.to(x_BHQD.dtype)
        return turned if self.dims == self.d_k else torch.cat((turned, kept), dim=-1)

    def turns_like(self, other: Rotary | None) -> bool:
        """Whether both turn the same channels by the same angles."""
        if other is None:
            return False
        facts = ("d_k", "dims", "interleaved", "frequencies", "attention_scaling")
        return all(getattr(self, fact) == getattr(other, fact) for fact in facts)

    def extra_repr(self) -> str:
        """One line for ``print(layer)``."""
        scaled = ", scaled frequencies" if self.scaled else ""
        return f"d_k={self.d_k}, theta={self.theta:g}, dims={self.dims}, interleaved={self.interleaved}{scaled}"


def as_rotary(rotary: Any, d_k: int, device: torch.device | str | None) -> Rotary | None:
    """What the layer's ``rotary`` argument means: None or False, True, a theta, or a :class:`Rotary`."""
    if rotary is None or rotary is False:
        return None
    if isinstance(rotary, Rotary):
        if rotary.d_k != d_k:
            raise InputError(f"rotary was made for d_k = {rotary.d_k}, but the layer's heads have d_k = {d_k}.")
        return rotary if device is None else rotary.to(device)
    if rotary is True:
        return Rotary(d_k, device=device)
    if isinstance(rotary, int | float):
        return Rotary(d_k, theta=float(rotary), device=device)
    raise InputError(
        f"rotary must be None, True, a base such as 10000.0 or a Rotary module, but {type(rotary).__name__} was given."
    )

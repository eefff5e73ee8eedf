"""Where the head axis is in tensors of attention that nobody has described: (..., position, width)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Heads", "Reading", "assumed", "copies", "find_heads", "same_rows"]


@dataclass(frozen=True)
class Heads:
    """How the axes before (position, width) hold batch and heads.

    Attributes:
        lead: number of those axes.
        axis: which of them counts the heads; None where one axis counts both (batch times heads).
        count: number of query heads, where one axis counts both.
        head_first: where one axis counts both, whether the head is the slow one.
        repeat: each key-value head is stored so many times in a row.
    """

    lead: int
    axis: int | None = 1
    count: int = 1
    head_first: bool = False
    repeat: int = 1

    def split(self, tensor: Tensor) -> Tensor:
        """(..., L, D) as (B, H, L, D)."""
        if self.axis is None:
            order = (self.count, -1) if self.head_first else (-1, self.count)
            split = tensor.reshape(*order, *tensor.shape[1:])
            return split.transpose(0, 1) if self.head_first else split
        if self.lead == 2 and self.axis == 1:
            return tensor
        moved = tensor.movedim(self.axis, self.lead - 1)
        return moved.reshape(-1, *moved.shape[self.lead - 1 :])

    def joined(self, split_BHLD: Tensor, lead: tuple[int, ...]) -> Tensor:
        """The inverse of :meth:`split`; ``lead`` are the axes before position and width."""
        if self.axis is None:
            rows = split_BHLD.transpose(0, 1) if self.head_first else split_BHLD
            return rows.reshape(*lead, *split_BHLD.shape[2:])
        if self.lead == 2 and self.axis == 1:
            return split_BHLD
        others = [size for axis, size in enumerate(lead) if axis != self.axis]
        whole = split_BHLD.reshape(*others, *split_BHLD.shape[1:])
        return whole.movedim(self.lead - 1, self.axis)

    def groups(self, tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
        """Keys or values (..., L, D) as (B, G, L, D); axes of the batch that are broadcast are written out."""
        while tensor.ndim - 2 < self.lead:
            tensor = tensor[None]
        if self.axis is not None:
            shape = [size if axis != self.axis else tensor.shape[axis] for axis, size in enumerate(lead)]
            split = self.split(tensor.expand(*shape, *tensor.shape[-2:]))
        else:
            split = self.split(tensor.expand(*lead, *tensor.shape[-2:]))
        return split[:, :: self.repeat] if self.repeat > 1 and split.shape[1] > 1 else split

    def rule(self, tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
        """A mask or a bias, broadcastable to (..., Q, K), as one that is broadcastable to (B, H, Q, K)."""
        if tensor.ndim < 2:
            tensor = tensor.reshape((1,) * (2 - tensor.ndim) + tuple(tensor.shape))
        if all(size == 1 for size in tensor.shape[:-2]):
            return tensor.reshape(1, 1, *tensor.shape[-2:])
        while tensor.ndim - 2 < self.lead:
            tensor = tensor[None]
        if self.lead == 2 and self.axis == 1:
            return tensor
        return self.split(tensor.expand(*lead, *tensor.shape[-2:]))


def assumed(lead: int) -> Heads:
    """What (B, H, L, D) means; with one axis before (L, D) a single head is assumed until more is known."""
    return Heads(lead, None if lead == 1 else lead - 1)


@dataclass(frozen=True)
class Reading:
    """How a layer reads heads: their axes, and at which column of its input they start (0 when they are all)."""

    heads: Heads
    column: int
    alone: bool


def _candidates(z: Tensor, count: int) -> Iterator[Heads]:
    lead = z.ndim - 2
    if lead == 1:
        if z.shape[0] % count == 0:
            yield Heads(1, None, count)
            yield Heads(1, None, count, head_first=True)
        return
    for axis in sorted(range(lead), key=lambda axis: axis != 1):
        if z.shape[axis] == count:
            yield Heads(lead, axis)


def _side_by_side(z: Tensor, heads: Heads) -> Tensor:
    split = heads.split(z)
    return split.transpose(1, 2).reshape(-1, split.shape[1] * split.shape[3])


def find_heads(z: Tensor, read: Tensor) -> Reading | None:
    """How ``read`` (..., E) holds z (..., Q, D) head by head, if it does: the proof that z is a head's output."""
    width = z.shape[-1]
    if read.ndim < 2 or not z.numel() or not read.numel() or read.shape[-1] % width or not read.is_floating_point():
        return None
    flat = read.reshape(-1, read.shape[-1])
    z = z.to(read.dtype)
    if read.numel() == z.numel():
        for heads in _candidates(z, read.shape[-1] // width):
            if same_rows(_side_by_side(z, heads), flat):
                return Reading(heads, 0, True)
        return None
    heads = assumed(z.ndim - 2)
    beside = _side_by_side(z, heads)
    if beside.shape[0] != flat.shape[0] or beside.shape[1] >= flat.shape[1]:
        return None
    for column in range(0, flat.shape[1] - beside.shape[1] + 1, width):
        if torch.equal(flat[:, column : column + beside.shape[1]], beside):
            return Reading(heads, column, False)
    return None


def same_rows(left: Tensor, right: Tensor) -> bool:
    """Whether two matrices have the same rows, in whatever order."""
    if left.shape != right.shape:
        return False
    if torch.equal(left, right):
        return True
    generator = torch.Generator().manual_seed(0)
    ray = torch.randn(left.shape[1], dtype=torch.float64, generator=generator, device="cpu").to(left.device)
    order = [(one.double() @ ray).argsort() for one in (left, right)]
    return bool(torch.equal(left[order[0]], right[order[1]]))


def copies(k_BHKD: Tensor, v_BHKD: Tensor) -> int:
    """How often each key-value head is stored in a row: the largest divisor of H for which neighbours are equal."""
    count = k_BHKD.shape[1]
    if v_BHKD.shape[1] != count or not bool((v_BHKD != 0).any()):
        return 1
    for repeat in range(count, 1, -1):
        if count % repeat == 0 and all(
            bool((one[:, ::repeat].repeat_interleave(repeat, 1) == one).all()) for one in (k_BHKD, v_BHKD)
        ):
            return repeat
    return 1

"""Where a model came from, and a hash of what it is now."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor, nn

__all__ = ["Source", "weight_hash"]

_AT_ONCE: Final = 1 << 24


@dataclass(frozen=True)
class Source:
    """Where a model came from.

    Attributes:
        name: the path or hub id as it was given, or the class of an in-memory module.
        path: the folder or file that was read, or None.
        revision: the commit of a hub model, or None.
        kind: ``"folder"``, ``"hub"`` or ``"memory"``.
    """

    name: str
    path: str | None
    revision: str | None
    kind: Literal["folder", "hub", "memory"]
    hasher: Callable[[], str] = field(repr=False, compare=False)

    @property
    def weight_hash(self) -> str:
        """Hash of the weights as they are now (:func:`weight_hash`); reads them all: about a second per gigabyte."""
        return self.hasher()


def weight_hash(module: nn.Module, *, leave_out: Collection[str] = ()) -> str:
    """SHA-256 over the weights of ``module`` as they are now, in hexadecimal.

    What is hashed: every entry of ``module.state_dict()`` (parameters and persistent buffers) in the order of its
    names: name, dtype, shape, and the SHA-256 of its values, row after row, in the machine's byte order. So the hash
        is that of
    what is measured: it does not depend on how a checkpoint was split into files or whether it was pickled, on the
    device, or on memory layout, and it changes when the weights are trained, edited or cast to another dtype.

    Args:
        module: any module.
        leave_out: names that do not count (weights that the checkpoint did not have and nothing reads).

    >>> layer = torch.nn.Linear(2, 3)
    >>> before = weight_hash(layer)
    >>> with torch.no_grad():
    ...     _ = layer.weight[0, 0].add_(1.0)
    >>> weight_hash(layer) == before
    False
    """
    entries = {
        name: value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and name not in leave_out
    }
    distinct = {_place(value): value for value in entries.values()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = dict(zip(distinct, pool.map(_digest, distinct.values()), strict=True))
    whole = hashlib.sha256()
    for name in sorted(entries):
        value = entries[name]
        whole.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        whole.update(digests[_place(value)])
    return whole.hexdigest()


def _place(value: Tensor) -> tuple[object, ...]:
    """Tied weights have the same place and are read once."""
    if value.numel() == 0:
        return (id(value),)
    return (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())


def _digest(value: Tensor) -> bytes:
    found = hashlib.sha256()
    flat = value.detach().reshape(-1)
    step = max(1, _AT_ONCE // max(1, flat.element_size()))
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].cpu().contiguous()
        found.update(part.view(torch.uint8).numpy().data)
    return found.digest()

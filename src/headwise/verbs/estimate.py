"""What a run will take, said before it is long.

Memory is estimated from the layout before the first batch, time from the first batch.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from headwise.data import Facts
from headwise.models import Model
from headwise.models.families import field_of

__all__ = ["available_memory", "memory_estimate", "readable_bytes", "readable_seconds"]

#: blocks of scores that the tiled backend holds at once, per thread, with its scratch
_TILE_BYTES = 32 * 2**20


def memory_estimate(model: Model, survey: Facts, batch_size: int) -> int:
    """Bytes that the largest batch needs beside the weights, from widths: linear in length.

    Counts what one layer holds at once: the residual stream and its copies, queries, keys, values and heads' outputs,
    and the hidden layer of the MLP. Not measured: a figure to plan with, good to a factor of about 2.
    """
    blocks = model.layout.blocks.values()
    heads = max(
        2 * block.query_heads * (block.d_k + block.d_v) + block.kv_heads * (block.d_k + block.d_v) for block in blocks
    )
    width = _number(model.config, ("hidden_size", "d_model", "n_embd", "dim")) or max(
        block.query_heads * block.d_v for block in blocks
    )
    hidden = _number(model.config, ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim")) or 4 * width
    numbers = 6 * width + heads + 3 * hidden
    positions = survey.longest * batch_size
    size = torch.tensor([], dtype=model.dtype).element_size()
    return positions * numbers * size + _TILE_BYTES * torch.get_num_threads()


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    value = field_of(config, *names, kind=int)
    return None if value is None else int(value)


def available_memory() -> int | None:
    """Bytes of main memory that can be had without swapping, or None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _cached()
    except (AttributeError, OSError, ValueError):
        return None


def _cached() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.rstrip().endswith("kB")}
    except OSError:
        return 0
    return max(0, found.get("MemAvailable", 0) - found.get("MemFree", 0))


def readable_bytes(count: float) -> str:
    """A count of bytes for people.

    >>> readable_bytes(3 * 2**30)
    '3.0 GiB'
    """
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def readable_seconds(seconds: float) -> str:
    """A duration for people.

    >>> readable_seconds(95)
    '1 min 35 s'
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 90:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"

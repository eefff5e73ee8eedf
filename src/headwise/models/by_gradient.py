"""Where heads sit in weights, told by gradients: for what neither values nor names tell.

An attention module runs once more on what it was given. What each of its linear layers puts out is cut off from what
made it, and so is what attention puts out. Then the derivative of the queries (keys, values) of a head by the output of
a layer is zero but in the columns that make that head: through rotations, norms, latents and chunks, whatever the code
does. The same holds for what W_O reads: it shows whether each head stands in its own columns there, alone and
zero where the head is zero, and which columns of which layer it is gated by.

With H heads, one derivative and one more per binary digit of H tell for all columns at once whose they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from headwise.layout import Projection

__all__ = ["NOBODY", "SHARED", "Replayed", "Told", "owners", "tell"]

#: Columns on which no head depends, and columns on which several do.
NOBODY: Final = -1
SHARED: Final = -2


@dataclass
class Replayed:
    """One attention module's second run, with gradients.

    Attributes:
        leaves: what its linear layers put out, by path relative to it, cut off from what made it.
        transposed: which of them are ``Conv1D``.
        inner: paths of layers that read what another layer of the module put out.
        query, key, value: the parts of what attention got, each (B, heads, length, width).
        z: the parts of what attention put out, each (B, Q, H * D_v), cut off.
        reads: what linear layers read that was made of z, as wide as the heads side by side, by path in the model.
        silent: which of them read zeros where z is zero.
    """

    leaves: dict[str, Tensor] = field(default_factory=dict)
    transposed: dict[str, bool] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    query: list[Tensor] = field(default_factory=list)
    key: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    reads: dict[str, Tensor] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Told:
    """What gradients told of one attention module's weights.

    Attributes:
        found: projections by part: ``"q"``, ``"k"``, ``"v"``, ``"gate"``.
        partial: for a part whose rows go with the head but are not its whole map from the layer's input: why.
        output: path of the layer whose input holds the heads, each in its own columns, but not as they leave attention.
    """

    found: Mapping[str, Projection] = field(default_factory=dict)
    partial: Mapping[str, str] = field(default_factory=dict)
    output: str | None = None


def owners(parts: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whose each column of each leaf is: the head, :data:`NOBODY` or :data:`SHARED`; (columns,) by path.

    Args:
        parts: tensors (B, heads, length, width) that were made from the leaves.
        leaves: tensors (..., columns).

    Example:
        >>> made = torch.randn(2, 3, 12, requires_grad=True)
        >>> heads = made[..., :8].unflatten(-1, (2, 4)).transpose(1, 2) + made[..., 8:].unsqueeze(1)
        >>> owners([heads], {"made": made})["made"].tolist()
        [0, 0, 0, 0, 1, 1, 1, 1, -2, -2, -2, -2]
    """
    draw = torch.Generator().manual_seed(0)
    rays = [torch.randn(part.shape, generator=draw, device="cpu").to(part) for part in parts]
    heads = parts[0].shape[1]
    whole = _derivatives(parts, rays, leaves)
    found = {path: torch.where(_any(one), 0, NOBODY) for path, one in whole.items()}
    for digit in range((heads - 1).bit_length()):
        bits = torch.tensor([head >> digit & 1 for head in range(heads)], device=parts[0].device)
        some = _derivatives(parts, [ray * bits[:, None, None].to(ray) for ray in rays], leaves)
        for path, one in some.items():
            has, same = _any(one), ~_any(one - whole[path])
            found[path] = torch.where(has & ~same, SHARED, found[path])
            mine = found[path] != SHARED
            found[path] = torch.where(has & same & mine, found[path] + (1 << digit), found[path])
    return found


def _derivatives(parts: Sequence[Tensor], rays: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The derivative of the parts along the rays by every leaf, (rows, columns)."""
    given = [(part, ray) for part, ray in zip(parts, rays, strict=True) if part.requires_grad]
    if not given or not leaves:
        return {path: torch.zeros_like(leaf).flatten(0, -2) for path, leaf in leaves.items()}
    outputs, along = zip(*given, strict=True)
    found = torch.autograd.grad(outputs, list(leaves.values()), along, retain_graph=True, allow_unused=True)
    return {
        path: (torch.zeros_like(leaf) if one is None else one).flatten(0, -2)
        for (path, leaf), one in zip(leaves.items(), found, strict=True)
    }


def _any(rows: Tensor) -> Tensor:
    return (rows != 0).any(0)


@torch.enable_grad()
def tell(replayed: Replayed, unknown: Collection[str], d_v: int) -> Told:
    """What the second run of a module tells.

    Args:
        replayed: the run.
        unknown: parts that are asked for: ``"q"``, ``"k"``, ``"v"``, ``"o"``.
        d_v: width of a head's values.
    """
    found: dict[str, Projection] = {}
    partial: dict[str, str] = {}
    for part, tensors in (("q", replayed.query), ("k", replayed.key), ("v", replayed.value)):
        if part not in unknown or not tensors:
            continue
        whose = owners(tensors, replayed.leaves)
        projection = _projection(replayed, whose)
        if projection is None:
            continue
        found[part] = projection
        if projection.parameter in replayed.inner:
            partial[part] = f"{projection.parameter} does not read the layer's input but what the layer made of it"
        if any(bool((columns == SHARED).any()) for columns in whose.values()):
            partial[part] = "it holds numbers that all heads share"
    if "o" not in unknown:
        return Told(found, partial)
    output = next((path for path in replayed.reads if _each_alone(replayed, path, d_v)), None)
    if output is None:
        return Told(found, partial)
    gate = _projection(replayed, owners([_by_head(replayed.reads[output], d_v)], replayed.leaves))
    if gate is not None:
        found["gate"] = gate
    partial["o"] = f"what the layer computes (a gate) stands between the heads and {output}"
    return Told(found, partial, output)


def _projection(replayed: Replayed, whose: Mapping[str, Tensor]) -> Projection | None:
    """The one layer with columns of single heads, where each head's lie together and are as many as another's."""
    having = [path for path, columns in whose.items() if bool((columns >= 0).any())]
    if len(having) != 1:
        return None
    columns = whose[having[0]].tolist()
    heads = max(columns) + 1
    of_heads = [[at for at, head in enumerate(columns) if head == one] for one in range(heads)]
    width = len(of_heads[0])
    if any(len(one) != width or one[-1] - one[0] != width - 1 for one in of_heads if one) or not all(of_heads):
        return None
    starts = tuple(one[0] for one in of_heads)
    if len(columns) == heads * width and starts == tuple(range(0, len(columns), width)):
        return Projection(having[0], replayed.transposed[having[0]], "heads", width=width)
    return Projection(having[0], replayed.transposed[having[0]], "by head", starts, width)


def _each_alone(replayed: Replayed, path: str, d_v: int) -> bool:
    """Whether what ``path`` reads holds each head in its own columns, made of that head alone and zero where it is."""
    read = replayed.reads[path]
    if path not in replayed.silent or read.numel() != sum(part.numel() for part in replayed.z):
        return False
    z = {str(at): part for at, part in enumerate(replayed.z)}
    own = torch.arange(read.shape[-1], device=read.device) // d_v
    return all(bool((columns == own).all()) for columns in owners([_by_head(read, d_v)], z).values())


def _by_head(read: Tensor, d_v: int) -> Tensor:
    """(..., H * D_v) as (1, H, rows, D_v)."""
    return read.reshape(-1, read.shape[-1] // d_v, d_v).transpose(0, 1)[None]

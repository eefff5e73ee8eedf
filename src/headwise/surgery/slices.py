"""Cuts as data: which rows or columns are left of which parameters; worked out before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ModelError, UnsupportedError
from headwise.layout import Block, Projection
from headwise.models.cut_modules import restate
from headwise.surgery.keeping import Kept, fused_rows, head_rows
from headwise.surgery.telling import sharded

__all__ = [
    "Slice",
    "apply",
    "extra_slices",
    "guessed_slices",
    "projection_slices",
    "refuse_shared",
    "row_slices",
]


@dataclass(frozen=True)
class Slice:
    """What is left of one parameter or buffer.

    Attributes:
        path: its dotted path in the model.
        axis: the axis that becomes shorter.
        keep: the indices along it that stay, in order.
    """

    path: str
    axis: int
    keep: tuple[int, ...]


def projection_slices(module: nn.Module, block: Block, kept: Kept) -> list[Slice]:
    """The slices of W_Q, W_K, W_V, W_O and of a gate on the heads, with their biases.

    Raises:
        UnsupportedError: one of them is not known, or its arrangement cannot be cut; it is named.
        ModelError: a weight has another width than the layout says.
    """
    parts = {"q": block.q, "k": block.k, "v": block.v, "o": block.o}
    for part, found in parts.items():
        if found is None:
            why = dict(block.unknown).get(part, "it was not found")
            raise UnsupportedError(
                f"{block.module}: W_{part.upper()} of its heads is not known ({why}), so none can go"
            )
    assert block.q is not None
    assert block.k is not None
    assert block.v is not None
    assert block.o is not None
    found_slices: list[Slice] = []
    for several in _by_parameter(block, kept).values():
        projection = several[0].projection
        if any(one.projection.arrangement == "by head" for one in several):
            found_slices += _without(module, block, several)
        elif len(several) == 3 and projection.arrangement != "heads":
            rows = fused_rows(block, kept, projection.arrangement)
            whole = block.query_heads * block.d_k + block.kv_heads * (block.d_k + block.d_v)
            found_slices += _linear(module, projection, rows, whole)
        else:
            for one in several:
                rows = head_rows(one.left, one.width)
                found_slices += _linear(module, one.projection, rows, one.count * one.width)
    columns = tuple(head_rows(kept.heads, block.d_v))
    _check_width(module, block.o, 0 if block.o.transposed else 1, block.query_heads * block.d_v)
    found_slices.append(Slice(f"{block.o.parameter}.weight", 0 if block.o.transposed else 1, columns))
    return _once(block, found_slices)


@dataclass(frozen=True)
class _Part:
    """One projection of a block: how many heads of what width it makes, and which are left."""

    projection: Projection
    left: tuple[int, ...]
    count: int
    width: int

    def rows(self, heads: Iterable[int]) -> list[int]:
        starts = self.projection.starts or tuple(range(0, self.count * self.width, self.width))
        return [starts[head] + at for head in heads for at in range(self.width)]


def _by_parameter(block: Block, kept: Kept) -> dict[str, list[_Part]]:
    """The projections of queries, keys, values and gates, those of one parameter together."""
    found: dict[str, list[_Part]] = {}
    for one, left, count, width in (
        (block.q, kept.heads, block.query_heads, block.d_k),
        (block.k, kept.kv, block.kv_heads, block.d_k),
        (block.v, kept.kv, block.kv_heads, block.d_v),
        (block.gate, kept.heads, block.query_heads, block.d_v),
    ):
        if one is not None:
            found.setdefault(one.parameter, []).append(_Part(one, left, count, one.width or width))
    return found


def _without(module: nn.Module, block: Block, several: Sequence[_Part]) -> Iterator[Slice]:
    """The slices of a parameter in which each head has its rows beside those of others: all but the gone heads' rows.

    Where the module's code takes its rows shard by shard, those that are left come part by part, as of one shard.
    """
    projection = several[0].projection
    weight = module.get_submodule(projection.parameter).weight
    assert isinstance(weight, Tensor)
    whole = weight.shape[1 if projection.transposed else 0]
    parts = sorted(several, key=lambda one: one.rows([0]))
    if sharded(module.get_submodule(block.module)) and sum(one.count * one.width for one in parts) == whole:
        rows = [row for one in parts for row in one.rows(one.left)]
    else:
        gone = {row for one in parts for row in one.rows(sorted(set(range(one.count)) - set(one.left)))}
        rows = [row for row in range(whole) if row not in gone]
    least = 1 + max(max(one.rows(range(one.count))) for one in parts)
    yield from _linear(module, projection, rows, max(whole, least))


def _linear(module: nn.Module, projection: Projection, rows: Sequence[int], whole: int) -> Iterator[Slice]:
    axis = 1 if projection.transposed else 0
    _check_width(module, projection, axis, whole)
    yield Slice(f"{projection.parameter}.weight", axis, tuple(rows))
    if getattr(module.get_submodule(projection.parameter), "bias", None) is not None:
        yield Slice(f"{projection.parameter}.bias", 0, tuple(rows))


def _check_width(module: nn.Module, projection: Projection, axis: int, whole: int) -> None:
    weight = module.get_submodule(projection.parameter).weight
    assert isinstance(weight, Tensor)
    if weight.ndim != 2 or weight.shape[axis] != whole:
        raise ModelError(
            f"{projection.parameter}.weight has the shape {tuple(weight.shape)}, and the heads that were found in it "
            "take "
            f"{whole} of axis {axis}; the model has changed since it was discovered: discover it again"
        )


def _once(block: Block, slices: Iterable[Slice]) -> list[Slice]:
    """Each parameter once: keys and values may be one projection."""
    found: dict[str, Slice] = {}
    for one in slices:
        if found.setdefault(one.path, one) != one:
            raise UnsupportedError(f"{block.module}: {one.path} serves two projections that would lose different rows")
    return list(found.values())


def extra_slices(module: nn.Module, block: Block, kept: Kept) -> list[Slice]:
    """Slices of what else in an attention module has an axis of its heads: sinks, scales, gates, tables of biases."""
    owner = module.get_submodule(block.module)
    prefix = f"{block.module}." if block.module else ""
    known = {one.parameter for one in (block.q, block.k, block.v, block.o, block.gate) if one is not None}
    found: list[Slice] = []
    for name, value in [*owner.named_parameters(), *owner.named_buffers()]:
        path = prefix + name
        holder = path.rpartition(".")[0]
        if holder in known:
            continue
        axis = _head_axis(module.get_submodule(holder), value, block)
        if axis is not None:
            heads = kept.heads if value.shape[axis] == block.query_heads else kept.kv
            found.append(Slice(path, axis, tuple(heads)))
    return found


def row_slices(module: nn.Module, block: Block, kept: Kept) -> list[Slice]:
    """Slices of linear layers of an attention module, beside its projections, as wide as all its heads.

    Keys of relative positions are such (and gates): W_R of Transformer-XL and of the Conformers.
    """
    owner = module.get_submodule(block.module)
    prefix = f"{block.module}." if block.module else ""
    known = {one.parameter for one in (block.q, block.k, block.v, block.o, block.gate) if one is not None}
    widths = _widths(block, kept)
    found: list[Slice] = []
    for name, part in owner.named_modules():
        path = prefix + name
        if path in known or not isinstance(part, nn.Linear) or part.weight.shape[0] not in widths:
            continue
        rows = tuple(widths[part.weight.shape[0]])
        found += [Slice(f"{path}.{one}", 0, rows) for one, _ in part.named_parameters(recurse=False)]
    return found


def _widths(block: Block, kept: Kept) -> dict[int, list[int]]:
    """What is left of rows that are as many as all heads have together."""
    return {
        block.kv_heads * block.d_v: head_rows(kept.kv, block.d_v),
        block.kv_heads * block.d_k: head_rows(kept.kv, block.d_k),
        block.query_heads * block.d_v: head_rows(kept.heads, block.d_v),
        block.query_heads * block.d_k: head_rows(kept.heads, block.d_k),
    }


def guessed_slices(module: nn.Module, block: Block, kept: Kept) -> list[Slice]:
    """Slices that may be of heads and need not: without them first.

    Linear layers that read what the queries' projection reads and may put out some numbers per head: Inkling's
    ``r_proj``, for what a head says of relative positions is narrower than its queries. And vectors as wide as all
    heads: biases beside a fused weight (DeBERTa), or of the output (GPT-NeoX-Japanese), which stay.
    """
    owner = module.get_submodule(block.module)
    prefix = f"{block.module}." if block.module else ""
    known = {one.parameter for one in (block.q, block.k, block.v, block.o, block.gate) if one is not None}
    query = None if block.q is None else module.get_submodule(block.q.parameter)
    found: list[Slice] = []
    for name, part in owner.named_modules():
        path = prefix + name
        if path in known or not isinstance(part, nn.Linear) or not isinstance(query, nn.Linear):
            continue
        rows, reads = part.weight.shape
        if rows > block.query_heads and not rows % block.query_heads and reads == query.weight.shape[1]:
            left = tuple(head_rows(kept.heads, rows // block.query_heads))
            found += [Slice(f"{path}.{one}", 0, left) for one, _ in part.named_parameters(recurse=False)]
    widths = _widths(block, kept)
    for name, value in owner.named_parameters(recurse=False):
        if value.ndim == 1 and value.shape[0] in widths:
            found.append(Slice(prefix + name, 0, tuple(widths[value.shape[0]])))
    return found


def _head_axis(holder: nn.Module, value: Tensor, block: Block) -> int | None:
    if "Norm" in type(holder).__name__ and value.ndim == 1:
        return None
    if isinstance(holder, nn.Linear):
        return 0 if value.shape[0] == block.query_heads else None
    if isinstance(holder, nn.Embedding):
        return 1 if value.shape[1] == block.query_heads else None
    for count in dict.fromkeys((block.query_heads, block.kv_heads)):
        axes = [axis for axis, size in enumerate(value.shape) if size == count]
        if len(axes) == 1 and count > 1:
            return axes[0]
    return None


def refuse_shared(module: nn.Module, slices: Iterable[Slice]) -> None:
    """Refuse a cut of a parameter that another part of the model uses as well.

    Raises:
        UnsupportedError: both names are given.
    """
    names: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    modules: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        modules.setdefault(id(part), []).append(name)
    for one in slices:
        owner, _, _ = one.path.rpartition(".")
        aliases = {f"{path}.{one.path.rpartition('.')[2]}" for path in modules[id(module.get_submodule(owner))]}
        value = _tensor(module, one.path)
        others = [name for name in names.get(id(value), []) if name not in aliases]
        if others:
            raise UnsupportedError(
                f"{one.path} is the same weight as {others[0]}, so a head cut out of one would be cut out of the "
                "other; "
                "untie them first"
            )


def _tensor(module: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def apply(module: nn.Module, slices: Iterable[Slice]) -> None:
    """Cut the parameters and buffers of ``module`` and keep the sizes that their layers state true."""
    for one in slices:
        path, _, name = one.path.rpartition(".")
        owner = module.get_submodule(path)
        value = getattr(owner, name)
        index = torch.tensor(one.keep, dtype=torch.long, device=value.device)
        with torch.no_grad():
            left = value.detach().index_select(one.axis, index).contiguous()
        if isinstance(value, nn.Parameter):
            setattr(owner, name, nn.Parameter(left, requires_grad=value.requires_grad))
        else:
            setattr(owner, name, left)
        restate(owner)

"""Heads that put out the mean of the values that each query may see.

A head whose query is zero gives every key the same score, so its softmax is the plain mean over the keys that the
query may see: whatever the mask, the kernel and the cache, for rotations and RMS norms keep zero at zero. All such
heads of one key-value head put out the same, so one of them, the *carrier*, stands for them with the sum of their W_O.
That holds only for plain scores. Where something is added to them the request is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.kernels import Problem, Wanted
from headwise.layout import Block, HeadId, HeadLayout, Site
from headwise.models import AttentionCall, Gates, Model, layout_of, observe
from headwise.models.cut_modules import cut_of
from headwise.models.probe import run_model
from headwise.models.restore import unchanged
from headwise.surgery.caches import copied
from headwise.surgery.keeping import head_rows, query_rows

__all__ = [
    "Carriers",
    "averaged",
    "carriers_of",
    "lay_means",
    "refuse_uneven_heads",
    "refuse_uneven_scores",
    "still_zero",
    "uneven_scores",
]

#: For each carrier the heads that it stands for, itself the first.
Carriers = Mapping[int, tuple[int, ...]]

#: Words in the name of a norm of queries.
_OF_QUERIES: Final = ("q_", "query", "qk")
#: An added term at or below this hides its key.
_HIDES: Final = -1e4


def carriers_of(module: nn.Module, block: Block, running: Collection[int], gone: Collection[int]) -> Carriers:
    """For each key-value head that loses heads to a running mean the head that stays in order to put it out.

    A head that carries a running mean since an earlier cut goes on to do so; otherwise it is the first that goes.

    Args:
        module: the attention module, which says what was cut before.
        block: its heads.
        running: the heads that are replaced by a running mean.
        gone: heads that go without one.
    """
    earlier = cut_of(module)
    old = [] if earlier is None else [earlier.heads.index(one[0]) for one in earlier.means]
    found: dict[int, tuple[int, ...]] = {}
    for kv in sorted({block.kv_map[head] for head in running}):
        members = sorted(head for head in running if block.kv_map[head] == kv)
        first = next((head for head in old if block.kv_map[head] == kv and head not in gone), members[0])
        found[first] = (first, *(head for head in members if head != first))
    return found


def lay_means(root: nn.Module, block: Block, carriers: Carriers) -> None:
    """Give each carrier in ``root`` a query of zero, and the output projections of all that it stands for."""
    if not carriers:
        return
    assert block.q is not None
    assert block.o is not None
    rows = query_rows(block, list(carriers))
    _zero(root, block.q.parameter, rows, transposed=block.q.transposed)
    weight: Any = root.get_submodule(block.o.parameter).weight
    matrix = weight if block.o.transposed else weight.T
    with torch.no_grad():
        for carrier, members in carriers.items():
            total = sum((matrix[head_rows([one], block.d_v)].double() for one in members), torch.zeros(()).to(weight))
            matrix[head_rows([carrier], block.d_v)] = total.to(matrix.dtype)


def _zero(root: nn.Module, path: str, rows: Sequence[int], *, transposed: bool) -> None:
    layer: Any = root.get_submodule(path)
    index = torch.tensor(rows, dtype=torch.long, device=layer.weight.device)
    with torch.no_grad():
        layer.weight.index_fill_(1 if transposed else 0, index, 0.0)
        if getattr(layer, "bias", None) is not None:
            layer.bias.index_fill_(0, index, 0.0)


@contextmanager
def averaged(model: Model, layout: HeadLayout, running: Mapping[str, Collection[int]]) -> Iterator[None]:
    """Inside, the mean of the visible values stands in the place of what the heads ``running`` of blocks put out.

    It is computed from the values and from who may see whom, not by a query of zero.
    """
    heads = [HeadId(site.key, head) for site in layout.sites for head in running.get(site.block, ())]
    if not heads:
        yield
        return
    with observe(model, gates=Gates(layout, heads, replacement="running_mean"), whole_masks=True):
        yield


@contextmanager
def still_zero(root: nn.Module) -> Iterator[None]:
    """Inside, training leaves the queries of the carriers of ``root`` at zero."""
    cuts = {path: found for path, part in root.named_modules() if (found := cut_of(part)) is not None and found.means}
    with ExitStack() as stack:
        for path, cut in cuts.items():
            block = layout_of(root).blocks[path]
            assert block.q is not None
            rows = query_rows(block, [cut.heads.index(one[0]) for one in cut.means])
            layer: Any = root.get_submodule(block.q.parameter)
            for value, axis in ((layer.weight, int(block.q.transposed)), (getattr(layer, "bias", None), 0)):
                if value is not None and value.requires_grad:
                    stack.callback(value.register_hook(_without(axis, rows)).remove)
        yield


def _without(axis: int, rows: list[int]) -> Any:
    def still(gradient: Tensor) -> Tensor:
        return gradient.index_fill(axis, torch.tensor(rows, dtype=torch.long, device=gradient.device), 0.0)

    return still


def refuse_uneven_heads(root: nn.Module, block: Block) -> None:
    """Refuse a block whose queries go through a norm with a bias, or whose heads are gated before W_O.

    The norm makes queries something where they were zero. A gate makes running means of one key-value head differ.

    Raises:
        UnsupportedError: the norm is named, or the gate told.
    """
    if "o" in dict(block.partial):
        raise UnsupportedError(
            f"{block.module}: every head has a gate of its own before W_O, so no head can put out the running mean of "
            f"others; {_INSTEAD}"
        )
    for name, part in root.get_submodule(block.module).named_modules():
        last = name.rpartition(".")[2].lower()
        of_queries = "Norm" in type(part).__name__ and any(word in name.lower() for word in _OF_QUERIES)
        if of_queries and not last.startswith(("k_", "key")) and getattr(part, "bias", None) is not None:
            raise UnsupportedError(
                f"{block.module}: {type(part).__name__} {name} adds a bias to the queries of its heads, so none of "
                f"them can be without a query and put out a running mean; {_INSTEAD}"
            )


_INSTEAD: Final = "replace its heads by 'nothing' or 'constant' instead"


def refuse_uneven_scores(model: Model, layout: HeadLayout, carriers: Mapping[str, Carriers], inputs: Any) -> None:
    """Refuse carriers that would see some keys more than others although their query is zero, on these inputs.

    Raises:
        UnsupportedError: the block is named, and what is added to its scores.
    """
    for why in uneven_scores(model, layout, carriers, inputs).values():
        raise UnsupportedError(why)


def uneven_scores(model: Model, layout: HeadLayout, carriers: Mapping[str, Carriers], inputs: Any) -> Mapping[str, str]:
    """For each block whose carriers would not put out a plain mean why not: from one run in which W_Q gives them 0.

    Args:
        model: as before afterwards.
        layout: its heads.
        carriers: of each block, by path.
        inputs: keyword arguments of a forward pass.
    """
    blocks = {path: layout.blocks[path] for path, found in carriers.items() if found}
    watch = _Watch({path: list(carriers[path]) for path in blocks})
    if not blocks:
        return watch.found
    root = model.module
    with ExitStack() as stack:
        stack.enter_context(unchanged(root))
        for path, block in blocks.items():
            assert block.q is not None
            rows = query_rows(block, watch.heads[path])
            handle = root.get_submodule(block.q.parameter).register_forward_hook(_zeroing(rows))
            stack.callback(handle.remove)
        stack.enter_context(observe(model, watch, whole_masks=True))
        run_model(root, copied(inputs))
    return watch.found


class _Watch:
    """Looks at the scores of carriers; ``found`` says of which blocks they are not all equal, and why."""

    def __init__(self, heads: Mapping[str, list[int]]) -> None:
        self.heads = heads
        self.found: dict[str, str] = {}

    def want(self, site: Site, problem: Problem) -> Wanted | None:
        """Nothing."""
        heads = self.heads.get(site.block)
        why = _uneven(problem, heads) if heads else None
        if why is not None and heads:
            self.found[site.block] = (
                f"{site.block}: {why}, so its head {heads[0]} would not put out the plain mean of what it may see "
                f"without a query; {_INSTEAD}"
            )
        return None

    def see(self, call: AttentionCall) -> None:
        """Nothing was wanted."""


def _uneven(problem: Problem, heads: list[int]) -> str | None:
    rule = problem.rule
    if rule.sinks is not None:
        return "a sink takes a part of every row of its attention"
    if rule.distance_bias is not None:
        return "its scores have a bias by distance"
    for term in rule.added:
        seen = term.detach()[:, heads if term.shape[1] > 1 else slice(None)]
        if bool(((seen != 0) & (seen > _HIDES)).any()):
            return "a bias is added to its scores (relative positions, slopes)"
    if bool(problem.q.detach()[:, heads].any()):
        return "its queries are not zero where W_Q and its bias are (something else is added to them)"
    return None


def _zeroing(columns: list[int]) -> Any:
    def zero(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        found = output.clone()
        found[..., torch.tensor(columns, dtype=torch.long, device=found.device)] = 0
        return found

    return zero

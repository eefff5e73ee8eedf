"""Runs a model with other output projections: heads' columns left out, and what is left repaired."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.layout import Block
from headwise.models import Model, output_weight
from headwise.surgery import Moments, solve
from headwise.surgery.averaging import carriers_of
from headwise.surgery.keeping import head_rows
from headwise.surgery.repair import columns_of, merged

__all__ = ["Projections", "projecting"]

#: For each block one or several (W_O (h d_v, E), bias (E,) or None): as many as there are copies of the batch.
Parts = Mapping[str, Sequence[tuple[Tensor, Tensor | None]]]


class Projections:
    """Output projections without certain heads.

    Args:
        model: the model.
        moments: of the head outputs, by block; needed for every repair but ``"none"``.
        repair: as :func:`headwise.prune` takes it.
        ridge: of least squares.
        running: heads go on as running means, which reach W_O in their places; see
            :func:`headwise.surgery.averaging.averaged`.
    """

    def __init__(
        self,
        model: Model,
        moments: Mapping[str, Moments] | None,
        repair: str,
        ridge: float,
        *,
        running: bool = False,
    ) -> None:
        self._model, self._moments, self._repair, self._ridge = model, moments, repair, ridge
        self._running = running
        self._known: dict[tuple[str, frozenset[int]], tuple[Tensor, Tensor | None]] = {}

    def without(self, path: str, gone: frozenset[int]) -> tuple[Tensor, Tensor | None]:
        """W_O and bias of a block without the heads ``gone``, whose rows are zero."""
        key = (path, gone)
        if key not in self._known:
            if len(self._known) > 512:
                self._known.clear()
            self._known[key] = self._solved(path, gone)
        return self._known[key]

    def _solved(self, path: str, gone: frozenset[int]) -> tuple[Tensor, Tensor | None]:
        block = self._model.layout.blocks[path]
        whole = output_weight(self._model.module, block).detach().flatten(0, 1)
        owner: Any = self._model.module.get_submodule(block.o_path or "")
        bias: Tensor | None = None if owner.bias is None else owner.bias.detach()
        means = carriers_of(self._model.module.get_submodule(path), block, gone if self._running else (), ())
        left = [head for head in range(block.query_heads) if head not in gone or head in means]
        weight, places, start = torch.zeros_like(whole), head_rows(left, block.d_v), merged(block, left, means, whole)
        if self._repair == "none" or self._moments is None or not gone:
            weight[places] = start.to(weight)
            return weight, bias
        columns = columns_of(block, left, means)
        new, added = solve(self._moments[path], whole, columns, self._repair, self._ridge, start)
        weight[places] = new.to(weight)
        return weight, added.to(weight) if bias is None else bias + added.to(weight)


@contextmanager
def projecting(root: nn.Module, blocks: Mapping[str, Block], parts: Parts) -> Iterator[None]:
    """Inside, the output projections of ``parts`` are others.

    Raises:
        UnsupportedError: at the end, where a projection was never used.
    """
    used: set[str] = set()
    held: list[tuple[nn.Module, Any]] = []
    try:
        for path, several in parts.items():
            owner = root.get_submodule(blocks[path].o_path or "")
            held.append((owner, vars(owner).get("forward")))
            owner.forward = _forward(path, several, used)
        yield
    finally:
        for owner, own in held:
            if own is None:
                vars(owner).pop("forward", None)
            else:
                owner.forward = own
    _check(parts, used)


def _check(parts: Iterable[str], used: set[str]) -> None:
    idle = [path for path in parts if path not in used]
    if idle:
        raise UnsupportedError(
            f"{idle[0]}: its output projection is not called as a module, so the model cannot be run without its "
            "heads to measure the loss; choose by the criterion set-aware, weight-norm or random"
        )


def _forward(path: str, parts: Sequence[tuple[Tensor, Tensor | None]], used: set[str]) -> Any:
    def forward(hidden: Tensor) -> Tensor:
        used.add(path)
        pieces = hidden.chunk(len(parts)) if len(parts) > 1 else (hidden,)
        return torch.cat([_linear(piece, *part) for piece, part in zip(pieces, parts, strict=True)])

    return forward


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(hidden, weight.T.to(hidden), None if bias is None else bias.to(hidden))

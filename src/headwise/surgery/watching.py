"""Watching the cut layers of a model: what goes into each, and what its output projection gives.

A *place* is the smallest part of a model that holds both an attention module and the projection of its heads' outputs.
The truth is the original with the removed heads' columns of that projection's input set to zero; what enters each
place there is given to the same place of the cut model, so that each layer is judged on the same input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.layout import Block
from headwise.models.arguments import of_heads
from headwise.models.cut_modules import cut_of
from headwise.surgery.caches import copied

__all__ = ["Calls", "gated_run", "gating", "place_of", "replaced_inputs"]


@dataclass
class Calls:
    """What was seen of the cut layers in one forward pass.

    Attributes:
        inputs: for each block, what entered its place, call after call.
        outputs: for each block, what its output projection gave, call after call.
        headed: for each block, the arguments of its attention module that seem to hold something for every head.
    """

    inputs: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    headed: dict[str, tuple[str, ...]] = field(default_factory=dict)


def place_of(block: Block) -> str:
    """Path of the smallest module that holds a block and its output projection; "" is the model itself."""
    assert block.o_path is not None
    parts: list[str] = []
    for left, right in zip(block.module.split("."), block.o_path.split("."), strict=False):
        if left != right:
            break
        parts.append(left)
    return ".".join(parts)


@contextmanager
def gated_run(
    root: nn.Module, blocks: Mapping[str, Block], removed: Mapping[str, tuple[int, ...]], calls: Calls
) -> Iterator[None]:
    """Inside, ``root`` runs without what the removed heads of ``blocks`` put out, and ``calls`` is filled."""
    with ExitStack() as stack:
        for path, block in blocks.items():
            place = root.get_submodule(place_of(block))
            calls.inputs[path] = []
            stack.callback(
                place.register_forward_pre_hook(_taking(calls.inputs[path]), prepend=True, with_kwargs=True).remove
            )
            module = root.get_submodule(path)
            stack.callback(
                module.register_forward_pre_hook(_noting(calls, block), prepend=True, with_kwargs=True).remove
            )
            _watch_output(root, block, calls, stack)
        stack.enter_context(gating(root, blocks, removed))
        yield


@contextmanager
def gating(root: nn.Module, blocks: Mapping[str, Block], removed: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Inside, ``root`` runs without what the removed heads of ``blocks`` put out."""
    with ExitStack() as stack:
        for path, block in blocks.items():
            output = root.get_submodule(block.o_path or "")
            columns = [head * block.d_v + at for head in removed[path] for at in range(block.d_v)]
            stack.callback(output.register_forward_pre_hook(_zeroing(columns)).remove)
        yield


@contextmanager
def replaced_inputs(root: nn.Module, blocks: Mapping[str, Block], given: Calls | None, calls: Calls) -> Iterator[None]:
    """Inside, the place of each block gets what ``given`` holds in the place of its own input; ``calls`` is filled."""
    with ExitStack() as stack:
        for path, block in blocks.items():
            if given is not None:
                place = root.get_submodule(place_of(block))
                stack.callback(
                    place.register_forward_pre_hook(_giving(given.inputs[path]), prepend=True, with_kwargs=True).remove
                )
            _watch_output(root, block, calls, stack)
        yield


def _watch_output(root: nn.Module, block: Block, calls: Calls, stack: ExitStack) -> None:
    kept = calls.outputs[block.module] = []

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        kept.append(output.detach().clone())

    stack.callback(root.get_submodule(block.o_path or "").register_forward_hook(keep).remove)


def _taking(taken: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    def take(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append((copied(args), copied(kwargs)))

    return take


def _noting(calls: Calls, block: Block) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cut = cut_of(module)
        found = of_heads(module, args, kwargs, block.query_heads if cut is None else cut.original)
        known = calls.headed.get(block.module, () if cut is None else cut.narrow)
        calls.headed[block.module] = tuple(dict.fromkeys((*known, *found)))

    return note


def _giving(given: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    at = 0

    def give(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal at
        at += 1
        return copied(given[at - 1]) if at <= len(given) else (args, kwargs)

    return give


def _zeroing(columns: list[int]) -> Any:
    def zero(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given = args[0].clone()
        given[..., torch.tensor(columns, dtype=torch.long, device=given.device)] = 0
        return (given, *args[1:])

    return zero

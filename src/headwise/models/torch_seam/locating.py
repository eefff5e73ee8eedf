"""Which modules compute attention with torch's own functions: seen by running the model once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

from torch import Tensor, nn

from headwise.models.problems import Call
from headwise.models.torch_seam.seam import by_torch

__all__ = ["locate"]


def locate(root: nn.Module, run: Callable[[], Any], besides: Collection[nn.Module]) -> dict[str, nn.Module]:
    """The innermost modules, by path, that computed attention by torch's functions while ``run`` ran ``root``.

    Modules in ``besides`` are left out: they are seen through transformers' interface.
    """
    names = {module: path for path, module in root.named_modules()}
    found: dict[str, nn.Module] = {}

    def note(call: Call, _spot: Hashable) -> tuple[Tensor, Any]:
        if call.module not in besides:
            path = _holder(root, names[call.module])
            found[path] = root.get_submodule(path)
        output: tuple[Tensor, Any] = call.own()
        return output

    with by_torch({module: {} for module in names}, note):
        run()
    return found


def _holder(root: nn.Module, path: str) -> str:
    """The path itself, or where a module without weights only wraps a function, of the nearest module around it."""
    while path and not any(True for _ in root.get_submodule(path).parameters()):
        path = path.rpartition(".")[0]
    return path

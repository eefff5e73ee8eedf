"""Hooks of headwise's own on attention modules: what is put around their code while it runs, and taken off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Running", "drop_hooks"]


class Running:
    """A mode that torch's functions are in while the forward code of a module runs.

    Args:
        make: makes the mode, for each call of the module.
    """

    def __init__(self, make: Callable[[], TorchFunctionMode]) -> None:
        self.make = make
        self.modes: list[TorchFunctionMode] = []

    def put_around(self, module: nn.Module) -> None:
        """Hook it onto ``module``."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, with_kwargs=True, always_call=True)

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Before the code runs."""
        mode = self.make()
        mode.__enter__()  # type: ignore[no-untyped-call]
        self.modes.append(mode)

    def leave(self, _module: nn.Module, _args: Any, _kwargs: Any, _output: Any = None) -> None:
        """After it ran, or failed."""
        if self.modes:
            self.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def drop_hooks(module: nn.Module, kinds: tuple[type, ...]) -> None:
    """Take off the hooks of ``module`` that are of ``kinds``, or methods of such objects."""
    beside = (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(table.items()):
            if isinstance(getattr(hook, "__self__", hook), kinds):
                del table[key]
                for other in beside:
                    other.pop(key, None)

"""What headwise puts around the code of attention modules while it runs, and takes off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Running", "drop_hooks", "take_off"]


class Running:
    """A mode that torch's functions are in while the forward code of a module runs.

    It stands in the place of the module's ``forward``, not in a pair of hooks: torch calls the second one after an
    ``Exception`` at most, so that an interrupt would leave the mode behind.

    Args:
        make: makes the mode, for each call of the module.
    """

    def __init__(self, make: Callable[[], TorchFunctionMode]) -> None:
        self.make = make

    def put_around(self, module: nn.Module) -> None:
        """Let the code of ``module`` run inside."""
        module.forward = _Inside(module.forward, self)

    def after(self, given: list[Any]) -> None:
        """What is done after it ran, or failed, with what it was given."""


class _Inside:
    """The forward code of a module, inside a mode."""

    def __init__(self, own: Callable[..., Any], running: Running) -> None:
        self.__wrapped__, self.running = own, running  # inspect.signature goes on to what is wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.running.make():
                return self.__wrapped__(*args, **kwargs)
        finally:
            self.running.after([*args, *kwargs.values()])


def take_off(module: nn.Module, kind: type[Running]) -> None:
    """Let the code of ``module`` run without what of ``kind`` was put around it."""
    own, others = vars(module).get("forward"), []
    if not isinstance(own, _Inside):
        return
    while isinstance(own, _Inside):
        if not isinstance(own.running, kind):
            others.append(own.running)
        own = own.__wrapped__
    del module.forward
    if getattr(own, "__func__", None) is not type(module).forward:
        module.forward = own
    for running in reversed(others):
        running.put_around(module)


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

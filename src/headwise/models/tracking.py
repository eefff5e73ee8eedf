"""Which call of which module this is: the ordinals of attention calls within a forward pass.

A *forward pass* is the outermost entry into any watched module, so ordinals restart at every step
of ``generate()``. A module that is entered twelve times in one pass (ALBERT) has the calls 0 to 11.
A module that calls its attention function several times from one place within one entry (a vision
tower that splits packed images) has one call in several *parts*. A layer that gradient
checkpointing computes again during the backward pass gets the ordinals of its forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from headwise.errors import RunError, UnsupportedError

__all__ = ["Place", "Tracker"]


@dataclass(frozen=True)
class Place:
    """Where in a forward pass an attention call happens."""

    forward: int
    call: int
    part: int
    recomputed: bool


@dataclass
class _Pass:
    """The state of one forward pass in one thread."""

    forward: int
    recomputed: bool = False
    followed: bool = False
    entries: dict[int, int] = field(default_factory=dict)
    places: dict[int, dict[tuple[Any, ...], int]] = field(default_factory=dict)
    parts: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def copy(self, *, recomputed: bool) -> _Pass:
        places = {module: dict(known) for module, known in self.places.items()}
        again = replace(self, entries=dict(self.entries), places=places, parts=dict(self.parts))
        again.recomputed = again.followed = recomputed
        return again


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[int] = []
        self.now: _Pass | None = None


class Tracker:
    """Follows the forward passes of one model by hooks on its attention modules and what holds them.

    Args:
        root: the model.
        attention: its attention modules.
        repeated: those that one forward pass enters more than once.
    """

    def __init__(self, root: nn.Module, attention: Iterable[nn.Module], repeated: Iterable[nn.Module] = ()) -> None:
        self.root = root
        self.passes = 0
        self._attention = {id(module): module for module in attention}
        self._repeated = {id(module) for module in repeated}
        self._thread = _Thread()
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, Callable[..., Any], Callable[..., Any]]] = []
        self._hooks: tuple[Callable[..., Any], ...] = ()
        self._open = False
        self.paused = False

    def install(self) -> None:
        """Put the hooks in place."""
        self._open = True
        watched = _holders(self.root, set(self._attention))
        known = {id(module) for module in watched}

        # Functions, not methods: what is copied by other ways than deepcopy takes them along, where they do nothing.
        def enter(module: nn.Module, _args: Any) -> None:
            if self._open and not self.paused and id(module) in known:
                self._enter(module)

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            if self._open and not self.paused and id(module) in known:
                self._leave(module)

        for module in watched:
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
            _WATCHED.setdefault(module, []).append(self)
            vars(module)["__deepcopy__"] = partial(_copy_without_hooks, module)
        self._hooks = (enter, leave)
        for module in self.root.modules():
            checkpoint = vars(module).get("_gradient_checkpointing_func")
            if checkpoint is not None:
                following = self._following(checkpoint)
                self._wrapped.append((module, checkpoint, following))
                setattr(module, "_gradient_checkpointing_func", following)  # noqa: B010

    def remove(self) -> None:
        """Take every hook away; a recomputation that still comes is refused."""
        self._open = False
        for handle in self._handles:
            handle.remove()
        for module, trackers in list(_WATCHED.items()):
            if self in trackers:
                trackers.remove(self)
            if not trackers:
                del _WATCHED[module]
                vars(module).pop("__deepcopy__", None)
        for module, checkpoint, _ in self._wrapped:
            setattr(module, "_gradient_checkpointing_func", checkpoint)  # noqa: B010
        self._handles.clear()
        self._wrapped.clear()

    def begin(self) -> None:
        """Start a new forward pass by hand."""
        self._thread.stack.clear()
        self._thread.now = None

    def place(self, module: nn.Module, spot: Hashable) -> Place:
        """Number the attention call that ``module`` makes at the place ``spot`` of its code."""
        now = self._thread.now
        if now is None or (not self._thread.stack and not now.recomputed):
            now = self._recomputed(module) if _in_backward() else self._new_pass()
        known = now.places.setdefault(id(module), {})
        entry = (now.entries.get(id(module), 0), spot)
        call = known.setdefault(entry, len(known))
        part = now.parts.get((id(module), *entry), 0)
        now.parts[(id(module), *entry)] = part + 1
        return Place(now.forward, call, part, now.recomputed)

    def _new_pass(self) -> _Pass:
        now = self._thread.now = _Pass(self.passes)
        self.passes += 1
        return now

    def _recomputed(self, module: nn.Module) -> _Pass:
        if id(module) in self._repeated:
            raise UnsupportedError(
                f"{type(module).__name__} is called several times in one forward pass, and a checkpoint that headwise "
                "does not know computes one of the calls again: which one cannot be told; use "
                "model.activation_checkpointing_enable() before the block, or no checkpointing"
            )
        return _Pass(max(self.passes - 1, 0), recomputed=True)

    def _enter(self, module: nn.Module) -> None:
        stack = self._thread.stack
        if id(module) in stack:  # left open by an interrupt
            del stack[stack.index(id(module)) :]
        if not stack and not (self._thread.now is not None and self._thread.now.recomputed):
            self._thread.now = self._recomputed(module) if _in_backward() else self._new_pass()
        stack.append(id(module))
        now = self._thread.now
        if now is not None and id(module) in self._attention:
            now.entries[id(module)] = now.entries.get(id(module), 0) + 1

    def _leave(self, module: nn.Module) -> None:
        stack = self._thread.stack
        if id(module) in stack:
            del stack[stack.index(id(module)) :]
        now = self._thread.now
        if not stack and now is not None and now.recomputed and not now.followed:
            self._thread.now = None

    def _following(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """``checkpoint`` whose function finds, when it runs again, the ordinals it had at first."""

        def follow(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            now = self._thread.now
            if now is None or not self._open or self.paused:
                return checkpoint(function, *args, **kwargs)
            start, ran = now.copy(recomputed=True), False

            def again(*inner: Any, **named: Any) -> Any:
                nonlocal ran
                if not ran:
                    ran = True
                    return function(*inner, **named)
                if not self._open:
                    raise RunError(
                        "a layer under gradient checkpointing is computed again after its gate or observation has "
                        "ended; call backward() inside the 'with' block"
                    )
                thread = self._thread
                held = thread.stack, thread.now
                thread.stack, thread.now = [], start.copy(recomputed=True)
                try:
                    return function(*inner, **named)
                finally:
                    thread.stack, thread.now = held

            return checkpoint(again, *args, **kwargs)

        return follow


#: Modules under hooks, and by whom.
_WATCHED: WeakKeyDictionary[nn.Module, list[Tracker]] = WeakKeyDictionary()


def _copy_without_hooks(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of ``module`` as it was before any session: without hooks, and with its own checkpointing."""
    own = vars(module).pop("__deepcopy__")
    try:
        copied: nn.Module = deepcopy(module, memo)
    finally:
        vars(module)["__deepcopy__"] = own
    trackers = _WATCHED.get(module, ())
    hooks = [hook for tracker in trackers for hook in tracker._hooks]
    originals = {following: checkpoint for tracker in trackers for _, checkpoint, following in tracker._wrapped}
    for part in copied.modules():
        vars(part).pop("__deepcopy__", None)
        for held in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in held.items() if hook in hooks]:
                del held[key]
                part._forward_hooks_always_called.pop(key, None)
        while (checkpoint := vars(part).get("_gradient_checkpointing_func")) in originals:
            setattr(part, "_gradient_checkpointing_func", originals[checkpoint])  # noqa: B010
    return copied


def _holders(root: nn.Module, attention: set[int]) -> list[nn.Module]:
    """The attention modules and every module that contains one, without repetition."""
    held: dict[int, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if id(module) not in attention:
            continue
        holder = root
        held[id(root)] = root
        for part in filter(None, name.split(".")):
            holder = getattr(holder, part)
            held[id(holder)] = holder
    return list(held.values())


def _in_backward() -> bool:
    """Whether this thread runs inside the autograd engine."""
    return bool(torch._C._current_graph_task_id() != -1)

"""A session: a stretch of time in which headwise looks on at a model, or gates its heads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from headwise.errors import GateError, InputError, UnsupportedError
from headwise.layout import HeadLayout, Site
from headwise.models.gate import Gates
from headwise.models.interface import Observer, Seen, answer, attend_as, check_heads, enrol, expel
from headwise.models.layouts import Discovered, discovered
from headwise.models.restore import held
from headwise.models.torch_seam import Heads, by_torch
from headwise.models.tracking import Tracker

if TYPE_CHECKING:
    from headwise.models.handle import Model

__all__ = ["Session", "layout_of", "observe"]


class Session:
    """What :func:`observe` and :func:`~headwise.models.gate` hand out.

    Attributes:
        root: the model.
        layout: its heads.
        facts: what was found out about the model and decided for it, as (name, text) pairs.
    """

    def __init__(
        self, root: nn.Module, found: Discovered, observer: Observer | None, gates: Gates | None, backend: str | None
    ) -> None:
        self.root = root
        self.layout = found.layout
        self.facts = found.layout.facts
        self.observer = observer
        self.backend = backend
        self.own_output = found.own_output
        self.watching = True
        self._gates = gates
        self._paths = {module: path for path, module in found.attention.items()}
        self._direct = {found.attention[path]: _axes(found, path) for path in found.direct}
        self._sites: dict[tuple[str, int], Site] = {
            (site.key.module, site.key.call): site for site in found.layout.sites
        }
        repeated = {site.key.module for site in found.layout.sites if site.key.call > 0}
        self._tracker = Tracker(root, found.attention.values(), (found.attention[path] for path in repeated))

    @property
    def forwards(self) -> int:
        """How many forward passes began since the session did."""
        return self._tracker.passes

    def begin_forward(self) -> None:
        """Start a new forward pass; needed only where parts of a model are called one by one."""
        self._tracker.begin()

    def locate(self, module: nn.Module, spot: Hashable, query: Tensor, key: Tensor) -> Seen | None:
        """The site of a call, or None for a call that only a gate session sees and does not gate."""
        path = self._paths.get(module)
        place = self._tracker.place(module, spot)
        site = None if path is None else self._sites.get((path, place.call))
        if site is None:
            if self.observer is None or self._is_empty(path):
                return None
            raise UnsupportedError(
                f"{path or type(module).__name__} made attention call {place.call}, which the model did not make "
                "when its heads were discovered; discover it with an example that reaches this call"
            )
        block = self.layout.blocks[site.block]
        if self.observer is not None or (self._gates is not None and site.key in self._gates.rules):
            check_heads(site, block, query, key)
        return Seen(site, block, place.forward, place.part, place.recomputed)

    def _is_empty(self, path: str | None) -> bool:
        """Whether no head of a module is left, so that there is nothing to see in its calls."""
        block = None if path is None else self.layout.blocks.get(path)
        return block is not None and not block.query_heads

    def gated(self, seen: Seen, output: Tensor, means: Callable[[], Tensor]) -> Tensor:
        """``output`` (B, Q, H, D_v) times this session's gates; ``means`` gives what may take the place of heads."""
        if self._gates is None:
            return output
        return self._gates.apply(seen.site.key, seen.block.query_heads, output, means)

    def pause(self, paused: bool) -> None:
        """Look away while the model is probed, or on again."""
        self._tracker.paused = paused

    def check_gates(self) -> None:
        """Raise :class:`GateError` when the model ran and gates did not act."""
        if self._gates is None or self.forwards == 0:
            return
        unused = self._gates.unused()
        if unused:
            names = ", ".join(map(str, unused[:5]))
            raise GateError(
                f"the model ran {self.forwards} times inside the block, but the gates on {names} never acted: "
                "these attention modules were not called"
            )

    @contextmanager
    def _running(self) -> Iterator[Session]:
        modules = list(self._paths)
        with ExitStack() as stack:
            stack.callback(self._tracker.remove)
            self._tracker.install()
            stack.callback(expel, self, modules)
            enrol(self, modules)
            stack.enter_context(by_torch(self._direct, answer))
            stack.callback(setattr, self, "watching", False)
            yield self


def _axes(found: Discovered, path: str) -> Mapping[int, Heads]:
    """Where a module's tensors have their heads; torch's own attention module has two ways, and batch comes first."""
    axes = found.direct[path]
    if isinstance(found.attention[path], nn.MultiheadAttention):
        axes = {1: Heads(1, None, found.layout.blocks[path].query_heads), **axes}
    return axes


def _module_of(model: Model | nn.Module) -> nn.Module:
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise InputError(f"model must be a torch module or what hw.load and hw.wrap return, got {type(model).__name__}")
    return module


def layout_of(model: Model | nn.Module) -> HeadLayout:
    """The layout of a model's heads: remembered, or discovered now."""
    return _found(model).layout


def _found(model: Model | nn.Module) -> Discovered:
    module = _module_of(model)
    example = None if isinstance(model, nn.Module) else model.example
    return discovered(module, example)


@contextmanager
def observe(
    model: Model | nn.Module,
    observer: Observer | None = None,
    *,
    gates: Gates | None = None,
    backend: str | None = None,
    whole_masks: bool = False,
) -> Iterator[Session]:
    """Inside the block, ``observer`` sees every attention call of the model, and ``gates`` act on its heads.

    Sessions nest: gates multiply, and every observer is asked. What wants nothing costs nothing: such calls are
    computed by the model's own attention function. A row that may see no key (a padding row on the left) has z = 0, as
    under ``sdpa``; transformers' ``eager`` gives such rows a mean of values that nothing reads.

    Args:
        model: a loaded or wrapped model, or the module itself.
        observer: who looks on; see :class:`~headwise.models.Observer`.
        gates: gates on heads; see :func:`~headwise.models.gate` for the short way.
        backend: force one attention backend; None lets the registry choose for each call.
        whole_masks: every part of the model gets the masks that it gets without a session, and no descriptions.

    Raises:
        UnsupportedError: the model is of a kind that is not understood; before anything is changed.
    """
    found = _found(model)
    module = _module_of(model)
    session = Session(module, found, observer, gates, backend)
    with session._running(), held(module, "dense" if whole_masks else found.masks, attend_as):
        yield session

"""The second seam: a mode that sees torch's own functions while watched modules run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from headwise.models.problems import Call
from headwise.models.torch_seam.calls import Direct, attention_call, softmax_call
from headwise.models.torch_seam.following import STATE, Weights, follow, weighing
from headwise.models.torch_seam.functions import (
    ATTENTION,
    LINEAR,
    MULTI_HEAD,
    is_einsum,
    is_softmax,
    multi_head_in_steps,
    product_of,
)
from headwise.models.torch_seam.heads import Heads, assumed

__all__ = ["TorchSeam", "by_torch", "outside"]

_HERE: Final = str(Path(__file__).parent)
#: Axes before (position, width) -> where the heads are among them.
Axes = Mapping[int, Heads]
Answer = Callable[[Call, Hashable], tuple[Tensor, Any]]


class TorchSeam(TorchFunctionMode):
    """Hands attention that the code of ``modules`` computes with torch's functions to ``answer``.

    Args:
        modules: the modules that are watched, and where each has its heads.
        answer: takes a call and the place in the code that made it; gives (B, Q, H, D_v) and anything.
        reads: told of every linear map: its input and its weight.

    Attributes:
        unread: softmaxes whose results have not been multiplied with values, where ``reads`` is given.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, Axes],
        answer: Answer,
        reads: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._modules = dict(modules)
        self._answer = answer
        self._reads = reads
        self.unread: dict[int, tuple[nn.Module, Weights]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function that runs inside comes here first."""
        kwargs = kwargs or {}
        running = STATE.running
        if STATE.busy or not running:
            return func(*args, **kwargs)
        if func is MULTI_HEAD:
            with self:
                return multi_head_in_steps(*args, **kwargs)
        module = running[-1]
        mine = module in self._modules
        if func is ATTENTION:
            return self._attention(module, args, kwargs) if mine else func(*args, **kwargs)
        if self._reads is not None:
            self._report(func, args, kwargs)
        product = product_of(func, args, kwargs)
        found = None if product is None or not mine else weighing(product)
        if found is not None:
            self.unread.pop(id(found.weights), None)
            with outside():
                direct = softmax_call(module, found, func(*args, **kwargs), self._heads_of(module))
                return direct if isinstance(direct, Tensor) else self._ask(direct)
        result = func(*args, **kwargs)
        follow(func, args, kwargs, product, result)
        if self._reads is not None and is_softmax(func) and isinstance(result, Tensor) and result in STATE.weights:
            weights = STATE.weights[result]
            self.unread[id(weights)] = (module, weights)
        return result

    def _report(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._reads is not None
        with outside():
            if func is LINEAR:
                self._reads(args[0], args[1] if len(args) > 1 else kwargs["weight"])
            elif is_einsum(func):
                operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
                if len(operands) == 2 and isinstance(operands[1], nn.Parameter) and operands[0].ndim > 2:
                    self._reads(operands[0].flatten(-2), operands[1])

    def _heads_of(self, module: nn.Module) -> Callable[[int], Heads]:
        known = self._modules[module]
        return lambda lead: known.get(lead) or assumed(lead)

    def _attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        with outside():
            return self._ask(attention_call(module, args, kwargs, self._heads_of(module)))

    def _ask(self, direct: Direct) -> Tensor:
        output, _ = self._answer(direct.call, _spot())
        return direct.back(output)


@contextmanager
def outside() -> Iterator[None]:
    """Inside, this thread's torch functions are headwise's own affair."""
    before, STATE.busy = STATE.busy, True
    try:
        yield
    finally:
        STATE.busy = before


def _spot() -> Hashable:
    """The place in the running module's code from which torch was called: every step from its forward down."""
    frame = sys._getframe(1)
    steps = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(("nn/modules/module.py", "nn\\modules\\module.py")):
            break
        if not name.startswith(_HERE) and not name.endswith(("overrides.py", "contextlib.py")):
            steps.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(steps)


@contextmanager
def by_torch(
    modules: Mapping[nn.Module, Axes], answer: Answer, reads: Callable[[Tensor, Tensor], None] | None = None
) -> Iterator[TorchSeam | None]:
    """Inside, attention that ``modules`` compute with torch's functions goes to ``answer``, on every thread."""
    if not modules:
        yield None
        return
    seam = TorchSeam(modules, answer, reads)
    known = {id(module): module for module in modules}
    open_ = True

    # Functions, not methods: a model that is copied inside takes them along, where they do nothing.
    def enter(module: nn.Module, _args: Any) -> None:
        if not open_ or id(module) not in known:
            return
        if module in STATE.running:  # left open by an interrupt
            del STATE.running[_place(module) :]
        STATE.running.append(module)
        if not _inside(seam):  # a thread of its own, such as autograd's
            STATE.entered.append((seam, module))
            seam.__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, _args: Any, _output: Any) -> None:
        if not open_ or id(module) not in known or module not in STATE.running:
            return
        del STATE.running[_place(module) :]
        if (seam, module) in STATE.entered:
            STATE.entered.remove((seam, module))
            seam.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        try:
            with seam:
                yield seam
        finally:
            open_ = False
            STATE.running[:] = [module for module in STATE.running if id(module) not in known]


def _inside(seam: TorchSeam) -> bool:
    """Whether the mode is on in this thread now."""
    return any(mode is seam for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _place(module: nn.Module) -> int:
    return next(place for place, one in enumerate(STATE.running) if one is module)

"""The torch functions that attention is made of, and matrix products in one form."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "ATTENTION",
    "LINEAR",
    "MULTI_HEAD",
    "Product",
    "is_einsum",
    "is_softmax",
    "multi_head_in_steps",
    "passes_on",
    "product_of",
    "scale_of",
    "softmax_input",
]

ATTENTION: Final = functional.scaled_dot_product_attention
MULTI_HEAD: Final = functional.multi_head_attention_forward
LINEAR: Final = functional.linear

_SOFTMAX: Final = frozenset({torch.softmax, functional.softmax, Tensor.softmax, torch.special.softmax})
_MATMUL: Final = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm})
_ADDED: Final = frozenset({torch.baddbmm, Tensor.baddbmm})
_EINSUM: Final = frozenset({torch.einsum, torch.functional.einsum})
#: What turns axes round: scores or weights are not followed through it.
_TURNING: Final = frozenset(
    ("transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "__get__", "__getitem__", "roll")
)
_TIMES: Final = frozenset({"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"})
_OVER: Final = frozenset({"div", "div_", "true_divide", "divide", "__truediv__", "__itruediv__"})


def _steps() -> Callable[..., Any]:
    """Torch's own code of multi-head attention, made not to ask for overrides, so that each step can be seen."""
    code: Any = MULTI_HEAD
    space = {**code.__globals__, "has_torch_function": lambda _tensors: False}
    copy = types.FunctionType(code.__code__, space, code.__name__, code.__defaults__, code.__closure__)
    copy.__kwdefaults__ = code.__kwdefaults__
    return copy


#: ``torch.nn.functional.multi_head_attention_forward``, whose softmax or attention a mode can see.
multi_head_in_steps: Final = _steps()


def is_softmax(func: Any) -> bool:
    """Whether ``func`` is one of torch's names for the softmax."""
    return func in _SOFTMAX


def is_einsum(func: Any) -> bool:
    """Whether ``func`` is torch's ``einsum``."""
    return func in _EINSUM


def softmax_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The scores of a softmax over the last of three axes or more; None for any other softmax."""
    scores = args[0] if args else kwargs.get("input")
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(scores, Tensor) or scores.ndim < 3 or axis not in (-1, scores.ndim - 1):
        return None
    return scores


@dataclass(frozen=True)
class Product:
    """``left @ right`` with left (..., M, N) and right (..., N, P), and how the function lays the result.

    Attributes:
        left, right: the factors, axes as above.
        order: permutation that takes the function's result to (..., M, P); None where it is so already.
        alpha: factor on the product.
        left_as_given, left_order: the first factor as the function got it, and the permutation to ``left``.
    """

    left: Tensor
    right: Tensor
    order: tuple[int, ...] | None = None
    alpha: float = 1.0
    left_as_given: Tensor | None = None
    left_order: tuple[int, ...] | None = None

    def turned(self, result: Tensor) -> Tensor:
        """The function's result as (..., M, P)."""
        return result if self.order is None else result.permute(self.order)

    def back(self, turned: Tensor) -> Tensor:
        """(..., M, P) as the function lays it."""
        if self.order is None:
            return turned
        inverse = [0] * len(self.order)
        for place, axis in enumerate(self.order):
            inverse[axis] = place
        return turned.permute(inverse)


def product_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Product | None:
    """The matrix product that a call computes; None when it is none, or of a kind that is not understood."""
    if func in _MATMUL:
        both = (*args, *(kwargs[name] for name in ("other", "mat2", "tensor2") if name in kwargs))
        if "input" in kwargs:
            both = (kwargs["input"], *both)
        return _plain(both[0], both[1]) if len(both) >= 2 else None
    if func in _ADDED:
        names = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | dict(kwargs)
        return _plain(names["batch1"], names["batch2"], float(names.get("alpha", 1.0)))
    if func in _EINSUM and len(args) >= 2 and isinstance(args[0], str):
        operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return _einsum(args[0], tuple(operands))
    return None


def _plain(left: Any, right: Any, alpha: float = 1.0) -> Product | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.ndim < 3 or right.ndim < 3:
        return None
    return Product(left, right, alpha=alpha, left_as_given=left)


def _einsum(equation: str, operands: tuple[Any, ...]) -> Product | None:
    equation = equation.replace(" ", "")
    if len(operands) != 2 or not all(isinstance(one, Tensor) for one in operands) or "." in equation:
        return None
    inputs, arrow, out = equation.partition("->")
    first, _, second = inputs.partition(",")
    if not arrow or any(len(set(axes)) < len(axes) for axes in (first, second, out)):
        return None
    batch = [axis for axis in first if axis in second and axis in out]
    summed = [axis for axis in first if axis in second and axis not in out]
    rows = [axis for axis in first if axis not in second]
    columns = [axis for axis in second if axis not in first]
    if not batch or len(summed) != 1 or len(rows) != 1 or len(columns) != 1 or len(out) != len(batch) + 2:
        return None
    batch.sort(key=out.index)
    left_order = tuple(first.index(axis) for axis in (*batch, *rows, *summed))
    return Product(
        operands[0].permute(left_order),
        operands[1].permute([second.index(axis) for axis in (*batch, *summed, *columns)]),
        tuple(out.index(axis) for axis in (*batch, *rows, *columns)),
        left_as_given=operands[0],
        left_order=left_order,
    )


def passes_on(func: Any) -> bool:
    """Whether the result of ``func`` may still be the scores or weights that went in."""
    return getattr(func, "__name__", "") not in _TURNING


def scale_of(func: Any, args: tuple[Any, ...]) -> float:
    """The number by which a call multiplies its first argument; 1 where it does something else."""
    name = getattr(func, "__name__", "")
    if len(args) < 2 or not (name in _TIMES or name in _OVER):
        return 1.0
    factor = args[1]
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            return 1.0
        factor = float(factor)
    if not isinstance(factor, (int, float)) or factor == 0:
        return 1.0
    return float(factor) if name in _TIMES else 1.0 / float(factor)

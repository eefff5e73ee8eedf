"""Whether the values of tensors may be looked at, or only their shapes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["concrete", "known_true", "own_dtypes"]


def concrete(*tensors: Tensor | None) -> bool:
    """Whether Python may branch on the values of all these tensors.

    False under ``torch.compile`` and ``torch.export``, on the meta device, and for a tensor that
    ``torch.func.vmap`` has batched.
    """
    if torch.compiler.is_compiling():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return not any(t.is_meta or isinstance(t, FakeTensor) or torch._C._functorch.is_batchedtensor(t) for t in given)


def known_true(condition: bool | torch.SymBool) -> bool:
    """The condition, without adding a guard on a symbolic length; False where it is not known to hold."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def own_dtypes(tensor: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off on the tensor's device: the backends choose the dtypes of their products themselves."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)

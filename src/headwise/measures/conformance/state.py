"""What a measurement must leave as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["changes", "state_of"]


def state_of(module: nn.Module) -> dict[str, Any]:
    """Modes, gradients, hooks, config and weights of a model, to compare."""
    hooks = {}
    for path, part in module.named_modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        hooks[path] = sum(len(getattr(part, kind)) for kind in kinds)
    return {
        "training mode": {path: part.training for path, part in module.named_modules()},
        "requires_grad": {name: value.requires_grad for name, value in module.named_parameters()},
        "gradients": {name: value.grad is None for name, value in module.named_parameters()},
        "hooks": hooks,
        "replaced methods": {path: "forward" in vars(part) for path, part in module.named_modules()},
        "attention implementation": str(getattr(getattr(module, "config", None), "_attn_implementation", None)),
        "config": str(getattr(module, "config", None)),
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what differs."""
    return [name for name in before if not _same(before[name], after[name])]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    return bool(left == right)

"""Importance as a gate's gradient: one backward pass scores every head.

The derivative of an example's loss by the gate of a head is <z, dL/dz>, summed over the example's rows. One gate per
head *and example* keeps signs from cancelling (Michel et al. 2019, section 4.1: mean over examples of the absolute
value).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import MeasureError
from headwise.layout import HeadLayout, SiteKey
from headwise.measures.importance.losses import Loss, Task
from headwise.measures.importance.passages import named
from headwise.models import Gates, Observer, observe
from headwise.trace import evaluating

__all__ = ["GateGradients", "LeafGates", "checked_losses", "frozen", "gate_gradients", "run_inputs"]


class LeafGates(Gates):
    """A gate of 1 for every head and example, each a leaf of the graph, made when its attention is called.

    With the replacement ``"running_mean"`` the derivative is <z - r, dL/dz>, r the mean of the visible values.
    """

    def __init__(self, layout: HeadLayout, replacement: str = "nothing") -> None:
        self.replacement = replacement
        self.rules = {}
        self.used = set()
        self.leaves: dict[SiteKey, list[Tensor]] = {}
        self.layout = layout

    def apply(self, key: SiteKey, count: int, output_BQHD: Tensor, means: Callable[[], Tensor] | None = None) -> Tensor:
        """``output_BQHD`` times a new leaf of ones."""
        leaf = torch.ones(output_BQHD.shape[0], count, device=output_BQHD.device, requires_grad=True)
        self.leaves.setdefault(key, []).append(leaf)
        return self.replaced(output_BQHD, leaf.to(output_BQHD.dtype)[:, None, :, None], means)


@dataclass(frozen=True)
class GateGradients:
    """The gate gradients of one batch.

    Attributes:
        losses: (B,) detached.
        gradients: for each site dL/dgate (B, H); None where the loss does not depend on the site's heads.
    """

    losses: Tensor
    gradients: dict[SiteKey, Tensor | None]


def gate_gradients(
    model: Any,
    task: Task,
    loss: Loss,
    *,
    layout: HeadLayout,
    observer: Observer | None = None,
    replacement: str = "nothing",
) -> GateGradients:
    """One forward and one backward pass; the model's parameters get no gradients.

    Args:
        model: the model, in any mode; it is in eval mode meanwhile.
        task: a batch made ready by ``loss.prepare``.
        loss: the loss.
        layout: the model's heads.
        observer: looks on at the forward pass.
        replacement: what a gate below 1 lets in; see :func:`headwise.gate`.

    Raises:
        MeasureError: the loss is not finite, or does not depend on any head; the passage is named.
    """
    gates = LeafGates(layout, replacement)
    with ExitStack() as stack:
        for context in (evaluating(model.module), frozen(model.module), torch.enable_grad()):
            stack.enter_context(context)
        stack.enter_context(observe(model, observer, gates=gates))
        outputs = run_inputs(model, task)
        losses = checked_losses(loss, outputs, task)
        if not losses.requires_grad:
            raise MeasureError(
                f"the loss {loss.name} does not depend on the heads: no gradient flows from it to any of them (is it "
                "detached, or computed from the inputs alone?)"
            )
        leaves = [leaf for group in gates.leaves.values() for leaf in group]
        found = dict(zip(map(id, leaves), torch.autograd.grad(losses.sum(), leaves, allow_unused=True), strict=True))
    gradients = {
        site.key: _per_example([found[id(leaf)] for leaf in gates.leaves.get(site.key, [])], task.size, site.key)
        for site in layout.sites
    }
    _check(loss, gradients, losses)
    return GateGradients(losses.detach(), gradients)


def _check(loss: Loss, gradients: dict[SiteKey, Tensor | None], losses: Tensor) -> None:
    known = [gradient for gradient in gradients.values() if gradient is not None]
    if not known or not any(bool(gradient.any()) for gradient in known):
        raise MeasureError(
            f"the loss {loss.name} does not depend on the heads: every gate gradient is exactly 0 "
            f"(losses {_few(losses)})"
        )


def _few(losses: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in losses.detach().flatten()[:3].tolist())


def _per_example(gradients: list[Tensor | None], size: int, key: SiteKey) -> Tensor | None:
    """Sum over the calls of a site, and over the windows of an example where a call's batch holds windows."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            continue
        if gradient.shape[0] % size:
            raise MeasureError(
                f"{key}: a batch of {size} examples reached this attention as {gradient.shape[0]} rows, so gradients "
                "cannot be told apart by example; use batch_size=1"
            )
        part = gradient.double().view(size, -1, gradient.shape[1]).sum(1)
        total = part if total is None else total + part
    return total


def checked_losses(loss: Loss, outputs: Any, task: Task, reference: Any = None) -> Tensor:
    """(B,) losses, finite.

    Raises:
        MeasureError: a loss is NaN or infinite; the passage is named.
    """
    losses = loss(outputs, task, reference)
    bad = (~torch.isfinite(losses.detach())).nonzero().flatten().tolist()
    if bad:
        value = float(losses.detach()[bad[0]])
        raise MeasureError(
            f"{named(task.model, task.batch, bad[0])}: the loss {loss.name} is {value}, so importance means nothing; "
            "look at the input, the labels, or the model's dtype"
        )
    return losses


def run_inputs(model: Any, task: Task) -> Any:
    """One forward pass of the whole model on a task, without a cache."""
    module: nn.Module = model.module
    inputs = {name: value.to(model.device) for name, value in task.inputs.items()}
    extra = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
    return module(**inputs, **extra)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Inside, no parameter takes part in a backward pass; afterwards each does as before."""
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)

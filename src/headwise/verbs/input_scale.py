"""How large the numbers are that the attention layers of a model read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs import ModelNumbers
from headwise.errors import UnsupportedError
from headwise.models import Model
from headwise.models.examples import dummy_inputs
from headwise.trace import evaluating

__all__ = ["input_rms"]


def input_rms(model: Model, numbers: ModelNumbers) -> float:
    """Root mean square of what the attention layers of ``model`` read, over all layers.

    The model runs once on a small input: its example, or random tokens.

    Args:
        model: a model with weights.
        numbers: its attention layers, as :func:`headwise.verbs.cost.numbers` gives them.

    Raises:
        UnsupportedError: no layer is called with a tensor of its width, or no example can be made.
    """
    found: list[tuple[float, int]] = []
    inputs = dict(model.example) if model.example is not None else dummy_inputs(model.module)
    widths = {site.block: site.d_model for site in numbers.attention}
    with evaluating(model.module), torch.no_grad(), _listening(model.module, widths, found):
        model.module(**inputs)
    count = sum(size for _, size in found)
    if not count:
        raise UnsupportedError(
            f"{numbers.name}: no attention layer was called with a tensor of its width, so the scale of its input is "
            "not known; give input_rms"
        )
    return math.sqrt(sum(square for square, _ in found) / count)


@contextmanager
def _listening(root: nn.Module, widths: Mapping[str, int], found: list[tuple[float, int]]) -> Iterator[None]:
    hooks = []
    try:
        for path, width in widths.items():
            hook = root.get_submodule(path).register_forward_pre_hook(_hearing(width, found), with_kwargs=True)
            hooks.append(hook)
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hearing(width: int, found: list[tuple[float, int]]) -> Callable[..., None]:
    """Keep the sum of squares of the first floating tensor of ``width`` that a call is given."""

    def hear(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3 and value.shape[-1] == width:
                found.append((float(value.double().square().sum()), value.numel()))
                return

    return hear

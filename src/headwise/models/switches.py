"""Biases that a model's class builds under another config: a place for the intercept of a repair.

Llama's output projection has no bias as it is, and one, beside those of its queries, keys and values, where its config
says ``attention_bias``. The others are then zero, which changes nothing, and a stock checkpoint can say the repair.
Which value of which config does it is found by trying, not by the name of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from headwise.models.loading.silence import silenced

__all__ = ["REFUSALS", "Switch", "built", "lacks_bias", "shapes_of", "switch_for"]

#: What configs and classes raise when they do not take what they are given.
REFUSALS: Final = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    ZeroDivisionError,
    AssertionError,
    NotImplementedError,
    IndexError,
    StrictDataclassError,
)
#: How many values of a config may have to be turned at once.
_MOST: Final = 2


@dataclass(frozen=True)
class Switch:
    """A config that has a place for every bias of a model.

    Attributes:
        values: what it says otherwise, by name.
        zeros: biases that the class then builds and the model lacks, with their sizes.
        config: the config.
    """

    values: dict[str, bool]
    zeros: dict[str, int]
    config: Any

    def put(self, module: nn.Module) -> None:
        """Say it in the model's config, and give the model the biases that it lacks, all of them zero."""
        vars(getattr(module, "config")).update(self.values)  # noqa: B009
        for name, size in self.zeros.items():
            owner: Any = module.get_submodule(name.rpartition(".")[0])
            zero = torch.zeros(size, dtype=owner.weight.dtype, device=owner.weight.device)
            owner.bias = nn.Parameter(zero, requires_grad=owner.weight.requires_grad)

    def take_back(self, module: nn.Module) -> None:
        """Undo :meth:`put`."""
        vars(getattr(module, "config")).update({name: not value for name, value in self.values.items()})  # noqa: B009
        for name in self.zeros:
            setattr(module.get_submodule(name.rpartition(".")[0]), "bias", None)  # noqa: B010


def switch_for(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Any) -> Switch | None:
    """The change of ``config`` under which the model's class builds ``shapes`` and the fewest biases beside them.

    Args:
        module: the model; its layers say which of them have no bias.
        shapes: of every weight and buffer that is to have a place, by name.
        config: says the counts of heads already.
    """
    found = [one for one in _switches(module, shapes, config) if one is not None]
    return min(found, key=lambda one: (len(one.values), sum(one.zeros.values())), default=None)


def _switches(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Any) -> Iterator[Switch | None]:
    names = [
        name for name, value in vars(config).items() if "bias" in name and isinstance(value, bool) and name[0] != "_"
    ]
    for count in range(1, _MOST + 1):
        for chosen in combinations(names, count):
            yield _tried(module, shapes, config, chosen)


def _tried(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Any, names: tuple[str, ...]
) -> Switch | None:
    values = {name: not getattr(config, name) for name in names}
    try:
        changed = copy.deepcopy(config)
        for name, value in values.items():
            setattr(changed, name, value)
        changed = type(changed).from_dict(changed.to_dict())
        changed._attn_implementation = config._attn_implementation
    except REFUSALS:
        return None
    fresh = built(module, changed)
    if isinstance(fresh, str) or any(getattr(changed, name) is not value for name, value in values.items()):
        return None
    theirs = shapes_of(fresh)
    if any(theirs.get(name) != shape for name, shape in shapes.items()):
        return None
    more = {name: shape for name, shape in theirs.items() if name not in shapes}
    if not all(len(shape) == 1 and lacks_bias(module, name) for name, shape in more.items()):
        return None
    return Switch(values, {name: shape[0] for name, shape in more.items()}, changed)


def lacks_bias(module: nn.Module, name: str) -> bool:
    """Whether ``name`` is the bias of a layer that could have one and has none."""
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return False
    return last == "bias" and "bias" in owner._parameters and owner._parameters["bias"] is None


def built(module: nn.Module, config: Any) -> nn.Module | str:
    """What the model's class builds from ``config``, without values; or why it builds nothing."""
    kind: Any = type(module)
    try:
        with silenced(), torch.device("meta"):
            fresh: nn.Module = kind(copy.deepcopy(config))
    except REFUSALS as refusal:
        return f"{type(config).__name__} does not take these counts ({type(refusal).__name__}: {refusal})"
    return fresh


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every weight and buffer that is saved, by name."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}

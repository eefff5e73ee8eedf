"""Which loss fits a model, and what a caller's choice means."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from headwise.errors import InputError
from headwise.measures.importance.fidelity import Fidelity, Projection
from headwise.measures.importance.losses import CustomLoss, Labels, Loss, MaskedToken, NextToken, Target
from headwise.models import Model

__all__ = ["LOSSES", "loss_for"]

#: The losses that have a name; beside them ``"auto"`` and ``"module:function"``.
LOSSES: Final[Mapping[str, Loss]] = {
    "next_token": NextToken(),
    "masked_token": MaskedToken(),
    "target": Target(),
    "labels": Labels(),
    "fidelity_cosine": Fidelity(kind="cosine"),
    "fidelity_pooled": Fidelity(kind="pooled"),
    "fidelity_kl": Fidelity(kind="kl"),
    "projection": Projection(),
}


def loss_for(
    model: Model, asked: str | Loss | Callable[..., Any], *, labelled: bool, gradients: bool, mean: bool, seed: int
) -> Loss:
    """The loss that a caller means.

    Args:
        model: the model.
        asked: a name of :data:`LOSSES`, ``"auto"``, ``"module:function"``, a :class:`Loss`, or a function
            ``(outputs, batch) -> (B,)``.
        labelled: whether the inputs bring labels.
        gradients: whether its gradient is wanted.
        mean: average over an example's tokens instead of summing.
        seed: for what a loss draws at random.

    Raises:
        InputError: an unknown name (with the nearest), a module or function that cannot be imported, or gradients of a
            loss whose gradient is zero by construction.
    """
    if isinstance(asked, Loss):
        loss = asked
    elif callable(asked):
        loss = CustomLoss(function=asked, label=getattr(asked, "__name__", "custom"))
    elif not isinstance(asked, str):
        raise InputError(f"loss must be a name, a Loss or a function, and is a {type(asked).__name__}")
    elif ":" in asked:
        loss = CustomLoss(function=_imported(asked), label=asked)
    elif asked == "auto":
        loss = LOSSES[_fitting(model, labelled, gradients)]
    elif asked in LOSSES:
        loss = LOSSES[asked]
    else:
        known = ["auto", *LOSSES]
        near = difflib.get_close_matches(asked, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}, and module:function"
        raise InputError(f"there is no loss {asked!r}; {hint}")
    if gradients and loss.flat:
        raise InputError(
            f"the gradient of {loss.name} is exactly zero at the unchanged model, so no head would have any; take "
            "loss='projection' or a loss with labels, or measure by ablation"
        )
    if mean:
        loss = replace(loss, mean=True)
    return (
        replace(loss, seed=seed) if isinstance(loss, MaskedToken | Projection) and not isinstance(asked, Loss) else loss
    )


def _fitting(model: Model, labelled: bool, gradients: bool) -> str:
    from transformers.models.auto import modeling_auto as auto

    kind = type(model.module).__name__
    if labelled:
        return "labels"
    for names, loss in (
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "next_token"),
        (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "masked_token"),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "target"),
        (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "target"),
    ):
        if kind in _flat(names.values()):
            return loss
    return "projection" if gradients else "fidelity_cosine"


def _flat(values: Any) -> set[str]:
    return {name for value in values for name in ([value] if isinstance(value, str) else value)}


def _imported(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"loss {place!r}: the module {module!r} cannot be imported ({error})") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise InputError(f"loss {place!r}: {module} has no function {name!r}")
    function: Callable[..., Any] = found
    return function

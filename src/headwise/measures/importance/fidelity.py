"""Losses without labels: fidelity to the model's own output, and random projections of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from headwise.data import PADDING
from headwise.errors import InputError
from headwise.measures.importance.losses import Loss, Task, logits_of
from headwise.measures.importance.passages import generator_for, passage_keys

__all__ = ["Fidelity", "Projection"]


def main_output(outputs: Any) -> Tensor:
    """What a model is for: its logits, else its embedding or hidden states, else its first floating-point tensor."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(outputs, name, None)
        if isinstance(found, Tensor):
            return found
    values = (
        [outputs]
        if isinstance(outputs, Tensor)
        else list(outputs.values() if isinstance(outputs, Mapping) else outputs)
    )
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise InputError(f"the model gives {type(outputs).__name__} without a floating-point tensor to compare")


def _rows(output: Tensor) -> Tensor:
    """(B, rows, width) from an output with or without positions."""
    return output[:, None] if output.ndim == 2 else output.flatten(1, -2)


def _real_rows(output_BRE: Tensor, task: Task) -> Tensor:
    kinds = task.batch.decoder_rows if task.batch.decoder_rows is not None else task.batch.input_rows
    if kinds is not None and kinds.shape == output_BRE.shape[:2]:
        return (kinds != PADDING).to(output_BRE.device)
    return torch.ones(output_BRE.shape[:2], dtype=torch.bool, device=output_BRE.device)


@dataclass(frozen=True)
class Fidelity(Loss):
    """How far the output moves from the unchanged model's own: for models and data without labels.

    Attributes:
        kind: ``"cosine"``: 1 - cosine of each row of the output. ``"pooled"``: 1 - cosine of the mean over an example's
            rows, which is what encoders of sentences are used for. ``"kl"``: divergence of the predicted distribution
            from the unchanged one, nats.
    """

    kind: str = "cosine"
    flat: ClassVar[bool] = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """``"fidelity_cosine"``, ``"fidelity_pooled"`` or ``"fidelity_kl"``."""
        return f"fidelity_{self.kind}"

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Nats for KL, a pure number for the cosine."""
        return "nats" if self.kind == "kl" else "1 - cosine"

    @property
    def counted(self) -> str:
        """What is summed over."""
        return "pooled rows" if self.kind == "pooled" else "rows"

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:
        """(B,)."""
        if reference is None:
            raise AssertionError("a fidelity loss needs what the unchanged model gave")
        if self.kind == "kl":
            ours, theirs = logits_of(outputs, self.name), logits_of(reference, self.name)
        else:
            ours, theirs = main_output(outputs), main_output(reference)
        ours, theirs = _rows(ours).float(), _rows(theirs.detach()).float()
        real = _real_rows(ours, task)
        if self.kind == "pooled":
            ours, theirs = ((rows * real[..., None]).sum(1) for rows in (ours, theirs))
            return 1 - functional.cosine_similarity(ours, theirs, dim=-1)
        if self.kind == "kl":
            each = functional.kl_div(
                ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
        else:
            each = 1 - functional.cosine_similarity(ours, theirs, dim=-1)
        total = torch.where(real, each, 0.0).sum(1)
        return total / real.sum(1).clamp(min=1) if self.mean else total


@dataclass(frozen=True)
class Projection(Loss):
    """A random projection of each row of the output, scaled to unit length: for gradients without labels.

    The gradient of a fidelity loss is zero at the unchanged model, by construction. The squared gradient of a random
    projection is, in expectation, the squared length of the derivative of the unit output: the diagonal of the
    Gauss-Newton matrix of twice the cosine fidelity. Directions are fixed by the passage and the seed.

    Attributes:
        seed: of the directions.
    """

    seed: int = 0
    name: ClassVar[str] = "projection"
    unit: ClassVar[str] = "1"

    @property
    def counted(self) -> str:
        """What is summed over."""
        return "rows"

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:  # noqa: ARG002
        """(B,), signed."""
        rows = _rows(main_output(outputs)).float()
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        real = _real_rows(rows, task)
        losses = []
        for row, key in enumerate(passage_keys(task.batch)):
            count = int(real[row].sum())
            source = generator_for(key, self.seed, "projection")
            draw = torch.randn(count, rows.shape[-1], generator=source, device="cpu")
            losses.append((rows[row][real[row]] * draw.to(rows)).sum() / (count if self.mean else 1))
        return torch.stack(losses)

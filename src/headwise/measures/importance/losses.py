"""Losses, one number per example: what importance is measured on.

Every loss is summed over an example's tokens (or rows); the normalisation, where one is asked for, is by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from headwise.data import PADDING, TOKEN, Batch
from headwise.errors import DataError, InputError, MeasureError
from headwise.measures.importance.passages import generator_for, named, passage_keys
from headwise.models import Model

__all__ = ["CustomLoss", "Labels", "Loss", "MaskedToken", "NextToken", "Target", "Task", "logits_of"]

_IGNORED = -100


@dataclass(frozen=True)
class Task:
    """One batch made ready for a loss.

    Attributes:
        model: the model that will run.
        batch: where it came from.
        inputs: what the model takes.
        targets: int64 (B, Q) beside the logits, -100 where there is none; None for losses without.
    """

    model: Model
    batch: Batch
    inputs: Mapping[str, Tensor]
    targets: Tensor | None = None

    @property
    def size(self) -> int:
        """Examples in the batch."""
        return len(self.batch.passages)


@dataclass(frozen=True)
class Loss:
    """A loss per example.

    Attributes:
        mean: divide each example's sum by the number of its targets or rows.
    """

    mean: bool = False
    name: ClassVar[str] = ""
    unit: ClassVar[str] = "nats"
    #: whether its gradient at the unchanged model is zero by construction
    flat: ClassVar[bool] = False

    def prepare(self, model: Model, batch: Batch) -> Task:
        """Inputs and targets of a batch."""
        return Task(model, batch, dict(batch.inputs))

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:
        """(B,) losses. ``reference`` is what the unchanged model gave, for losses that compare with it."""
        raise NotImplementedError

    @property
    def said(self) -> str:
        """Name and normalisation, for tables and files."""
        return f"{self.name}, {'mean' if self.mean else 'sum'} over the example's {self.counted}"

    @property
    def counted(self) -> str:
        """What is summed over."""
        return "tokens"

    def _over_targets(self, logits: Tensor, task: Task) -> Tensor:
        """Negative log-likelihood of the targets, summed (or averaged) per example."""
        targets = task.targets
        assert targets is not None
        targets = targets.to(logits.device)
        if logits.shape[:2] != targets.shape:
            raise MeasureError(
                f"the loss {self.name} needs logits for {tuple(targets.shape)} positions, and the model gave "
                f"{tuple(logits.shape)}"
            )
        each = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED, reduction="none"
        )
        total = each.view(targets.shape).sum(1)
        return total / (targets != _IGNORED).sum(1).clamp(min=1) if self.mean else total


def logits_of(outputs: Any, loss: str) -> Tensor:
    """The logits of a model's output."""
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the loss {loss} needs logits, and the model gives {type(outputs).__name__} without them; load the model "
            "with its head, or take loss='fidelity_cosine' (ablation) or loss='projection' (gradients)"
        )
    return logits


def _checked_tokens(model: Model, batch: Batch, kinds: Tensor, what: str) -> None:
    few = ((kinds == TOKEN).sum(1) < 2).nonzero().flatten().tolist()
    if few:
        raise DataError(f"{named(model, batch, few[0])}: has fewer than two tokens, and {what} needs at least two")


def _token_kinds(model: Model, batch: Batch, decoder: bool, loss: str) -> tuple[Tensor, Tensor]:
    name = "decoder_input_ids" if decoder else "input_ids"
    kinds = batch.decoder_rows if decoder else batch.input_rows
    ids = batch.inputs.get(name)
    if ids is None or kinds is None:
        raise InputError(f"the loss {loss} needs {name}; these inputs have {', '.join(batch.inputs)}")
    _checked_tokens(model, batch, kinds, f"the loss {loss}")
    return ids, kinds


def _shifted(ids: Tensor, kinds: Tensor) -> Tensor:
    """The token after each real position, where that is a token of the text."""
    targets = torch.full_like(ids, _IGNORED)
    has = (kinds[:, 1:] == TOKEN) & (kinds[:, :-1] != PADDING)
    targets[:, :-1] = torch.where(has, ids[:, 1:], _IGNORED)
    return targets


@dataclass(frozen=True)
class NextToken(Loss):
    """Negative log-likelihood of every token of the text given what stands before it; special tokens are no targets."""

    name: ClassVar[str] = "next_token"

    def prepare(self, model: Model, batch: Batch) -> Task:
        """Targets are the inputs shifted by one."""
        ids, kinds = _token_kinds(model, batch, decoder=False, loss=self.name)
        return Task(model, batch, dict(batch.inputs), _shifted(ids, kinds))

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:  # noqa: ARG002
        """(B,) nats."""
        return self._over_targets(logits_of(outputs, self.name), task)


@dataclass(frozen=True)
class Target(Loss):
    """Negative log-likelihood of every target token given the source and the targets before it (teacher forcing)."""

    name: ClassVar[str] = "target"

    def prepare(self, model: Model, batch: Batch) -> Task:
        """Targets are the decoder's inputs shifted by one."""
        ids, kinds = _token_kinds(model, batch, decoder=True, loss=self.name)
        return Task(model, batch, dict(batch.inputs), _shifted(ids, kinds))

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:  # noqa: ARG002
        """(B,) nats."""
        return self._over_targets(logits_of(outputs, self.name), task)


@dataclass(frozen=True)
class MaskedToken(Loss):
    """Negative log-likelihood of tokens replaced by the mask token.

    Which tokens are masked is fixed by the passage and the seed alone: the same in any batch and in every ablation.

    Attributes:
        share: how many of a passage's tokens are masked, at least one.
        mask_id: id of the mask token; None takes the tokenizer's.
        seed: of the choice.
    """

    share: float = 0.15
    mask_id: int | None = None
    seed: int = 0
    name: ClassVar[str] = "masked_token"

    @property
    def counted(self) -> str:
        """What is summed over."""
        return "masked tokens"

    def prepare(self, model: Model, batch: Batch) -> Task:
        """Mask, and take the masked tokens as targets."""
        ids, kinds = _token_kinds(model, batch, decoder=False, loss=self.name)
        mask_id = self.mask_id
        if mask_id is None:
            mask_id = getattr(model.tokenizer, "mask_token_id", None)
        if mask_id is None:
            raise InputError(
                "the loss masked_token needs the id of the mask token, and there is no tokenizer that has one; give "
                "loss=MaskedToken(mask_id=...)"
            )
        masked, targets = ids.clone(), torch.full_like(ids, _IGNORED)
        for row, key in enumerate(passage_keys(batch)):
            tokens = (kinds[row] == TOKEN).nonzero().flatten()
            order = torch.randperm(len(tokens), generator=generator_for(key, self.seed, "mask"), device="cpu")
            chosen = tokens[order[: max(1, round(self.share * len(tokens)))].to(tokens.device)]
            targets[row, chosen] = ids[row, chosen]
            masked[row, chosen] = mask_id
        return Task(model, batch, {**batch.inputs, "input_ids": masked}, targets)

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:  # noqa: ARG002
        """(B,) nats."""
        return self._over_targets(logits_of(outputs, self.name), task)


@dataclass(frozen=True)
class Labels(Loss):
    """The loss of labels that the inputs bring along.

    ``labels`` of whole numbers (B,) and logits (B, classes): cross-entropy. (B, Q) and logits (B, Q, classes):
    cross-entropy over positions whose label is not -100; for a causal language model the label of a position is
    predicted from the position before. Floating-point labels of the logits' shape: squared error for one output or
    ``problem_type`` regression, otherwise binary cross-entropy.
    """

    name: ClassVar[str] = "labels"

    @property
    def counted(self) -> str:
        """What is summed over."""
        return "labels"

    def prepare(self, model: Model, batch: Batch) -> Task:
        """Labels leave the inputs, but where an encoder-decoder model makes its decoder's input from them."""
        labels = batch.inputs.get("labels")
        if labels is None:
            raise InputError(f"the loss labels needs 'labels' in the inputs; they have {', '.join(batch.inputs)}")
        inputs = dict(batch.inputs)
        if not (model.input_rules.encoder_decoder and "decoder_input_ids" not in inputs):
            del inputs["labels"]
        if labels.ndim == 2 and not labels.is_floating_point() and _is_causal(model):
            labels = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        return Task(model, batch, inputs, labels)

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:  # noqa: ARG002
        """(B,), in nats (squared units of the label for regression)."""
        logits, labels = logits_of(outputs, self.name), task.targets
        assert labels is not None
        labels = labels.to(logits.device)
        if labels.is_floating_point():
            logits = logits[:, 0] if logits.ndim == labels.ndim + 1 and logits.shape[-1] == 1 else logits
            kind = getattr(task.model.config, "problem_type", None)
            several = labels.ndim > 1 and labels.shape[-1] > 1 and kind != "regression"
            function = functional.binary_cross_entropy_with_logits if several else functional.mse_loss
            self._same_shape(logits.shape, labels.shape)
            each = function(logits.float(), labels.float(), reduction="none").flatten(1 if labels.ndim > 1 else 0)
            return (each.mean(1) if self.mean else each.sum(1)) if each.ndim > 1 else each
        self._same_shape(logits.shape[:-1], labels.shape)
        if labels.ndim == 1:
            return functional.cross_entropy(logits.float(), labels, reduction="none")
        return self._over_targets(logits, replace(task, targets=labels))

    def _same_shape(self, logits: Any, labels: Any) -> None:
        if tuple(logits) != tuple(labels):
            raise InputError(
                f"the labels have the shape {tuple(labels)}, and the model's logits go with {tuple(logits)}"
            )


def _is_causal(model: Model) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(model.module).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


@dataclass(frozen=True)
class CustomLoss(Loss):
    """A loss of your own.

    Attributes:
        function: called with the model's output and the batch (:class:`~headwise.data.Batch`); gives one loss per
            example, (B,), through which gradients flow.
        label: its name in tables.
    """

    function: Callable[[Any, Batch], Tensor] = field(default=lambda _outputs, _batch: torch.zeros(0))
    label: str = "custom"
    unit: ClassVar[str] = "loss"

    @property
    def name(self) -> str:  # type: ignore[override]
        """The label."""
        return self.label

    @property
    def said(self) -> str:
        """Name, for tables and files."""
        return f"{self.label}, as the function gives it"

    def __call__(self, outputs: Any, task: Task, reference: Any = None) -> Tensor:  # noqa: ARG002
        """(B,), checked."""
        found = self.function(outputs, task.batch)
        if not isinstance(found, Tensor) or tuple(found.shape) != (task.size,) or not found.is_floating_point():
            said = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"the loss {self.label} gave {said}; it must give one floating-point number per example, ({task.size},)"
            )
        return found

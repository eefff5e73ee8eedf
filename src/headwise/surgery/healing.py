"""Healing: a pruned model learns to give what its original gives, with the Trainer of transformers.

The loss is the Kullback-Leibler divergence from the original's next-token distribution where the model has logits over
a vocabulary, and elsewhere the squared difference of the last hidden state as a part of its square. The model stays in
eval mode (no dropout), and every weight is trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise import artifacts
from headwise.errors import InputError, MeasureError, RunError, UnsupportedError
from headwise.models.loading.silence import silenced
from headwise.models.source import weight_hash
from headwise.surgery.averaging import still_zero
from headwise.trace import evaluating

__all__ = ["Healing", "heal"]

_TICKET: Final = "healing.json"
#: The loss before and after is taken over at most so many batches, evenly spread: over all of them it would take as
#: long as a third of the training.
_SPREAD: Final = 16


@dataclass(frozen=True)
class Healing:
    """How a model is healed.

    Attributes:
        steps: of the optimiser, one batch each.
        rate: peak learning rate of AdamW, after a warm-up over a tenth of the steps, down to 0 along a cosine.
        seed: of the order of the batches.
        folder: where checkpoints go and where an interrupted run is taken up again; None: nowhere.
        every: steps between two checkpoints.
    """

    steps: int
    rate: float = 1e-4
    seed: int = 0
    folder: Path | None = None
    every: int = 50

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("every", self.every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} of healing must be a whole number, at least 1, and is {value!r}")
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float) or not 0 < self.rate < 1:
            raise InputError(f"the learning rate of healing must be a number between 0 and 1, and is {self.rate!r}")


def heal(
    small: nn.Module,
    original: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    how: Healing,
    *,
    data: str = "",
    shown: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Train ``small``, in place, to give what ``original`` gives.

    Args:
        small: the pruned model, in float32 or bfloat16.
        original: the model before, of the same class.
        batches: inputs of forward passes; taken in random order, again and again.
        how: steps, rate, folder.
        data: names the data, so that a run is not taken up again on other data.
        shown: called with the number of steps done.

    Returns:
        For the record: ``steps``, ``loss`` (which), ``first`` and ``last`` (mean loss before and after, over at most 16
        batches spread over the text), ``rate``, ``seed``, ``batches`` and ``resumed`` (the step it was taken up at).

    Raises:
        UnsupportedError: accelerate is not installed, or the model is in float16.
        InputError: no batches, no weight that may be trained, or a folder of another healing.
        MeasureError: the loss is not finite.
        RunError: checkpoints cannot be written.
    """
    _check(small, batches)
    ticket = {
        "weights": weight_hash(small), "original": weight_hash(original), "data": data, "steps": how.steps,
        "rate": how.rate, "seed": how.seed, "batches": len(batches),
    }  # fmt: skip
    with ExitStack() as stack:
        folder = how.folder
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="headwise-heal-")))
        start = _taken_up(folder, ticket)
        stack.enter_context(evaluating(small))
        stack.enter_context(evaluating(original))
        first, kind = _loss_over(small, original, batches)
        trainer = _trainer(small, original, batches, how, folder, shown)
        with silenced(), _writing(folder), still_zero(small):
            trainer.train(resume_from_checkpoint=None if start is None else str(folder / f"checkpoint-{start}"))
        small.eval()
        last, _ = _loss_over(small, original, batches)
    return {
        "steps": how.steps, "loss": kind, "first": first, "last": last, "rate": float(how.rate), "seed": how.seed,
        "batches": len(batches), "resumed": start,
    }  # fmt: skip


def _check(small: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> None:
    if find_spec("accelerate") is None:
        raise UnsupportedError("healing trains with transformers' Trainer, which needs accelerate; pip install "
                               "'headwise[heal]'")  # fmt: skip
    if not batches:
        raise InputError("healing needs text (or inputs) to learn from; give texts (--text FILE)")
    if not any(value.requires_grad for value in small.parameters()):
        raise InputError("healing trains weights, and every weight of the model has requires_grad=False; unfreeze some")
    if any(value.dtype == torch.float16 for value in small.parameters()):
        raise UnsupportedError("healing in float16 would overflow; load the model with dtype='float32' or 'bfloat16'")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Inside, checkpoints are written without a bar of their own, and a full disk is said in a sentence.

    Raises:
        RunError: one could not be written.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        said = str(error).partition("\n")[0]
        raise RunError(f"{folder}: a checkpoint of healing cannot be written ({said}); make room on the disk") from None
    finally:
        if shown:
            logging.enable_progress_bar()


def _taken_up(folder: Path, ticket: Mapping[str, Any]) -> int | None:
    """The step of the last whole checkpoint in the folder, or None; the folder is made ready.

    Raises:
        InputError: the folder is of another healing, or of something else.
    """
    file = folder / _TICKET
    if file.is_file():
        try:
            theirs = json.loads(file.read_bytes())
        except (ValueError, RecursionError):
            raise InputError(f"{file} is damaged; delete {folder}, and healing begins anew") from None
        if theirs != dict(ticket):
            raise InputError(
                f"{folder} holds the checkpoints of another healing (other weights, data, steps or rate); delete it, "
                "or choose another folder"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no healing; choose another folder for its checkpoints")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        artifacts.replace_file(file, json.dumps(dict(ticket)).encode())
    steps = [
        int(one.name.removeprefix("checkpoint-"))
        for one in folder.glob("checkpoint-*")
        if (one / "trainer_state.json").is_file()
    ]
    return max(steps, default=None)


def distance(student: Any, teacher: Any, rows: Tensor | None) -> tuple[Tensor, str]:
    """How far two outputs are apart, and what that is; ``rows`` (B, L) says which rows count."""
    logits = getattr(student, "logits", None)
    if isinstance(logits, Tensor) and logits.ndim == 3:
        ours, theirs = logits.float().log_softmax(-1), teacher.logits.float().log_softmax(-1)
        each = (theirs.exp() * (theirs - ours)).sum(-1)
        name = "kl"
    else:
        one, other = (
            (got if isinstance(got, Tensor) else getattr(got, "last_hidden_state", None)) for got in (student, teacher)
        )
        if one is None or other is None:
            one, other = logits, getattr(teacher, "logits", None)
        if one is None or other is None:
            raise UnsupportedError(
                f"{type(student).__name__} has neither logits nor a last hidden state, so there is nothing to heal "
                "towards"
            )
        each = (one.float() - other.float()).square().sum(-1) / other.float().square().sum(-1).mean().clamp(min=1e-12)
        name = "squared difference"
    if rows is not None and rows.shape == each.shape:
        rows = rows.to(each.dtype)
        return (each * rows).sum() / rows.sum().clamp(min=1), name
    return each.mean(), name


def _rows(inputs: Mapping[str, Tensor]) -> Tensor | None:
    found = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    return found if isinstance(found, Tensor) and found.ndim == 2 else None


def _loss_over(small: nn.Module, original: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, str]:
    total, kind = 0.0, ""
    batches = batches[:: -(-len(batches) // _SPREAD)]
    for inputs in batches:
        with torch.no_grad():
            one, kind = distance(small(**inputs), original(**inputs), _rows(inputs))
        total += float(one)
    mean = total / len(batches)
    if not mean < float("inf"):
        raise MeasureError("the loss of healing is not finite; take a lower rate, or look at the text")
    return mean, kind


def _trainer(
    small: nn.Module,
    original: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    how: Healing,
    folder: Path,
    shown: Callable[[int], None] | None,
) -> Any:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Distilling(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_more: Any) -> Any:
            model.eval()
            with torch.no_grad():
                teacher = original(**inputs)
            student = model(**inputs)
            loss, _ = distance(student, teacher, _rows(inputs))
            if not bool(torch.isfinite(loss)):
                raise MeasureError("the loss of healing is not finite; take a lower rate, or look at the text")
            return (loss, student) if return_outputs else loss

    class Shown(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_more: Any) -> None:
            if shown is not None:
                shown(state.global_step)

    device = next(small.parameters()).device
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=how.steps, per_device_train_batch_size=1, learning_rate=how.rate,
        lr_scheduler_type="cosine", warmup_steps=max(1, how.steps // 10), weight_decay=0.0, seed=how.seed,
        save_strategy="steps" if how.folder is not None else "no", save_steps=how.every, save_total_limit=2,
        logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=device.type == "cpu",
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Distilling(
        model=small,
        args=arguments,
        train_dataset=[dict(one) for one in batches],
        data_collator=lambda listed: listed[0],
        callbacks=[Shown()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout
    return trainer

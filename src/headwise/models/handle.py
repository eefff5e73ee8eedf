"""A model as headwise holds it: the module, what turns text into its input, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.loading.demands import input_rules
from headwise.models.loading.modules import check_module, unwrapped
from headwise.models.source import Source, weight_hash
from headwise.models.surgery_record import SurgeryRecord

if TYPE_CHECKING:
    from headwise.data import InputRules
    from headwise.layout import HeadLayout

__all__ = ["Model", "wrap"]


@dataclass(eq=False)
class Model:
    """A module with what belongs to it. Made by :func:`headwise.load` and :func:`headwise.wrap`; never changes it.

    Attributes:
        module: the model itself.
        tokenizer: turns text into ids, or None.
        processor: feature extractor or image processor, or None; kept for the user, headwise takes ready inputs.
        source: where the model came from, and a hash of its weights.
        example: inputs for one small forward pass, used to find the heads; None lets headwise make some.
        notes: what the user should know about how it was loaded.
        tokenizer_note: why there is no tokenizer, or None.
        surgery: what was cut out of it and the proof, or None.
    """

    module: nn.Module
    tokenizer: Any | None
    processor: Any | None
    source: Source
    example: Mapping[str, Tensor] | None = None
    notes: tuple[str, ...] = ()
    tokenizer_note: str | None = None
    surgery: SurgeryRecord | None = None
    _layout: HeadLayout | None = field(default=None, init=False, repr=False)

    @property
    def layout(self) -> HeadLayout:
        """Where the heads sit: found by one small forward pass, once.

        Raises:
            UnsupportedError: the model has no attention that headwise understands.
        """
        if self._layout is None:
            from headwise.models import discover

            self._layout = discover(self.module, self.example)
        return self._layout

    @property
    def config(self) -> Any:
        """The module's config, or None."""
        return getattr(self.module, "config", None)

    @property
    def device(self) -> torch.device:
        """Where the input belongs: the device of the first parameter."""
        first = next(self.module.parameters(), None)
        return first.device if first is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter; float32 where there is none."""
        return next((value.dtype for value in self.module.parameters() if value.is_floating_point()), torch.float32)

    @property
    def name(self) -> str:
        """The name for people: the path or hub id as given, or the module's class."""
        return self.source.name

    @property
    def input_rules(self) -> InputRules:
        """What the model demands of its input."""
        return input_rules(self.module)

    def save(self, folder: str | Path, *, overwrite: bool = False, max_shard_size: int = 5 * 10**9) -> Path:
        """Save the model, cut or whole, as a folder of safetensors and JSON that :func:`headwise.load` reads.

        Where the result can be said in transformers' own terms (uniform head counts in a family that takes them), the
        folder is a plain transformers checkpoint as well; elsewhere ``from_pretrained`` finds no weights in it and
        says so.

        Args:
            folder: the target; it must not exist, or be empty, unless ``overwrite`` is given and it was saved by
                headwise.
            overwrite: whether a model that headwise saved there may be replaced.
            max_shard_size: bytes of the largest file of weights.

        Raises:
            RunError: the folder may not be written, or writing failed; nothing half-done is left.
            UnsupportedError: the model's class is not one of transformers', so it could not be built again.
        """
        from headwise.models.saving import save_model

        return save_model(self, folder, overwrite=overwrite, max_shard_size=max_shard_size)

    def __repr__(self) -> str:
        kind = type(self.module).__name__
        words = "with tokenizer" if self.tokenizer is not None else "without tokenizer"
        return f"Model({self.name!r}, {kind}, {str(self.dtype).removeprefix('torch.')} on {self.device}, {words})"


def wrap(
    module: nn.Module,
    tokenizer: Any | None = None,
    *,
    example: Mapping[str, Tensor] | None = None,
    name: str | None = None,
    processor: Any | None = None,
) -> Model:
    """Hold a model that is already in memory. Nothing is copied and nothing is changed.

    Args:
        module: a transformers model, or any module; whether it has heads shows when they are looked for.
        tokenizer: a transformers tokenizer, a ``tokenizers.Tokenizer``, or a function from a string to a list of ids.
        example: inputs for one small forward pass, by name, batch first; needed where headwise cannot make some.
        name: for people; default the module's class.
        processor: kept with the model.

    Raises:
        InputError: not a module, or an example that is no mapping of tensors.
        UnsupportedError: a wrapped (data parallel, PEFT), quantised, traced or sharded module.
        ModelError: parameters without values, or on several devices.

    >>> wrap(torch.nn.Linear(2, 3)).name
    'Linear'
    """
    if isinstance(module, Model):
        raise InputError("wrap takes a module, and a headwise Model was given; it needs no wrapping")
    inner, notes = unwrapped(module)
    check_module(inner)
    if example is not None and not (
        isinstance(example, Mapping) and example and all(isinstance(value, Tensor) for value in example.values())
    ):
        raise InputError(f"example must be a mapping from input names to tensors, and is a {type(example).__name__}")
    source = Source(name or type(inner).__name__, None, None, "memory", lambda: weight_hash(inner))
    reason = None if tokenizer is not None else "none was given to wrap"
    return Model(inner, tokenizer, processor, source, example, notes, reason)

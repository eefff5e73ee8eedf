"""What a model demands of its input, as plain numbers: the data package knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["InputRules", "TakesInput"]


@dataclass(frozen=True)
class InputRules:
    """The demands of one model on its input.

    Attributes:
        main_input: name of the input that carries the data, ``"input_ids"`` for text models.
        accepts: names that the model's forward takes; None when it takes any name.
        vocabulary: rows of the input embedding; ids must lie in ``0 .. vocabulary - 1``. None: not known.
        positions: most tokens of an input that the model has learned or tabulated positions for; None: no such limit.
        trained_length: the length that a model with rotary positions was trained for; longer input runs, with a
            warning.
        positions_from: how the model numbers its tokens: ``"left"`` (0 at the left edge, whatever the mask, unless
            ``position_ids`` is given), ``"mask"`` (counted over the attention mask), ``"padding_id"`` (counted over ids
            other than ``padding_id``) or ``"none"`` (no absolute positions, so that a shift changes nothing).
        padding_id: an id for padding positions; any id does, because the attention mask hides it.
        encoder_decoder: whether the model has a decoder that reads ``decoder_input_ids``.
        decoder_start: id of the decoder's first token, or None.
        decoder_vocabulary, decoder_positions: the same two limits for the decoder.
        float_dtype: dtype that floating-point inputs are cast to, or None to leave them.
    """

    main_input: str = "input_ids"
    accepts: frozenset[str] | None = None
    vocabulary: int | None = None
    positions: int | None = None
    trained_length: int | None = None
    positions_from: str = "left"
    padding_id: int = 0
    encoder_decoder: bool = False
    decoder_start: int | None = None
    decoder_vocabulary: int | None = None
    decoder_positions: int | None = None
    float_dtype: torch.dtype | None = None

    def takes(self, name: str) -> bool:
        """Whether the model's forward has a parameter of this name."""
        return self.accepts is None or name in self.accepts


class TakesInput(Protocol):
    """What :func:`headwise.data.batches` needs of a model."""

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer, or None."""

    @property
    def input_rules(self) -> InputRules:
        """The model's demands on its input."""

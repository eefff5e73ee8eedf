"""What was read: the counts and choices that a run records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Facts"]


@dataclass
class Facts:
    """Counts of one pass over the data. They grow while batches are taken and are whole when the last one was.

    Attributes:
        files: for each file its path, format and SHA-256; empty for data from memory.
        passages: passages (or windows, or ready examples) that reached the model.
        tokens: real tokens of these, special tokens not counted; of encoder and decoder together.
        special_tokens: special tokens of these, which the tokenizer or the decoder's start added.
        padding: positions that only fill up batches.
        truncated_passages, truncated_tokens: what ``max_length`` took away.
        skipped_passages: passages without a single token of text.
        over_trained_length: passages longer than a rotary model was trained for.
        longest: tokens of the longest passage, special ones included.
        batches: number of batches.
        padding_side: ``"right"`` or ``"left"``; None where nothing was padded by headwise.
        window: tokens of a window, or None.
        decoder: where the decoder's input came from, or None.
        notes: what the reader should know, one sentence each.
    """

    files: list[dict[str, str]] = field(default_factory=list)
    passages: int = 0
    tokens: int = 0
    special_tokens: int = 0
    padding: int = 0
    truncated_passages: int = 0
    truncated_tokens: int = 0
    skipped_passages: int = 0
    over_trained_length: int = 0
    longest: int = 0
    batches: int = 0
    padding_side: str | None = None
    window: int | None = None
    decoder: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

"""Parts of the data: one half and the other, a sample. Which passage is where depends on its place alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from headwise.data import PADDING, Batch

__all__ = ["Part", "sample", "tokens_of"]

#: What a passage of inputs that are no tokens (audio, images) counts as.
_UNCOUNTED = 128


@dataclass(frozen=True)
class Part:
    """The passages of some batches whose number ``wanted`` takes.

    Attributes:
        batches: all of them; gone through again and again.
        wanted: whether a passage, by its number in the data, belongs to the part.
    """

    batches: Iterable[Batch]
    wanted: Callable[[int], bool] = lambda _number: True

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            keep = [row for row, number in enumerate(batch.passages) if self.wanted(number)]
            if len(keep) == len(batch.passages):
                yield batch
            elif keep:
                yield _rows(batch, keep)


def sample(part: Iterable[Batch], tokens: int) -> list[Batch]:
    """Passages from all over ``part``, about so many tokens in all."""
    counts: dict[int, int] = {}
    for batch in part:
        for row, number in enumerate(batch.passages):
            counts[number] = tokens_of(batch, row)
    stride = max(1, round(sum(counts.values()) / max(1, tokens)))
    chosen = set(sorted(counts)[::stride])
    return list(Part(part, chosen.__contains__))


def tokens_of(batch: Batch, row: int | None = None) -> int:
    """Tokens of a row of a batch, or of the batch: of the decoder as well where it has one."""
    rows = range(len(batch.passages)) if row is None else (row,)
    kinds = [one for one in (batch.input_rows, batch.decoder_rows) if one is not None]
    if batch.input_rows is None:
        return len(rows) * _UNCOUNTED
    return sum(int((one[list(rows)] != PADDING).sum()) for one in kinds)


def _rows(batch: Batch, keep: list[int]) -> Batch:
    whole = len(batch.passages)
    return replace(
        batch,
        inputs={
            name: value[keep] if value.ndim and value.shape[0] == whole else value
            for name, value in batch.inputs.items()
        },
        passages=tuple(batch.passages[row] for row in keep),
        input_rows=None if batch.input_rows is None else batch.input_rows[keep],
        decoder_rows=None if batch.decoder_rows is None else batch.decoder_rows[keep],
        tokens=round(batch.tokens * len(keep) / whole),
        where=tuple(batch.where[row] for row in keep) if batch.where else (),
        texts=tuple(batch.texts[row] for row in keep) if batch.texts else (),
        targets=tuple(batch.targets[row] for row in keep) if batch.targets else (),
    )

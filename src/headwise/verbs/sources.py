"""What a verb was given to read, as one source; and a look through it before the model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headwise.data import Batch, Batches, Facts, Passages, as_passages, read_inputs, read_passages
from headwise.errors import InputError
from headwise.verbs.forecast import Bar

__all__ = ["Survey", "look_through", "source_of"]

_TABLES: Final = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
#: an example for finding a model's heads needs no more tokens than this
_EXAMPLE_TOKENS: Final = 16


def source_of(
    texts: Any, inputs: Any, *, window: int | None, field: str | None, target_field: str | None
) -> tuple[Any, dict[str, Any]]:
    """One source for :func:`headwise.data.batches`, and the arguments as ``run.json`` records them.

    Raises:
        InputError: neither or both of ``texts`` and ``inputs``, or an option that does not go with them.
    """
    about_text = {"window": window, "field": field, "target_field": target_field}
    if (texts is None) == (inputs is None):
        which = "neither was given" if texts is None else "both were given"
        raise InputError(f"give texts or inputs, one of the two; {which}")
    if inputs is None:
        return _texts(texts, about_text), {"texts": _said(texts), **about_text}
    extra = [name for name, value in about_text.items() if value is not None]
    if extra:
        raise InputError(f"{extra[0]} is about text, and inputs are ready as they are; leave it out")
    if isinstance(inputs, str | Path):
        return read_inputs(inputs), {"inputs": str(inputs)}
    if isinstance(inputs, Iterator):
        inputs = list(inputs)
    return inputs, {"inputs": _said(inputs)}


def _texts(texts: Any, about: Mapping[str, Any]) -> Passages:
    if isinstance(texts, Passages):
        return texts
    if isinstance(texts, Iterator):
        texts = list(texts)
    several = list(texts) if isinstance(texts, Sequence) and not isinstance(texts, str | bytes) else [texts]
    files = [one for one in several if isinstance(one, Path)]
    if isinstance(texts, str) and Path(texts).suffix.lower() in (*_TABLES, ".txt"):
        files, several = [Path(texts)], []
    if files:
        read = read_passages(files, **about)
        said = [one for one in several if not isinstance(one, Path)]
        return _joined(read, as_passages(said, window=about["window"])) if said else read
    columns = [name for name in ("field", "target_field") if about[name] is not None]
    if columns:
        raise InputError(
            f"{columns[0]} names a column of a file (.jsonl, .csv, .parquet), and no file was given; leave it out"
        )
    return as_passages(texts, window=about["window"])


def _joined(files: Passages, said: Passages) -> Passages:
    return Passages(lambda: chain(files.open(), said.open()), window=files.window, files=files.files, notes=files.notes)


def _said(given: Any) -> Any:
    if isinstance(given, str | Path):
        return str(given)
    if isinstance(given, Sequence):
        paths = [str(one) for one in given if isinstance(one, Path)]
        others = len(given) - len(paths)
        return [*paths, f"{others} given in memory"] if others else paths
    return f"a {type(given).__name__} in memory"


@dataclass(frozen=True)
class Survey:
    """What a look through the data found.

    Attributes:
        facts: the counts.
        example: a small example of the inputs, for finding the model's heads.
        digest: names the data: the same for the same passages in any order and any batches.
    """

    facts: Facts
    example: dict[str, Tensor]
    digest: str


def look_through(data: Batches, progress: Bar | None) -> Survey:
    """Read all data once without the model.

    A passage that cannot be run is refused here, before hours of computing and not after them.
    """
    example: dict[str, Tensor] | None = None
    digest = 0
    for done, batch in enumerate(data, start=1):
        if example is None:
            example = _small(batch)
        digest = (digest + _digest(batch)) % 2**64
        if progress is not None:
            progress(done, None, "reading")
    if example is None:
        raise InputError("there is not one passage to measure; give text with at least one word in it")
    return Survey(data.facts, example, f"{digest:016x}")


def _digest(batch: Batch) -> int:
    """The sum over the examples of a hash of their inputs, padding left out."""
    total = 0
    for row in range(len(batch.passages)):
        found = sha256()
        for name, value in sorted(batch.inputs.items()):
            if name.endswith("attention_mask") or not value.ndim or value.shape[0] != len(batch.passages):
                continue
            kinds = batch.decoder_rows if name.startswith("decoder_") else batch.input_rows
            one = value[row].detach().cpu()
            if kinds is not None and one.shape == kinds[row].shape:
                one = one[kinds[row] != 0]
            found.update(name.encode() + b":")
            found.update(one.contiguous().view(torch.uint8).numpy().tobytes() if one.ndim else str(one.item()).encode())
        total += int.from_bytes(found.digest()[:8], "big")
    return total


def _small(batch: Batch) -> dict[str, Tensor]:
    """The first example of a batch, and of token inputs only the beginning."""
    row = _fullest(batch.input_rows)
    small = {name: value[row : row + 1] if value.ndim else value for name, value in batch.inputs.items()}
    if batch.input_rows is None or any(value.is_floating_point() for value in small.values()):
        return small
    lengths = {value.shape[1] for value in small.values() if value.ndim == 2}
    if len(lengths) != 1 or any(value.ndim != 2 for value in small.values()):
        return small if batch.decoder_rows is None else _cut_both(small)
    return {name: value[:, :_EXAMPLE_TOKENS] for name, value in small.items()}


def _cut_both(small: dict[str, Tensor]) -> dict[str, Tensor]:
    """Encoder and decoder inputs cut to different lengths, so that cross-attention shows."""
    return {
        name: value[:, : _EXAMPLE_TOKENS - 5 if name.startswith("decoder_") else _EXAMPLE_TOKENS]
        if value.ndim == 2
        else value
        for name, value in small.items()
    }


def _fullest(rows: Tensor | None) -> int:
    return 0 if rows is None else int((rows != 0).sum(-1).argmax())

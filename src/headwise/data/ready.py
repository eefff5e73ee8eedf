"""Ready inputs: token ids or tensors that go to the model as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headwise.data.batch import Batch
from headwise.data.files import check_file, inner_suffix, sha256_of
from headwise.data.memory import restartable
from headwise.data.tables import json_objects
from headwise.errors import DataError, InputError

__all__ = ["Example", "ReadyBatch", "ReadyInputs", "as_ready", "read_inputs"]

#: a name -> its list of numbers, of one example
_SEQUENCES: Final = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_NAMES: Final = (*_SEQUENCES, "labels", "decoder_input_ids", "decoder_attention_mask")
_DECODER: Final = ("decoder_input_ids", "decoder_attention_mask")


@dataclass(frozen=True)
class Example:
    """One example: named lists of whole numbers, each as long as it is."""

    values: dict[str, list[int]]
    where: str


@dataclass(frozen=True)
class ReadyBatch:
    """One batch of tensors, batch first, that somebody else has padded."""

    tensors: dict[str, Tensor]
    where: str


@dataclass(frozen=True)
class ReadyInputs:
    """Examples or batches that can be gone through again and again.

    Attributes:
        open: gives examples and batches from the start; its argument is the batch size, for sources that are cut.
        limit: stop after so many examples; None: all.
        files: for each file its path, format and SHA-256.
    """

    open: Callable[[int], Iterator[Example | ReadyBatch | Batch]]
    limit: int | None = None
    files: tuple[dict[str, str], ...] = ()


def read_inputs(path: str | Path, *, limit: int | None = None, format: str | None = None) -> ReadyInputs:
    """Open a file of ready inputs.

    * ``.jsonl``: an object a line, with ``input_ids`` (a list of whole numbers) and, where wanted, ``attention_mask``,
      ``labels``, ``token_type_ids`` (as long as ``input_ids``), ``decoder_input_ids``, ``decoder_attention_mask``.
      Lines may have different lengths.
    * ``.safetensors``: named tensors whose first axis counts examples, such as ``input_features`` or ``pixel_values``;
      read batch by batch.

    Raises:
        DataError: the file is missing, empty, damaged, of another format, or its tensors disagree about the number of
            examples.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InputError(f"limit must be a whole number of at least 1, and is {limit!r}")
    found = check_file(path)
    kind = format or {".jsonl": "jsonl", ".ndjson": "jsonl", ".safetensors": "safetensors"}.get(inner_suffix(found))
    if kind not in ("jsonl", "safetensors"):
        text = (
            "; text is given as texts (--text)" if inner_suffix(found) in (".txt", ".csv", ".tsv", ".parquet") else ""
        )
        raise DataError(
            f"{found}: ready inputs are read from .jsonl or .safetensors, and this is {found.suffix or 'neither'}{text}"
        )
    start = (lambda _: _jsonl(found)) if kind == "jsonl" else _safetensors(found)
    files = ({"path": str(found), "format": f"inputs {kind}", "sha256": sha256_of(found)},)
    return ReadyInputs(start, limit=limit, files=files)


def _jsonl(path: Path) -> Iterator[Example]:
    for number, row in json_objects(path):
        where = f"{path.name} line {number}"
        if "input_ids" not in row:
            text = "; text is given as texts (--text)" if "text" in row else ""
            raise DataError(
                f"{path}: line {number} has no input_ids; it has {', '.join(map(repr, row)) or 'no fields'}{text}"
            )
        yield _example(row, where)


def _example(row: Mapping[str, Any], where: str) -> Example:
    values: dict[str, list[int]] = {}
    for name, value in row.items():
        if name not in _NAMES:
            continue
        values[name] = _whole_numbers(value, name, where)
    _same_length(values, _SEQUENCES, "input_ids", where)
    _same_length(values, _DECODER, "decoder_input_ids", where)
    return Example(values, where)


def _same_length(values: Mapping[str, list[int]], names: Sequence[str], main: str, where: str) -> None:
    for name in names:
        if name in values and main in values and len(values[name]) != len(values[main]):
            raise DataError(
                f"{where}: {name} has {len(values[name])} entries and {main} {len(values[main])}; they must be as "
                "long as "
                f"each other"
            )


def _whole_numbers(value: Any, name: str, where: str) -> list[int]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: {name} is {_said(value)}, and a list of whole numbers is needed")
    for position, one in enumerate(value):
        if isinstance(one, list | tuple):
            raise DataError(
                f"{where}: {name} is a list of lists, and one flat list per example is needed; one example a line"
            )
        if not isinstance(one, int):
            raise DataError(f"{where}: {name} holds {_said(one)} at position {position}, and whole numbers are needed")
        if name.endswith("attention_mask") and one not in (0, 1):
            raise DataError(f"{where}: {name} holds {one} at position {position}; 1 marks a real token and 0 padding")
        if abs(one) >= 1 << 62:
            raise DataError(f"{where}: {name} holds {_said(one)} at position {position}, which no tensor can hold")
    return [int(one) for one in value]


def _said(value: Any) -> str:
    return f"the {type(value).__name__} {str(value)[:40]!r}"


def _safetensors(path: Path) -> Callable[[int], Iterator[ReadyBatch]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise DataError(
            f"{path}: is not a readable safetensors file ({error}); it is damaged, cut off, or something else"
        ) from None
    if not shapes:
        raise DataError(f"{path}: holds no tensors; give named tensors whose first axis counts examples")
    _one_count(shapes, str(path))
    count = next(iter(shapes.values()))[0]
    if count == 0:
        raise DataError(f"{path}: its tensors hold 0 examples")

    def start(batch_size: int) -> Iterator[ReadyBatch]:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in shapes}
            for first in range(0, count, batch_size):
                last = min(first + batch_size, count)
                yield ReadyBatch(
                    {name: part[first:last] for name, part in slices.items()},
                    f"{path.name} examples {first}..{last - 1}",
                )

    return start


def _one_count(shapes: Mapping[str, Sequence[int]], where: str) -> None:
    for name, shape in shapes.items():
        if len(shape) == 0:
            raise DataError(f"{where}: tensor {name!r} has no axes; the first axis must count examples")
    counts = {name: shape[0] for name, shape in shapes.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(
            f"{where}: the tensors disagree about the number of examples ({said}); the first axis must count them"
        )


def as_ready(source: Any, *, limit: int | None = None) -> ReadyInputs:
    """Ready inputs from anything that gives mappings of names to tensors, or :class:`Batch` objects.

    A mapping whose ``input_ids`` are two-dimensional is a batch, already padded; one with a flat list is one example.
    """
    if isinstance(source, ReadyInputs):
        return source
    if isinstance(source, Mapping):
        source = [source]
    items = restartable(source, "inputs")

    def start(_: int) -> Iterator[Example | ReadyBatch | Batch]:
        for index, item in enumerate(items()):
            yield _from_memory(item, f"inputs[{index}]")

    return ReadyInputs(start, limit=limit)


def _from_memory(item: Any, where: str) -> Example | ReadyBatch | Batch:
    if isinstance(item, Batch):
        return item
    if not isinstance(item, Mapping) and hasattr(item, "keys") and hasattr(item, "__getitem__"):
        item = {name: item[name] for name in item.keys()}  # noqa: SIM118 - transformers' BatchEncoding
    if not isinstance(item, Mapping):
        raise InputError(f"{where} is a {type(item).__name__}; give a mapping from input names to tensors, or a Batch")
    if not item:
        raise InputError(f"{where} is empty; give a mapping from input names to tensors")
    ids = item.get("input_ids")
    if ids is not None and _flat(ids):
        unknown = [name for name in item if name not in _NAMES]
        if unknown:
            raise InputError(
                f"{where} has one example of input_ids, with which {unknown[0]!r} cannot go; give a batch (2-D tensors)"
            )
        return _example(item, where)
    tensors = {str(name): _tensor(value, str(name), where) for name, value in item.items()}
    _one_count({name: value.shape for name, value in tensors.items()}, where)
    return ReadyBatch(tensors, where)


def _flat(ids: Any) -> bool:
    if isinstance(ids, Tensor):
        return ids.ndim == 1
    shape = getattr(ids, "shape", None)
    if shape is not None:
        return len(shape) == 1
    return isinstance(ids, list | tuple) and not (ids and isinstance(ids[0], list | tuple))


def _tensor(value: Any, name: str, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list | tuple) and value and all(isinstance(row, list | tuple) for row in value):
        lengths = sorted({len(row) for row in value})
        if len(lengths) > 1:
            raise InputError(
                f"{where}: {name} is ragged (rows of {lengths[0]} and of {lengths[-1]}); give one mapping per "
                "example, or pad "
                f"the rows and give an attention_mask"
            )
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        raise InputError(f"{where}: {name} holds text; text is given as strings (texts), not as ready inputs")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{where}: {name} is a {type(value).__name__} that is no tensor ({error})") from None

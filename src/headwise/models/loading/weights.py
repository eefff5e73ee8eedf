"""Checkpoint files on disk: are they there, whole, and what tensors do they name."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Final

from headwise.errors import ModelError

__all__ = ["check_pickles", "check_safetensors"]

_PICKLE: Final = b"\x80"


def check_safetensors(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of ``model.safetensors``, or of the shards that its index names.

    Raises:
        ModelError: a file is missing, cut off or damaged, or the index names tensors that its files do not hold.
    """
    from safetensors import SafetensorError, safe_open

    single = path / "model.safetensors"
    shards = {single: None} if single.exists() else _shards(path / "model.safetensors.index.json")
    shapes: dict[str, tuple[int, ...]] = {}
    for file, wanted in shards.items():
        refuse_pointer(file)
        try:
            with safe_open(file, framework="pt") as opened:
                found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file}: is not a readable safetensors file ({error}); it is damaged or cut off: fetch or save "
                "it again"
            ) from None
        lacking = sorted(set(wanted or ()) - set(found))
        if lacking:
            raise ModelError(
                f"{file}: lacks {lacking[0]}, which the index says is in it; fetch or save the checkpoint again"
            )
        shapes |= found
    if not shapes:
        raise ModelError(f"{path}: its safetensors hold no tensors; fetch or save the checkpoint again")
    return shapes


def _shards(index: Path) -> dict[Path, list[str] | None]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
        by_name = found["weight_map"]
        pairs = [(str(name), str(file)) for name, file in by_name.items()]
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{index}: is not valid JSON ({str(error).partition(';')[0]}); fetch or save the checkpoint again"
        ) from None
    except (KeyError, TypeError, AttributeError):
        raise ModelError(
            f"{index}: has no weight_map from tensors to files; fetch or save the checkpoint again"
        ) from None
    shards: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        if Path(file).name != file or file in ("", ".", ".."):
            raise ModelError(
                f"{index}: names the file {file!r}, which is not in its folder; fetch or save the checkpoint again"
            )
        names = shards.setdefault(index.parent / file, [])
        if names is not None:
            names.append(name)
    if not shards:
        raise ModelError(f"{index}: names no files; fetch or save the checkpoint again")
    missing = sorted(file.name for file in shards if not file.exists())
    if missing:
        raise ModelError(
            f"{index.parent}: {len(missing)} of the {len(shards)} files of its index are missing "
            f"({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}); fetch the whole checkpoint"
        )
    return shards


def check_pickles(path: Path) -> None:
    """See that the pickled files are there and are zip files or pickles; nothing of them is unpickled."""
    index = path / "pytorch_model.bin.index.json"
    files = list(_shards(index)) if not (path / "pytorch_model.bin").exists() else [path / "pytorch_model.bin"]
    for file in files:
        refuse_pointer(file)
        with file.open("rb") as stream:
            head = stream.read(2)
        if head == b"PK" and not zipfile.is_zipfile(file):
            raise ModelError(f"{file}: is cut off (a zip archive without its end); fetch or save it again")
        if head != b"PK" and head[:1] != _PICKLE:
            raise ModelError(f"{file}: is not a torch file; fetch or save it again")


def refuse_pointer(file: Path) -> None:
    """Refuse the small text file that Git LFS leaves where the large one was not fetched."""
    with file.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{file}: is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    if not head:
        raise ModelError(f"{file}: is empty (0 bytes); fetch or save it again")

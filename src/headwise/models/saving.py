"""Saving a model, cut or whole, as a folder of safetensors and JSON (docs/format.md)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from headwise import artifacts
from headwise.errors import InputError, RunError, UnsupportedError
from headwise.models.card import model_card
from headwise.models.cut_modules import HeadCut, cut_of
from headwise.models.loading.silence import silenced
from headwise.models.source import weight_hash
from headwise.models.stock import expressible

if TYPE_CHECKING:
    from headwise.models.handle import Model

__all__ = ["MODEL_FILE", "WEIGHTS", "check_target", "save_model"]

MODEL_FILE: Final = "headwise.json"
#: Not the name that transformers looks for: its ``from_pretrained`` cannot take half of a cut model for a whole one.
WEIGHTS: Final = "headwise"
#: What model, tokenizer and processor are saved as.
_SUFFIXES: Final = (".json", ".safetensors", ".txt", ".model", ".jinja", ".spm", ".bpe", ".vocab", ".tiktoken")
#: What few cuts have, and is left out of the others.
_SELDOM: Final = ("means", "narrow", "placeholder", "fit")
_FOLDERS: Final = ("additional_chat_templates",)


def save_model(model: Model, folder: str | Path, *, overwrite: bool, max_shard_size: int) -> Path:
    """Write the folder in one step; see :meth:`headwise.Model.save`."""
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise InputError(f"max_shard_size must be a whole number of bytes, and is {max_shard_size!r}")
    module: Any = model.module
    _check_class(module)
    path = Path(os.path.realpath(folder))
    _check_target(path, Path(folder), overwrite)
    why = expressible(module)
    stock = why is None
    document = _document(model, stock)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = artifacts.Target(path, Path(folder), MODEL_FILE, lambda: _check_target(path, Path(folder), overwrite))
        with target.new_folder() as new:
            if stock:
                with silenced():
                    module.save_pretrained(new, max_shard_size=max_shard_size)
            else:
                document["weights"]["files"] = _write_weights(new, module, max_shard_size)
                _write_config(new, module)
            _write_companions(new, model)
            (new / "README.md").write_text(model_card(model, why_not_stock=why), encoding="utf-8")
            artifacts.write_document(new / MODEL_FILE, document)
            target.put(new)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}; nothing was changed") from error
    except SafetensorError as error:  # of a full disk
        raise RunError(f"{folder} cannot be written: {error}; nothing was changed") from error
    return Path(folder)


def check_target(folder: str | Path, *, overwrite: bool = False) -> None:
    """Refuse now what :func:`save_model` would refuse after a long computation.

    Raises:
        RunError: something is in the way.
    """
    _check_target(Path(os.path.realpath(folder)), Path(folder), overwrite)


def _check_class(module: nn.Module) -> None:
    home = type(module).__module__
    if not home.startswith("transformers.models.") or not hasattr(module, "config"):
        raise UnsupportedError(
            f"{type(module).__name__} of {home} is not one of transformers' own model classes, so it could not be "
            "built again "
            "from a saved folder; save its state_dict() beside your own code"
        )


def _document(model: Model, stock: bool) -> dict[str, Any]:
    module = model.module
    cuts = [(path, cut_of(part)) for path, part in module.named_modules()]
    return {
        "format": artifacts.MODEL_FORMAT,
        "version": artifacts.MODEL_VERSION,
        "class": _named(module),
        "config": _named(module.config),
        "layout": "transformers" if stock else "headwise",
        "weights": {"files": [], "hash": weight_hash(module), "tied": _tied(module)},
        "cuts": [{"module": path, **_told(cut)} for path, cut in cuts if cut is not None],
        "surgery": None if model.surgery is None else model.surgery.to_document(),
        "source": {"name": model.source.name, "revision": model.source.revision},
    }


def _named(thing: Any) -> dict[str, str]:
    return {"module": type(thing).__module__, "name": type(thing).__name__}


def _told(cut: HeadCut) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(asdict(cut)))
    return {name: value for name, value in told.items() if value or name not in _SELDOM}


def _tied(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter that has an earlier name too, the first of them."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and first.setdefault(id(value), name) != name:
            tied[name] = first[id(value)]
    return tied


def _write_weights(folder: Path, module: nn.Module, most: int) -> list[str]:
    """Write the weights, in files of at most ``most`` bytes where one tensor is not larger; their names."""
    from safetensors.torch import save_file

    tied = _tied(module)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in module.state_dict().items():
        if name in tied:
            continue
        here = value.numel() * value.element_size()
        if parts[-1] and size + here > most:
            parts.append({})
            size = 0
        parts[-1][name] = (
            value.detach().cpu().contiguous().clone() if _shares(value) else value.detach().cpu().contiguous()
        )
        size += here
    files = [
        f"{WEIGHTS}.safetensors" if len(parts) == 1 else f"{WEIGHTS}-{at:05d}-of-{len(parts):05d}.safetensors"
        for at in range(1, len(parts) + 1)
    ]
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file, metadata={"format": "pt"})
    return files


def _shares(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() != value.numel() * value.element_size()


def _write_config(folder: Path, module: Any) -> None:
    import copy

    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    dtype = next((value.dtype for value in module.parameters() if value.is_floating_point()), torch.float32)
    config.dtype = dtype
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    config.to_json_file(folder / "config.json", use_diff=True)


def _write_companions(folder: Path, model: Model) -> None:
    generation = getattr(model.module, "generation_config", None)
    for thing in (generation, model.tokenizer, model.processor):
        save = getattr(thing, "save_pretrained", None)
        if callable(save):
            save(folder)


def _check_target(path: Path, said: Path, overwrite: bool) -> None:
    artifacts.recover(path, lambda there: (there / MODEL_FILE).is_file())
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise RunError(f"{said} is a file, not a folder; choose another name for the model")
    names = sorted(name for name in os.listdir(path) if not name.startswith(artifacts.NEW))
    if not names:
        return
    if MODEL_FILE not in names:
        raise RunError(f"{said} exists and was not saved by headwise (it holds {names[0]}); choose another folder")
    if not overwrite:
        raise RunError(
            f"{said} holds a saved model; choose another folder, or overwrite it (overwrite=True, --overwrite)"
        )
    guest = next((name for name in names if not _may_be_ours(path / name)), None)
    if guest is not None:
        raise RunError(f"{said} holds a saved model and {guest}, which headwise did not save; move it away first")
    for wrong, what in ((os.path.ismount(path), "a mount point"), (_is_current(path), "the current folder")):
        if wrong:
            raise RunError(f"{said} is {what}, which cannot be replaced in one step; choose a folder in it")


def _is_current(path: Path) -> bool:
    try:
        return path.samefile(os.curdir)
    except OSError:  # the current folder was deleted
        return False


def _may_be_ours(path: Path) -> bool:
    """Whether a name in a saved folder may be of the model, its tokenizer or its processor."""
    if path.is_dir():
        return path.name in _FOLDERS
    return path.name == "README.md" or path.suffix in _SUFFIXES

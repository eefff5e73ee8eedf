"""What lies in a model folder, and why it cannot be loaded where it cannot."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from headwise.errors import ModelError, UnsupportedError
from headwise.models.loading.weights import check_pickles, check_safetensors

__all__ = ["Folder", "check_config", "inspect"]

_ELSEWHERE: Final = {
    "*.onnx": "an ONNX export",
    "tf_model.h5": "TensorFlow weights",
    "flax_model.msgpack": "Flax weights",
    "*.mlmodel": "a Core ML export",
    "openvino_model.bin": "an OpenVINO export",
    "model.bin": "weights of another program (CTranslate2 uses this name)",
    "consolidated*.pth": "weights in their authors' own format; convert them with transformers' script for this family",
    "*.ckpt": "a training checkpoint",
    "*.pt": "a torch file of unknown content",
    "*.npz": "NumPy arrays",
    "adapter_model.*": "an adapter",
}
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")

#: the weights of quantised layers are packed, so that neither W_O per head nor surgery could be exact
_QUANTISED: Final = (
    "{where}: is quantised ({method}), and headwise reads unpacked weights; load the original model, or dequantise it "
    "(model.dequantize() in transformers) and save that"
)


@dataclass(frozen=True)
class Folder:
    """A model folder that looks whole.

    Attributes:
        path: the folder.
        config: config.json as a mapping; empty for a GGUF file.
        weights: kind of the weights that will be read.
        gguf: the name of the GGUF file, or None.
        shapes: shape of every tensor in the safetensors files.
        notes: what the user should know.
    """

    path: Path
    config: dict[str, Any]
    weights: Literal["safetensors", "pickle", "gguf"]
    gguf: str | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def inspect(path: Path, *, allow_pickle: bool) -> Folder:
    """Look at a folder, or a GGUF file, before anything is loaded.

    A folder that headwise itself has saved will be told here, before all else, by a file of its own.

    Raises:
        ModelError: something is missing or damaged.
        UnsupportedError: it is whole and of a kind that headwise does not load.
    """
    if path.is_file():
        return _one_file(path)
    if not path.is_dir():
        raise ModelError(f"{path}: is neither a folder nor a file; check the path")
    try:
        names = sorted(child.name for child in path.iterdir())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    odd = next(
        (child.name for child in path.iterdir() if child.exists() and not (child.is_file() or child.is_dir())), None
    )
    if odd is not None:
        raise ModelError(f"{path}: {odd} is a pipe or a device, not a file; give a folder of regular files")
    if not names:
        raise ModelError(f"{path}: the folder is empty; give a folder with config.json and weights")
    _refuse_adapter(path, names)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" not in names or not _has_weights(names):
        if len(ggufs) == 1:
            return Folder(path, {}, "gguf", gguf=ggufs[0])
        if len(ggufs) > 1:
            raise ModelError(f"{path}: holds {len(ggufs)} GGUF files; name one of them: {', '.join(ggufs[:8])}")
    if "config.json" not in names:
        raise ModelError(f"{path}: has no config.json{_below(path)}; it has {_listed(names)}")
    config = _read_config(path / "config.json")
    check_config(config, str(path))
    return _weights(path, config, names, allow_pickle)


def _one_file(path: Path) -> Folder:
    if path.suffix == ".gguf":
        return Folder(path.parent, {}, "gguf", gguf=path.name)
    if path.suffix in (".safetensors", ".bin", ".json", ".pt", ".pth"):
        raise ModelError(
            f"{path}: is a single file; give the folder that holds config.json and the weights ({path.parent})"
        )
    raise ModelError(f"{path}: is a file, and a model is a folder with config.json and weights, or a .gguf file")


def _has_weights(names: list[str]) -> bool:
    return any(name.endswith(".safetensors") for name in names) or any(name in names for name in _PICKLES)


def _below(path: Path) -> str:
    found = sorted(str(child.parent.relative_to(path)) for child in path.glob("*/config.json"))
    return f" (but its folder {found[0]} has one: give {path / found[0]})" if found else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _refuse_adapter(path: Path, names: list[str]) -> None:
    if "adapter_config.json" not in names:
        return
    base = None
    try:
        found = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    except (ValueError, RecursionError, OSError):
        base = None
    of = f" of {base}" if base else ""
    raise UnsupportedError(
        f"{path}: is a PEFT adapter{of}, not a whole model; merge it first: "
        f"PeftModel.from_pretrained(base, path).merge_and_unload().save_pretrained(folder), and load that folder"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ModelError(
            f"{path}: is not valid JSON ({str(error).partition(';')[0]}); restore the file that was saved"
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds a JSON {type(found).__name__}, and an object with model_type is needed")
    return found


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse what the config alone shows: quantised weights, and query heads that KV heads do not divide."""
    for part, inner in _parts(config):
        method = inner.get("quantization_config")
        if method:
            named = method.get("quant_method", "unnamed method") if isinstance(method, dict) else method
            raise UnsupportedError(_QUANTISED.format(where=where, method=named))
        heads = _first_int(inner, ("num_attention_heads", "n_head", "n_heads", "num_heads"))
        shared = _first_int(inner, ("num_key_value_heads", "num_kv_heads", "n_head_kv"))
        if heads and shared and heads % shared:
            raise ModelError(
                f"{where}: {part}num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}, "
                "so no query head "
                f"could be given its KV head; correct the config"
            )


def _parts(config: dict[str, Any], prefix: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(prefix, config)]
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("config") and name != "quantization_config":
            found += _parts(value, f"{prefix}{name}.")
    return found


def _first_int(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _weights(path: Path, config: dict[str, Any], names: list[str], allow_pickle: bool) -> Folder:
    if "model.safetensors" in names or "model.safetensors.index.json" in names:
        return Folder(path, config, "safetensors", shapes=check_safetensors(path))
    if any(name in names for name in _PICKLES):
        if not allow_pickle:
            raise UnsupportedError(
                f"{path}: its weights are a pickle ({next(name for name in _PICKLES if name in names)}), which "
                "can run code when it "
                "is read; if you trust it, allow it (allow_pickle=True, --allow-pickle: it is then read with "
                "weights_only=True), or "
                f"save it as safetensors"
            )
        check_pickles(path)
        return Folder(path, config, "pickle")
    loose = [name for name in names if name.endswith(".safetensors")]
    if loose:
        raise ModelError(
            f"{path}: has no model.safetensors, and {loose[0]} is not loaded by that name; rename it if it is the model"
        )
    for pattern, what in _ELSEWHERE.items():
        found = sorted(path.glob(pattern))
        if found:
            raise ModelError(
                f"{path}: has no weights that can be loaded; {found[0].name} is {what}; give a folder with "
                "model.safetensors"
            )
    raise ModelError(f"{path}: has no weights (model.safetensors); it has {_listed(names)}")

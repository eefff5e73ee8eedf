"""Loading a model from a folder, a GGUF file or the local hub cache."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import nn

from headwise.errors import InputError, ModelError, UnsupportedError
from headwise.models.cut_modules import install
from headwise.models.handle import Model, wrap
from headwise.models.loading.classes import model_class
from headwise.models.loading.companions import FAILURES, load_processor, load_tokenizer
from headwise.models.loading.folder import Folder, check_config, inspect
from headwise.models.loading.hub import Found, find
from headwise.models.loading.keys import Verdict, judge
from headwise.models.loading.modules import check_module
from headwise.models.loading.saved import check_cut, cuts_of, read_model_file, rebuilt, record_of, submodule
from headwise.models.loading.silence import silenced
from headwise.models.source import Source, weight_hash

__all__ = ["as_model", "load"]

_DTYPES: Final = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def load(
    path_or_id: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    local_files_only: bool = True,
    cache_dir: str | Path | None = None,
    strict: bool = True,
) -> Model:
    """Load a transformers model in eval mode, and print nothing; what the libraries said is in ``Model.notes``.

    The class is the one that config.json names. No weight that a measure could read is ever random: a checkpoint that
    lacks one is refused, and one that lacks only a task's head is used without the head (see ``Model.notes``).

    Args:
        path_or_id: a folder with config.json and weights, a .gguf file, or a hub id in the local cache.
        device: where the model goes.
        dtype: float32, float64, float16 or bfloat16; None keeps the checkpoint's.
        revision: branch, tag or commit of a hub id.
        allow_pickle: read a pickled checkpoint (.bin), with ``weights_only=True``.
        trust_remote_code: run the model code that lies beside the weights.
        local_files_only: False fetches a hub id over the network.
        cache_dir: the hub cache; default that of huggingface_hub.
        strict: False leaves out weights for which the model has no place, with a note, instead of refusing.

    Raises:
        InputError: an argument has a value that its rule does not allow.
        ModelError: nothing is there, or it is damaged, incomplete or contradicts its config.
        UnsupportedError: it is of a kind that is not loaded: adapters, quantised weights, unknown types, pickles and
            foreign code that were not allowed.
    """
    if not isinstance(path_or_id, str | Path):
        raise InputError(
            f"load takes a path or a hub id, and a {type(path_or_id).__name__} was given; a module goes to wrap"
        )
    wanted_dtype, wanted_device = _dtype(dtype), _device(device)
    found = find(
        path_or_id,
        revision=revision,
        local_files_only=local_files_only,
        cache_dir=cache_dir,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    saved = read_model_file(found.path)
    if saved is not None and saved["layout"] == "headwise":
        return _load_saved(path_or_id, found, saved, wanted_dtype, wanted_device)
    try:
        folder = inspect(found.path, allow_pickle=allow_pickle)
    except ModelError as error:
        if found.kind == "hub" and not isinstance(error, UnsupportedError):
            raise ModelError(f"{error} (if the cached copy is incomplete, run `hf download {path_or_id}`)") from None
        raise
    with silenced() as heard:
        module, verdict, notes = _build(folder, wanted_dtype, str(found.path), trust_remote_code, strict)
        tokenizer = load_tokenizer(folder.path, gguf=folder.gguf, trust_remote_code=trust_remote_code)
        processor = load_processor(folder.path, trust_remote_code=trust_remote_code)
    check_module(module)
    _refuse_not_finite(module, verdict, str(found.path))
    if saved is not None:
        for path, cut in cuts_of(saved):
            part = submodule(module, path, str(found.path))
            check_cut(part, path, cut)
            install(part, cut)
    module = _placed(module, wanted_device)
    extra = [reason for reason in (tokenizer.reason, processor.reason) if reason is not None]
    return Model(
        module,
        tokenizer.thing,
        processor.thing,
        _source(path_or_id, found, module, verdict),
        notes=tuple(dict.fromkeys([*folder.notes, *notes, *verdict.notes, *extra, *heard])),
        tokenizer_note=tokenizer.reason,
        surgery=None if saved is None else record_of(saved),
    )


def _load_saved(
    wanted: str | Path, found: Found, document: dict[str, Any], dtype: torch.dtype | None, device: torch.device
) -> Model:
    """A folder that headwise saved in its own layout."""
    with silenced() as heard:
        module = rebuilt(found.path, document)
        tokenizer = load_tokenizer(found.path, gguf=None, trust_remote_code=False)
        processor = load_processor(found.path, trust_remote_code=False)
    module = module if dtype is None else module.to(dtype)
    check_module(module)
    module = _placed(module, device)
    extra = [reason for reason in (tokenizer.reason, processor.reason) if reason is not None]
    return Model(
        module,
        tokenizer.thing,
        processor.thing,
        _source(wanted, found, module, Verdict()),
        notes=tuple(dict.fromkeys([*extra, *heard])),
        tokenizer_note=tokenizer.reason,
        surgery=record_of(document),
    )


def _source(wanted: str | Path, found: Found, module: nn.Module, verdict: Verdict) -> Source:
    random = verdict.random
    return Source(
        str(wanted), str(found.path), found.revision, found.kind, lambda: weight_hash(module, leave_out=random)
    )


def _build(
    folder: Folder, dtype: torch.dtype | None, where: str, trust_remote_code: bool, strict: bool
) -> tuple[nn.Module, Verdict, list[str]]:
    if folder.gguf is not None:
        _need_for_gguf(where)
    extra: dict[str, Any] = {"gguf_file": folder.gguf} if folder.gguf is not None else {}
    kind, config, notes = model_class(folder, where, trust_remote_code)
    if folder.gguf is not None:
        check_config({**config.to_dict(), "quantization_config": None}, where)
    if folder.weights == "pickle":
        extra |= {"use_safetensors": False, "weights_only": True}
    elif folder.weights == "safetensors":
        extra |= {"use_safetensors": True}
    if trust_remote_code:
        extra |= {"trust_remote_code": True}
    try:
        module, info = kind.from_pretrained(
            str(folder.path),
            config=config,
            dtype=dtype if dtype is not None else "auto",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **extra,
        )
    except FAILURES as error:
        raise _explained(error, where) from error
    _refuse_mismatched(info["mismatched_keys"], where)
    verdict = judge(module, info["missing_keys"], info["unexpected_keys"], where, folder.shapes, strict=strict)
    if verdict.body_only:
        module = module.base_model
    module.eval()
    return module, verdict, notes


def _explained(error: BaseException, where: str) -> ModelError:
    said = " ".join(str(error).split())
    said = said if len(said) <= 240 else said[:237] + "..."
    if isinstance(error, torch.OutOfMemoryError):
        return ModelError(f"{where}: does not fit into memory; use dtype='bfloat16', or a smaller model")
    if isinstance(error, UnpicklingError):
        return ModelError(f"{where}: the pickled weights hold more than tensors, and are not read ({said})")
    return ModelError(
        f"{where}: transformers could not build the model ({type(error).__name__}: {said}); check config and weights"
    )


def _refuse_mismatched(mismatched: Any, where: str) -> None:
    if not mismatched:
        return
    name, stored, built = min(mismatched, key=lambda one: str(one[0]))
    more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
    raise ModelError(
        f"{where}: config and weights disagree: {name} has shape {tuple(stored)} in the checkpoint, and the "
        "config asks for "
        f"{tuple(built)}{more}; correct the config, or give the weights that belong to it"
    )


def _refuse_not_finite(module: nn.Module, verdict: Verdict, where: str) -> None:
    for name, value in module.named_parameters():
        if name not in verdict.random and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ModelError(
                f"{where}: {name} holds values that are not finite (NaN or infinity); the checkpoint is damaged "
                "or its training "
                f"diverged, and nothing measured on it would be true"
            )


def _need_for_gguf(where: str) -> None:
    from importlib.util import find_spec

    lacking = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if lacking:
        raise UnsupportedError(
            f"{where}: reading GGUF needs the package {' and '.join(lacking)}; install it (pip install "
            f"{' '.join(lacking)}), or give a "
            f"folder with safetensors"
        )


def _dtype(wanted: str | torch.dtype | None) -> torch.dtype | None:
    if wanted is None or wanted == "auto":
        return None
    found = _DTYPES.get(wanted.removeprefix("torch.").lower()) if isinstance(wanted, str) else wanted
    if not isinstance(found, torch.dtype) or found not in _DTYPES.values():
        raise InputError(f"dtype must be float32, float64, float16 or bfloat16, and is {wanted!r}")
    return found


def _device(wanted: str | torch.device) -> torch.device:
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"device {wanted!r} is not understood ({first}); use cpu, cuda, cuda:1 or mps") from None
    if device.type == "meta":
        raise InputError("device 'meta' holds no values; use cpu, cuda or mps")
    missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if missing or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise InputError(f"device {str(device)!r} is not available here; use device='cpu'")
    return device


def _placed(module: nn.Module, device: torch.device) -> nn.Module:
    if device.type == "cpu":
        return module
    try:
        return module.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the model does not fit on {device} ({str(error).splitlines()[0]}); use dtype='bfloat16' or cpu"
        ) from None
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise InputError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None


def as_model(anything: str | Path | nn.Module | Model) -> Model:
    """A :class:`Model` from a path, a hub id, a module, or a :class:`Model` itself.

    Raises:
        InputError: it is none of these; and whatever :func:`load` and :func:`wrap` raise.
    """
    if isinstance(anything, Model):
        return anything
    return load(anything) if isinstance(anything, str | Path) else wrap(anything)

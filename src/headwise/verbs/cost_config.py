"""A model from its config alone: built on the meta device, so that no weight is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from headwise.errors import ModelError, UnsupportedError
from headwise.models.loading.classes import model_class
from headwise.models.loading.companions import FAILURES
from headwise.models.loading.folder import Folder
from headwise.models.loading.hub import find
from headwise.models.loading.saved import outline, read_model_file
from headwise.models.loading.silence import silenced
from headwise.models.loading.weights import check_safetensors

__all__ = ["skeleton", "skeleton_of_config"]

#: What decides the cost of a model, by transformers' own names; a family maps them to its own (``attribute_map``).
DECISIVE: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def skeleton(
    path_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, list[str]]:
    """Build the model that a folder (or a config.json, or a hub id in the local cache) describes.

    Returns:
        The module on the meta device, and what a reader should know.

    Raises:
        ModelError: nothing is there, or the config is damaged, lacks a field that decides the cost, or
            is not one that its type understands.
        UnsupportedError: the type is unknown to transformers, or needs code of its own.
    """
    path = Path(path_or_id).expanduser()
    if path.is_file() and path.suffix == ".json":
        folder = path.parent if path.name == "config.json" else None
        if folder is None:
            raise ModelError(f"{path}: a config file is called config.json; rename it, or give its folder")
    else:
        found = find(
            path_or_id,
            revision=revision,
            local_files_only=True,
            cache_dir=None,
            allow_pickle=False,
            trust_remote_code=trust_remote_code,
        )
        folder = found.path
    raw = _read(folder)
    where = str(path_or_id)
    saved = read_model_file(folder)
    if saved is not None and saved["layout"] == "headwise":
        with silenced():
            return outline(folder, saved), []
    with silenced():
        kind, config, notes = model_class(Folder(folder, raw, "safetensors"), where, trust_remote_code)
        notes = [note for note in notes if "was loaded as" not in note]
        notes += list(_missing(raw, config, where))
        module = _build(kind, config, where)
        if raw.get("tie_word_embeddings") is False and config.tie_word_embeddings:
            _untie(module)
    return module, notes + _stored_apart(folder, module)


def _stored_apart(folder: Path, module: nn.Module) -> list[str]:
    """Say where the checkpoint stores an output matrix that the config ties to the embedding table.

    It may be a copy, or weights of its own, which the config does not tell; only names and shapes are read.
    """
    try:
        stored = check_safetensors(folder) if any(folder.glob("model*.safetensors*")) else {}
    except ModelError as error:
        return [f"the weights were not looked at: {error}"]
    get = getattr(module, "get_output_embeddings", None)
    output = getattr(get() if callable(get) else None, "weight", None)
    if output is None:
        return []
    names = [name for name, weight in module.named_parameters(remove_duplicate=False) if weight is output]
    held = [name for name in names if name in stored]
    if len(held) < 2:
        return []
    return [
        f"the config ties {' and '.join(held)}, and the checkpoint stores both: if they differ, the model has "
        f"{output.numel():,} parameters more"
    ]


def _untie(module: nn.Module) -> None:
    """Give the output matrix weights of its own: transformers ties that of T5 whatever config.json says."""
    get = getattr(module, "get_output_embeddings", None)
    output = get() if callable(get) else None
    if output is not None:
        output.weight = nn.Parameter(torch.empty_like(output.weight), requires_grad=False)


def skeleton_of_config(config: Any) -> nn.Module:
    """Build the model of a transformers config that is in memory.

    Raises:
        ModelError: the model's class cannot be built from it.
    """
    with silenced():
        return _build(_class_of(config), config, type(config).__name__)


def _class_of(config: Any) -> Any:
    """The class that the config names, else the one whose parameters are published for its family.

    That is the model with its output matrix for those that write text, and the bare model for encoders.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is not None:
            return kind
    tables: tuple[Any, ...]
    if getattr(config, "is_encoder_decoder", False):
        tables = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    elif type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING:
        tables = ()
    else:
        tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    for table in (*tables, auto.MODEL_MAPPING):
        if type(config) in table:
            found = table[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise UnsupportedError(
        f"transformers has no model for {type(config).__name__} {config.architectures or ''}; name one in architectures"
    )


def _build(kind: Any, config: Any, where: str) -> nn.Module:
    try:
        with torch.device("meta"):
            module = kind._from_config(config, attn_implementation="eager")
    except FAILURES as error:
        said = " ".join(str(error).split())[:240]
        raise ModelError(
            f"{where}: {kind.__name__} cannot be built from the config ({type(error).__name__}: {said}); correct it"
        ) from error
    assert isinstance(module, nn.Module)
    return module.eval()


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"{folder}: is neither a folder with config.json nor a config.json; check the path")
    if not file.is_file():
        names = ", ".join(sorted(child.name for child in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{folder}: has no config.json; it has {names}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ModelError(
            f"{file}: is not valid JSON ({str(error).partition(';')[0]}); restore the file that was saved"
        ) from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file}: holds a JSON {type(raw).__name__}, and an object with model_type is needed")
    return raw


def _missing(raw: dict[str, Any], config: Any, where: str) -> Iterator[str]:
    """Refuse a config that leaves out what decides the cost; name the defaults inside a composite one.

    transformers fills every field that is missing with a default of the family, so a config without head
    counts would give the numbers of another model without a word.
    """
    lacking = [] if _parts(config) else list(_lacking(raw, config))
    if lacking:
        raise ModelError(
            f"{where}: config.json lacks {', '.join(lacking)}, which decide what the model costs; transformers would "
            f"fill in the defaults of {type(config).__name__}: add them"
        )
    for name in _parts(config):
        inner = raw.get(name)
        defaults = list(_lacking(inner if isinstance(inner, dict) else {}, getattr(config, name)))
        if defaults:
            yield f"{name} lacks {', '.join(defaults)}: defaults of transformers were taken"


def _parts(config: Any) -> list[str]:
    from transformers import PreTrainedConfig

    names = getattr(type(config), "sub_configs", None) or {}
    return [name for name in names if isinstance(getattr(config, name, None), PreTrainedConfig)]


def _lacking(raw: dict[str, Any], config: Any) -> Iterator[str]:
    names = getattr(config, "attribute_map", {})
    for name in DECISIVE:
        own = names.get(name, name)
        if own not in raw and name not in raw and isinstance(getattr(config, own, None), int):
            yield own

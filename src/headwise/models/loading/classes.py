"""Which class a checkpoint is built with: the one that its config names."""

from __future__ import annotations

from typing import Any

from headwise.errors import ModelError, UnsupportedError
from headwise.models.loading.companions import FAILURES
from headwise.models.loading.folder import Folder

__all__ = ["model_class"]


def model_class(folder: Folder, where: str, trust_remote_code: bool) -> tuple[Any, Any, list[str]]:
    """(class, config, notes).

    Raises:
        UnsupportedError: the type is unknown, or its code lies beside the weights and was not trusted.
        ModelError: the config is not one that its type understands.
    """
    own_code = folder.config.get("auto_map") if isinstance(folder.config.get("auto_map"), dict) else {}
    known = _check_type(folder, where, own_code or {}, trust_remote_code)
    config = _config(folder, where, trust_remote_code)
    if own_code and (trust_remote_code or not known):
        found = _remote_class(folder, own_code, where)
        if found is not None:
            return found, config, ["its model code was taken from the folder (trust_remote_code)"]
    notes = (
        ["the folder holds model code of its own, which was not used: transformers knows this type"] if own_code else []
    )
    kind, note = _library_class(config, where, gguf=folder.gguf is not None)
    return kind, config, [*notes, *([note] if note else [])]


def _check_type(folder: Folder, where: str, own_code: dict[str, Any], trusted: bool) -> bool:
    if folder.gguf is not None:
        return True
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = folder.config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return True
    if own_code and not trusted:
        raise UnsupportedError(
            f"{where}: model type {kind!r} comes with code of its own "
            f"({', '.join(sorted(map(str, own_code.values())))}), which is not "
            f"run unasked; if you have read it and trust it, pass trust_remote_code=True (--trust-remote-code)"
        )
    if own_code:
        return False
    if kind is None:
        raise ModelError(f"{where}: config.json has no model_type, so the model's class cannot be told; add it")
    import transformers

    raise UnsupportedError(
        f"{where}: model type {kind!r} is not known to transformers {transformers.__version__}; update it, or "
        "correct config.json"
    )


def _config(folder: Folder, where: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    extra = {"gguf_file": folder.gguf} if folder.gguf is not None else {}
    try:
        return AutoConfig.from_pretrained(
            str(folder.path), local_files_only=True, trust_remote_code=trust_remote_code, **extra
        )
    except FAILURES as error:
        said = " ".join(str(error).split())[:240]
        raise ModelError(f"{where}: the config cannot be used ({type(error).__name__}: {said}); correct it") from error


def _remote_class(folder: Folder, own_code: dict[str, Any], where: str) -> Any | None:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    named = [str(name) for name in folder.config.get("architectures") or []]
    models = {key: str(value) for key, value in own_code.items() if key.startswith("AutoModel") and value}
    chosen = next((value for value in models.values() if value.rsplit(".", 1)[-1] in named), None)
    chosen = chosen or models.get("AutoModel") or next(iter(models.values()), None)
    if chosen is None:
        return None
    try:
        return get_class_from_dynamic_module(chosen, str(folder.path), local_files_only=True)
    except (*FAILURES, SyntaxError) as error:
        said = " ".join(str(error).split())[:240]
        raise ModelError(
            f"{where}: its own model code {chosen} cannot be used ({type(error).__name__}: {said})"
        ) from error


def _library_class(config: Any, where: str, *, gguf: bool) -> tuple[Any, str | None]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    named = [str(name) for name in getattr(config, "architectures", None) or []]
    for name in named:
        kind = _named_class(name, config)
        if kind is not None:
            return kind, None
    if gguf and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None
    if type(config) not in MODEL_MAPPING:
        raise UnsupportedError(
            f"{where}: transformers has no class {', '.join(named) or 'at all'} for the type "
            f"{config.model_type!r}; correct "
            f"architectures in config.json"
        )
    kind = _several(MODEL_MAPPING[type(config)])[0]
    why = f"transformers has no {named[0]} for this type" if named else "config.json names no architectures"
    return kind, f"{why}, so the model was loaded as {kind.__name__}"


def _named_class(name: str, config: Any) -> Any | None:
    """The class of this name, if it is made for this config or an auto class pairs the two."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return None
    wanted = getattr(kind, "config_class", None)
    if isinstance(wanted, type) and isinstance(config, wanted):
        return kind
    for label in dir(modeling_auto):
        pairs = getattr(modeling_auto, label) if label.endswith("_MAPPING") else None
        if pairs is not None and type(config) in pairs and kind in _several(pairs[type(config)]):
            return kind
    return None


def _several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)

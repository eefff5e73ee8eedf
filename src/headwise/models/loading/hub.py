"""A model by its hub id: found in the local cache, fetched only when asked to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from headwise.errors import InputError, ModelError

__all__ = ["Found", "find"]

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.vocab")
_OTHER_FRAMEWORKS: Final = ("*.onnx", "*.h5", "*.msgpack", "*.ot", "*.mlmodel", "openvino/*", "onnx/*", "coreml/*")


@dataclass(frozen=True)
class Found:
    """A folder or file on this machine that holds a model."""

    path: Path
    kind: Literal["folder", "hub"]
    revision: str | None = None


def find(
    wanted: str | Path,
    *,
    revision: str | None,
    local_files_only: bool,
    cache_dir: str | Path | None,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> Found:
    """What ``wanted`` names: an existing path first, else a hub id.

    Raises:
        ModelError: neither is there, or fetching failed.
        InputError: ``revision`` was given for a folder, or ``wanted`` is empty.
    """
    text = str(wanted)
    if not text.strip():
        raise InputError("path_or_id is empty; give a model folder or a hub id")
    path = Path(wanted).expanduser()
    if path.exists():
        if revision is not None:
            raise InputError(f"revision={revision!r} chooses a version of a hub id, and {text} is a path; leave it out")
        return Found(path, "folder")
    if isinstance(wanted, Path) or not _HUB_ID.fullmatch(text):
        raise ModelError(f"{text}: there is no such folder; check the path (it is not of the form of a hub id either)")
    if local_files_only:
        return _cached(text, revision, cache_dir)
    return _fetched(text, revision, cache_dir, allow_pickle, trust_remote_code)


def _cached(name: str, revision: str | None, cache_dir: str | Path | None) -> Found:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(
            f"{name}: there is no such folder, and it is not a valid hub id ({error}); check the path"
        ) from None
    except LocalEntryNotFoundError as error:
        part = getattr(error, "snapshot_path", None)  # some files are there; which are missing shows when they are read
        if part is not None:
            return Found(Path(part), "hub", Path(part).name)
        version = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{name}: looked for it as a folder ({Path(name).absolute()}) and as a hub id{version} in the local cache "
            f"({cache_dir or HF_HUB_CACHE}), and it is in neither; check the path, or fetch it first with `hf "
            f"download {name}` "
            f"(or local_files_only=False)"
        ) from None
    return Found(folder, "hub", folder.name)


def _fetched(
    name: str, revision: str | None, cache_dir: str | Path | None, allow_pickle: bool, trust_remote_code: bool
) -> Found:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    failures: tuple[type[BaseException], ...] = (
        *_http_errors(HfHubHTTPError),
        HFValidationError,
        LocalEntryNotFoundError,
        OSError,
    )
    small = [*_SMALL_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=[*small, "*.safetensors"],
                ignore_patterns=list(_OTHER_FRAMEWORKS),
            )
        )
        if allow_pickle and not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=folder.name, cache_dir=cache_dir, allow_patterns=["pytorch_model*.bin"])
    except failures as error:
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{name}: looked for it as a folder, and fetching it from the hub failed ({type(error).__name__}: "
            f"{said}); check the "
            f"id, the revision, the network and your access"
        ) from None
    return Found(folder, "hub", folder.name)


def _http_errors(refused: type[Exception]) -> tuple[type[Exception], ...]:
    """The hub's own error and that of the HTTP library beneath it, whichever this is."""
    return tuple(kind for kind in refused.__mro__ if issubclass(kind, Exception) and kind is not Exception)

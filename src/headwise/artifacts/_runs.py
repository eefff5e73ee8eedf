"""Run folders: written beside and renamed, so that a finished run is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from headwise.artifacts._documents import HEADS_FORMAT, RUN_FORMAT, encode_document, read_document
from headwise.artifacts._folders import NEW, Target, recover, set_aside
from headwise.errors import RunError

RUN_FILE: Final = "run.json"
HEADS_FILE: Final = "heads.json"
REPORT_FILE: Final = "report.html"
_OURS: Final = frozenset({RUN_FILE, HEADS_FILE, REPORT_FILE})


class Savable(Protocol):
    """Anything that knows its own document, such as :class:`headwise.heads.HeadTable`."""

    def to_document(self) -> Mapping[str, Any]:
        """The document."""
        ...


@dataclass(frozen=True)
class Run:
    """The documents of a finished run.

    Attributes:
        folder: where it is.
        run: the facts, as in ``run.json``.
        heads: the table as a document; ``HeadTable.from_document(run.heads)`` makes the table.
    """

    folder: Path
    run: dict[str, Any]
    heads: dict[str, Any]


def read_run(folder: str | Path) -> Run:
    """Read a run folder.

    Raises:
        RunError: it is missing, not a run, unfinished or damaged; or the two files are of different runs.
    """
    path = Path(folder)
    if not path.exists():
        old = set_aside(Path(os.path.realpath(path)))
        hint = f"; a run that was being replaced is at {old}: rename it to {path.name}" if old.is_dir() else ""
        raise RunError(f"there is no run folder {path}{hint or '; check the path'}")
    if not path.is_dir():
        raise RunError(f"{path} is a file; give the run folder that holds {RUN_FILE}")
    if not (path / RUN_FILE).exists():
        raise RunError(f"{path} is not a headwise run: it has no {RUN_FILE}")
    run = read_document(path / RUN_FILE, RUN_FORMAT)
    heads = read_document(path / HEADS_FILE, HEADS_FORMAT)
    ours, theirs = run["model"]["weight_hash"], heads["model"]["weight_hash"]
    if ours != theirs:
        raise RunError(
            f"{path}: {RUN_FILE} is of weights {ours} and {HEADS_FILE} of weights {theirs}; they are not of one run"
        )
    return Run(path, run, heads)


def check_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Refuse now what :func:`write_run` would refuse later; call it before a long measurement.

    Returns:
        The folder with symbolic links resolved.

    Raises:
        RunError: something is in the way, or the place cannot be written to.
    """
    path = Path(os.path.realpath(folder))
    recover(path, lambda there: _is_run(there / RUN_FILE))
    if os.path.lexists(path):
        _check_existing(path, Path(folder), overwrite)
    place = _target(path, Path(folder), overwrite).place
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe = tempfile.mkdtemp(prefix=NEW, dir=place)
        os.rmdir(probe)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {place}: {error.strerror}; choose another folder") from error
    return path


def _target(path: Path, said: Path, overwrite: bool) -> Target:
    return Target(path, said, RUN_FILE, lambda: _check_existing(path, said, overwrite))


def _check_existing(path: Path, said: Path, overwrite: bool) -> None:
    if not path.is_dir():
        raise RunError(f"{said} is a file, not a folder; choose another name for the run")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise RunError(f"{said} cannot be read: {error.strerror}") from error
    foreign = [name for name in names if name not in _OURS and not name.startswith(NEW)]
    if RUN_FILE not in names:
        if foreign:
            raise RunError(f"{said} exists and is not a headwise run (it holds {foreign[0]}); choose another folder")
        return  # empty, or left by a run that was killed before it was complete
    if not _is_run(path / RUN_FILE):
        raise RunError(f"{said} exists and is not a headwise run (it holds {RUN_FILE}); choose another folder")
    if not overwrite:
        raise RunError(
            f"{said} holds a finished run; choose another folder, or overwrite it (overwrite=True, --overwrite)"
        )
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise RunError(
            f"{said} also holds {foreign[0]}{more}, not written by headwise; move it away before overwriting"
        )
    if os.path.ismount(path):
        raise RunError(f"{said} is a mount point, which cannot be replaced in one step; choose a folder inside it")


def _is_run(file: Path) -> bool:
    """Whether a file says that it is a run, of whatever version and in whatever state."""
    if not file.is_file():  # opening a pipe would wait for a writer
        return False
    try:
        with open(file, "rb") as stream:
            return f'"{RUN_FORMAT}"'.encode() in stream.read(2**24)
    except OSError:
        return False


def write_run(
    folder: str | Path,
    run: Mapping[str, Any],
    table: Savable,
    *,
    report: Callable[[Path], object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a run folder in one step: run.json, heads.json and, by ``report``, report.html.

    Everything is written into a new folder beside the target, which is renamed at the end; into an empty
    folder that is there (a mounted volume, say) the files are moved at the end. Until then, and after any
    failure or interruption, what was at the target is untouched.

    Args:
        folder: the target; its parents are made. An empty folder may be there, or a finished run if
            ``overwrite`` is given; anything else is refused.
        run: the facts, as :func:`run_document` gives them.
        table: the table of heads.
        report: called with the folder once both documents are in it; writes further files there.
        overwrite: whether a finished run at the target may be replaced.

    Raises:
        RunError: the target may not be written, or writing failed (no space left, read-only).
    """
    path = check_folder(folder, overwrite=overwrite)
    documents = {RUN_FILE: encode_document(run), HEADS_FILE: encode_document(table.to_document())}
    try:
        target = _target(path, Path(folder), overwrite)
        with target.new_folder() as new:
            for name, raw in documents.items():
                _write_file(new / name, raw)
            if report is not None:
                report(new)
            target.put(new)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}; nothing was changed") from error
    return Path(folder)


def _write_file(file: Path, raw: bytes) -> None:
    """Write a new file and have it on the disk before returning."""
    with open(file, "wb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())

"""Run folders: written beside and renamed, so that a finished run is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from headwise import saved
from headwise.artifacts._documents import HEADS_FORMAT, RUN_FORMAT, encode_document, read_document
from headwise.errors import RunError

RUN_FILE: Final = "run.json"
HEADS_FILE: Final = "heads.json"
REPORT_FILE: Final = "report.html"
_OURS: Final = frozenset({RUN_FILE, HEADS_FILE, REPORT_FILE})
_NEW: Final = ".headwise-new-"
"""What the name of a folder begins with while a run is written into it."""


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
        old = _set_aside(Path(os.path.realpath(path)))
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
    _recover(path)
    if os.path.lexists(path):
        _check_existing(path, Path(folder), overwrite)
    place = _place(path)
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe = tempfile.mkdtemp(prefix=_NEW, dir=place)
        os.rmdir(probe)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {place}: {error.strerror}; choose another folder") from error
    return path


def _place(path: Path) -> Path:
    """Where the new run is written: in a folder that is there and empty, or beside the target."""
    return path if path.is_dir() and not _finished(path) else path.parent


def _finished(path: Path) -> bool:
    return (path / RUN_FILE).exists()


def _check_existing(path: Path, said: Path, overwrite: bool) -> None:
    if not path.is_dir():
        raise RunError(f"{said} is a file, not a folder; choose another name for the run")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise RunError(f"{said} cannot be read: {error.strerror}") from error
    foreign = [name for name in names if name not in _OURS and not name.startswith(_NEW)]
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
        with _new_folder(path) as new:
            for name, raw in documents.items():
                _write_file(new / name, raw)
            if report is not None:
                report(new)
            _put_in_place(new, path, Path(folder), overwrite)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}; nothing was changed") from error
    return Path(folder)


def _write_file(file: Path, raw: bytes) -> None:
    """Write a new file and have it on the disk before returning."""
    with open(file, "wb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A new folder for the run, gone afterwards unless it was renamed."""
    new = Path(tempfile.mkdtemp(prefix=f"{_NEW}{path.name[:100]}-", dir=_place(path)))
    try:
        umask = os.umask(0)
        os.umask(umask)
        new.chmod(stat.S_IMODE(path.stat().st_mode) if path.is_dir() else 0o777 & ~umask)
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    return path.parent / f".{path.name[:100]}.headwise-old"


def _recover(path: Path) -> None:
    """Bring back a run that a process was replacing when it was killed between two renames."""
    old = _set_aside(path)
    if old.is_dir():
        if not path.exists():
            with contextlib.suppress(OSError):
                os.rename(old, path)
        elif _is_run(path / RUN_FILE):
            shutil.rmtree(old, ignore_errors=True)


def _put_in_place(new: Path, path: Path, said: Path, overwrite: bool) -> None:
    if os.path.lexists(path):
        _check_existing(path, said, overwrite)  # again: another run may have finished meanwhile
    if new.parent == path:
        _fill(new, path)
        saved.note(said)
    elif not path.exists():
        os.rename(new, path)
        saved.note(said)
    else:
        _exchange(new, path, said)


def _fill(new: Path, path: Path) -> None:
    """Move the files into a folder that was there and empty: ``run.json`` last, which makes it a run."""
    for name in sorted(os.listdir(path)):
        if path / name != new:  # left by a run that was killed
            shutil.rmtree(path / name) if name.startswith(_NEW) else os.unlink(path / name)
    moved = sorted(os.listdir(new), key=lambda name: name == RUN_FILE)
    try:
        for name in moved:
            os.rename(new / name, path / name)
    except BaseException:  # KeyboardInterrupt included: the folder is empty again, whatever happened
        for name in moved:
            (path / name).unlink(missing_ok=True)
        raise


def _exchange(new: Path, path: Path, said: Path) -> None:
    """Put the new folder in the place of the old one, which goes."""
    old = _set_aside(path)
    try:
        os.rename(path, old)
        os.rename(new, path)
    except BaseException:  # KeyboardInterrupt included: the finished run goes back, whatever happened
        if not path.exists():
            os.rename(old, path)
        raise
    saved.note(said)
    shutil.rmtree(old, ignore_errors=True)

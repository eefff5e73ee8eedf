"""Every page of docs/ with examples runs as it stands; so do the examples of docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import warnings
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if ">>>" in path.read_text(encoding="utf-8"))
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(headwise.__path__, "headwise.")
    if not found.name.endswith("__main__") and found.name.rsplit(".", 1)[-1] != "_core"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path) -> None:
    failed, run = doctest.testfile(str(page), module_relative=False, optionflags=OPTIONS)
    assert run > 0
    assert failed == 0


def with_examples() -> list[str]:
    package = ROOT / "src"
    paths = {name: package / Path(*name.split(".")) for name in MODULES}
    files = {
        name: path.with_suffix(".py") if not path.is_dir() else path / "__init__.py" for name, path in paths.items()
    }
    return [name for name, path in files.items() if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", with_examples())
def test_docstrings(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module(name)
        failed, run = doctest.testmod(module, optionflags=OPTIONS)
    assert run > 0
    assert failed == 0


def test_there_are_examples() -> None:
    assert len(PAGES) >= 1
    assert len(with_examples()) >= 10

"""The facade loads its names when they are used, and its parts agree with each other."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import headwise

HEAVY = ("torch", "transformers", "pandas", "numpy", "rich")


def loaded_after(statement: str) -> list[str]:
    """Which of the heavy modules a fresh interpreter has imported after ``statement``."""
    code = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_import_is_light() -> None:
    assert loaded_after("import headwise; dir(headwise); headwise.__version__") == []


def test_the_lightness_test_can_fail() -> None:
    assert loaded_after("import numpy") == ["numpy"]


def test_layout_and_errors_need_no_torch() -> None:
    assert loaded_after("import headwise; headwise.HeadLayout; headwise.HeadwiseError") == []


@pytest.mark.parametrize("name", sorted(headwise._HOMES))
def test_every_name_is_there(name: str) -> None:
    module = importlib.import_module(headwise._HOMES[name])
    assert getattr(headwise, name) is getattr(module, name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(headwise.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.asname: node.module
        for guard in tree.body
        if isinstance(guard, ast.If)
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    assert sorted(seen) == list(headwise._HOMES)
    for name, home in headwise._HOMES.items():
        # A verb and its module share a name; type checkers need the module.
        assert seen[name] in (home, f"{home}.{name}")


def test_dir_lists_all() -> None:
    assert set(headwise.__all__) <= set(dir(headwise))
    assert sorted(headwise._HOMES) == list(headwise._HOMES)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'prun'"):
        headwise.prun  # noqa: B018


def test_version_is_that_of_the_package() -> None:
    assert headwise.__version__.count(".") >= 2

"""The house rules hold, and each guard can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("house_guards", Path(__file__).with_name("guards.py"))
assert _spec is not None
assert _spec.loader is not None
guards = importlib.util.module_from_spec(_spec)
sys.modules["house_guards"] = guards
_spec.loader.exec_module(guards)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    found = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in guards.sources(ROOT)}
    assert len(found) > 20
    return found


GUARDS = {
    "long_files": ({"a.py": "x = 1\n" * 401}, ["a.py: 401 lines"]),
    "long_functions": ({"a.py": "def f():\n" + "    x = 1\n" * 61}, ["a.py:1 f: 62 lines"]),
    "broad_excepts": ({"a.py": "try:\n    pass\nexcept Exception:\n    pass\n"}, ["a.py:3"]),
    "pickles": (
        {"a.py": "import pickle\nimport torch\ntorch.load('x')\n"},
        ["a.py:1 imports pickle", "a.py:3 torch.load"],
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_rule_holds(name: str, files: dict[str, str]) -> None:
    assert getattr(guards, name)(files) == []


@pytest.mark.parametrize("name", GUARDS)
def test_guard_can_fail(name: str) -> None:
    offender, expected = GUARDS[name]
    assert getattr(guards, name)(offender) == expected


def test_no_vague_module_names(files: dict[str, str]) -> None:
    assert guards.vague_modules(list(files)) == []
    assert guards.vague_modules(["headwise/utils.py", "headwise/common/a.py"]) == [
        "headwise/utils.py",
        "headwise/common/a.py",
    ]


def test_readme_prints_the_tree() -> None:
    package = ROOT / "src" / "headwise"
    folders = [path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").is_file()]
    assert guards.missing_from_tree((ROOT / "README.md").read_text(encoding="utf-8"), folders) == []
    assert guards.missing_from_tree("├── kernels/  attention on tensors\n", ["kernels", "nn"]) == ["nn"]


@pytest.mark.parametrize("pattern", ["*.rej", "*.orig"])
def test_no_leftovers(pattern: str) -> None:
    assert list((ROOT / "src").rglob(pattern)) == []

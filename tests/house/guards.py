"""Guards over the source tree. Each takes text or paths and returns what breaks its rule."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
LONGEST_FILE = 400
LONGEST_FUNCTION = 60


def sources(root: Path) -> list[Path]:
    return sorted((root / "src" / "headwise").rglob("*.py"))


def long_files(files: dict[str, str]) -> list[str]:
    return [f"{name}: {text.count(chr(10))} lines" for name, text in files.items() if text.count("\n") > LONGEST_FILE]


def long_functions(files: dict[str, str]) -> list[str]:
    found = []
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
                if size > LONGEST_FUNCTION:
                    found.append(f"{name}:{node.lineno} {node.name}: {size} lines")
    return found


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return (first.end_lineno or first.lineno) - first.lineno + 1
    return 0


def vague_modules(names: list[str]) -> list[str]:
    return [name for name in names if FORBIDDEN_NAMES & set(Path(name).with_suffix("").parts)]


def broad_excepts(files: dict[str, str]) -> list[str]:
    found = []
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                found.append(f"{name}:{node.lineno}")
    return found


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(one, ast.Name) and one.id == "Exception" for one in kinds)


def pickles(files: dict[str, str]) -> list[str]:
    """Places that could unpickle: ``import pickle``, ``torch.load`` without ``weights_only=True``."""
    found = []
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import) and any(part.name == "pickle" for part in node.names):
                found.append(f"{name}:{node.lineno} imports pickle")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = any(key.arg == "weights_only" and ast.unparse(key.value) == "True" for key in node.keywords)
                if not safe:
                    found.append(f"{name}:{node.lineno} torch.load")
    return found


def missing_from_tree(readme: str, folders: list[str]) -> list[str]:
    """Folders of the package that the README's tree does not name with a line of its own."""
    return [folder for folder in folders if not re.search(rf"^\W*{re.escape(folder)}/ +\S", readme, re.MULTILINE)]

"""``make bench``: every benchmark checks its answers, then times both sides in turn.

    python -m benchmarks [--all] [--json FILE] [NAME ...]

A benchmark is a module here with ``cases(full: bool) -> list[Pairs]``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import Pairs

HERE = Path(__file__).parent


def names() -> list[str]:
    """Modules that have cases."""
    return sorted(path.stem for path in HERE.glob("[a-z]*.py") if "\ndef cases(" in path.read_text(encoding="utf-8"))


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{model}, {os.cpu_count()} CPUs ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


def main() -> None:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the long cases too")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("name", nargs="*", choices=[*names(), []])
    asked = parser.parse_args()
    console = Console(width=120)
    console.print(f"{datetime.date.today()}  {machine()}", highlight=False)
    found: list[Pairs] = []
    for name in asked.name or names():
        pairs = importlib.import_module(f"benchmarks.{name}").cases(asked.all)
        if not pairs:
            continue
        table = Table("case", "ours, ms", "other, ms", "ours / other, median (range)", title=name, title_justify="left")
        for one in pairs:
            table.add_row(*one.row())
        console.print(table)
        found.extend(pairs)
    if asked.json:
        document = {"machine": machine(), "date": str(datetime.date.today()), "cases": [vars(one) for one in found]}
        asked.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

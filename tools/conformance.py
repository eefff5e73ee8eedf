"""Measures and prunes every model type of the installed transformers and writes docs/models.md from what came out.

    python tools/conformance.py [--processes N] [--only measure|prune] [--check] [--page FILE] [--keep FILE]
        [--keep-pruned FILE] [TYPE ...]

Prints a line per type and the counts; with names of types or --only, only those, and no page. ``--check`` writes
nothing and fails if the page is not what came out. ``--keep`` (and ``--keep-pruned``) appends every verdict to a file
as it comes, and does not judge again what is in it: a run that was stopped goes on where it was (take a new file when
the code or a library has changed).
Exits with 1 when a type was measured or pruned wrongly.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))

from judging import Verdict, judge, types  # noqa: E402
from page import page_of  # noqa: E402
from pruning import Pruned, judge_pruning  # noqa: E402

PAGE = ROOT / "docs" / "models.md"


def run(names: list[str], processes: int, keep: Path | None = None) -> list[Verdict]:
    """Measure every type; see :func:`judged`."""
    return judged(judge, Verdict, names, processes, keep)


def run_pruning(names: list[str], processes: int, keep: Path | None = None) -> list[Pruned]:
    """Prune every type; see :func:`judged`."""
    return judged(judge_pruning, Pruned, names, processes, keep)


def judged(
    judge: Callable[[str], Any], kind: type[Any], names: list[str], processes: int, keep: Path | None
) -> list[Any]:
    """Judge every type, in ``processes`` processes, each replaced now and then so that none grows.

    With ``keep``, a file of one verdict a line: those in it are taken from it, the others are appended to it.
    """
    found = [verdict for verdict in kept(keep, kind) if verdict.model_type in names]
    known = {verdict.model_type for verdict in found}
    rest = [name for name in names if name not in known]
    with multiprocessing.get_context("spawn").Pool(processes, _start, maxtasksperchild=60) as pool:
        for verdict in pool.imap_unordered(judge, rest, chunksize=1):
            said = verdict.reason or getattr(verdict, "sites", "")
            print(f"{verdict.model_type:34} {verdict.verdict:12} {said}"[:200], flush=True)
            found.append(verdict)
            if keep is not None:
                with keep.open("a") as lines:
                    lines.write(json.dumps(asdict(verdict)) + "\n")
    return sorted(found, key=lambda verdict: verdict.model_type)


def kept(keep: Path | None, kind: type[Any] = Verdict) -> list[Any]:
    """The verdicts in a file that :func:`judged` keeps; none where there is no such file."""
    if keep is None or not keep.exists():
        return []
    return [kind(**json.loads(line)) for line in keep.read_text().splitlines()]


def _start() -> None:
    import torch

    torch.set_num_threads(1)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--keep-pruned", type=Path)
    parser.add_argument("--only", choices=("measure", "prune"))
    arguments = parser.parse_args()
    names = arguments.types or types()
    verdicts, pruned = [], []
    if arguments.only != "prune":
        verdicts = run(names, arguments.processes, arguments.keep)
        print("measured", dict(Counter(verdict.verdict for verdict in verdicts)))
    if arguments.only != "measure":
        pruned = run_pruning(names, arguments.processes, arguments.keep_pruned)
        print("pruned", dict(Counter(verdict.verdict for verdict in pruned)))
    status = int(any(verdict.verdict in ("WRONG", "FAILED") for verdict in (*verdicts, *pruned)))
    if not arguments.types and arguments.only is None:
        page = page_of(verdicts, pruned)
        if not arguments.check:
            arguments.page.write_text(page)
        elif arguments.page.read_text() != page:
            print(f"{arguments.page} is not what came out; run: python tools/conformance.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Measures every model type of the installed transformers and writes docs/models.md from what came out.

    python tools/conformance.py [--processes N] [--check] [--page FILE] [--keep FILE] [TYPE ...]

Prints a line per type and the counts; with names of types, only those, and no page. ``--check`` writes nothing and
fails if the page is not what came out. ``--keep`` appends every verdict to a file as it comes, and does not judge again
what is in it: a run that was stopped goes on where it was (take a new file when the code or a library has changed).
Exits with 1 when a type was measured wrongly.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))

from judging import Verdict, judge, types  # noqa: E402
from page import page_of  # noqa: E402

PAGE = ROOT / "docs" / "models.md"


def run(names: list[str], processes: int, keep: Path | None = None) -> list[Verdict]:
    """Judge every type, in ``processes`` processes, each replaced now and then so that none grows.

    With ``keep``, a file of one verdict a line: those in it are taken from it, the others are appended to it.
    """
    found = [verdict for verdict in kept(keep) if verdict.model_type in names]
    known = {verdict.model_type for verdict in found}
    rest = [name for name in names if name not in known]
    with multiprocessing.get_context("spawn").Pool(processes, _start, maxtasksperchild=60) as pool:
        for verdict in pool.imap_unordered(judge, rest, chunksize=1):
            print(f"{verdict.model_type:34} {verdict.verdict:10} {verdict.reason or verdict.sites}"[:200], flush=True)
            found.append(verdict)
            if keep is not None:
                with keep.open("a") as lines:
                    lines.write(json.dumps(asdict(verdict)) + "\n")
    return sorted(found, key=lambda verdict: verdict.model_type)


def kept(keep: Path | None) -> list[Verdict]:
    """The verdicts in a file that :func:`run` keeps; none where there is no such file."""
    if keep is None or not keep.exists():
        return []
    return [Verdict(**json.loads(line)) for line in keep.read_text().splitlines()]


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
    arguments = parser.parse_args()
    verdicts = run(arguments.types or types(), arguments.processes, arguments.keep)
    print(dict(Counter(verdict.verdict for verdict in verdicts)))
    status = int(any(verdict.verdict in ("WRONG", "FAILED") for verdict in verdicts))
    if not arguments.types:
        page = page_of(verdicts)
        if not arguments.check:
            arguments.page.write_text(page)
        elif arguments.page.read_text() != page:
            print(f"{arguments.page} is not what came out; run: python tools/conformance.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

"""What cutting saves in an encoder: time of a pass, bytes of the file, resident bytes of a process that loaded it.

    python -m benchmarks.pruned MODEL               half of the heads, drawn at random; 32 x 128 tokens
    python -m benchmarks.pruned MODEL --runs 5      times only, in five processes; --plan uniform: half of every layer

The cut model is proved against its original first (``hw.prune`` does). The ledger is what the removed heads' rows and
columns of the four projections take.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import headwise as hw
from headwise.models import Model
from headwise.verbs.timing import timing

#: A process of its own: loads a folder, touches every weight, says what is resident beyond what the libraries take.
RESIDENT = """
import sys, torch
torch.set_num_threads(1)
import headwise as hw
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
warm = hw.load(sys.argv[1])
hw.wrap(warm.module).layout
del warm
import gc, ctypes
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = resident()
held = [hw.load(sys.argv[2]) for _ in range(4)]
total = sum(float(value.float().sum()) for model in held for value in model.module.parameters())
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print((resident() - before) / 4)
"""


def resident(folder: str) -> float:
    """Bytes that a loaded model takes, the mean of four in one process."""
    done = subprocess.run([sys.executable, "-c", RESIDENT, folder, folder], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def half(original: Model, how: str) -> dict[str, list[int]]:
    """Half of the heads: drawn at random from all layers together, or the last half of every layer."""
    blocks = original.layout.blocks
    every = [(path, head) for path, block in blocks.items() for head in range(block.query_heads)]
    if how == "uniform":
        chosen = [(path, head) for path, head in every if head >= blocks[path].query_heads // 2]
    else:
        chosen = sorted(random.Random(0).sample(every, len(every) // 2))
    plan: dict[str, list[int]] = {}
    for path, head in chosen:
        plan.setdefault(path, []).append(head)
    return plan


def one(asked: argparse.Namespace) -> dict[str, Any]:
    """Cut, time, weigh: once, in this process."""
    original = hw.load(asked.model)
    blocks = original.layout.blocks
    plan = half(original, asked.plan)
    small = hw.prune(original, plan, repair="none")
    width = original.config.hidden_size
    ledger = sum(
        len(heads) * (4 * width * blocks[path].d_v + 3 * blocks[path].d_v) * original.dtype.itemsize
        for path, heads in plan.items()
    )
    found = timing(original, small, repeats=15)
    layers = [sum(getattr(layer, name) for layer in found.layers) for name in ("before", "after")]
    gone, heads = sum(map(len, plan.values())), sum(block.query_heads for block in blocks.values())
    print(f"heads: {gone} of {heads} go ({asked.plan}); {found.threads} threads")
    print(f"pass of {found.batch} x {found.length}: {found.before * 1e3:.0f} ms, gated {found.gated * 1e3:.0f} ms, "
          f"cut {found.after * 1e3:.0f} ms: {found.speedup:.3f} times as fast ({min(found.ratios):.2f} to "
          f"{max(found.ratios):.2f}); attention layers "
          f"{layers[0] * 1e3:.0f} -> {layers[1] * 1e3:.0f} ms", flush=True)  # fmt: skip
    document: dict[str, Any] = {"timing": found.to_document(), "speedup": found.speedup, "ledger": ledger}
    if asked.time:
        return document
    with tempfile.TemporaryDirectory() as place:
        whole, cut = (part.save(Path(place) / name) for part, name in ((original, "whole"), (small, "small")))
        files = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (whole, cut)]
        loaded = [resident(str(folder)) for folder in (whole, cut)]
    print(f"ledger: {ledger:,} bytes; file: {files[0]:,} -> {files[1]:,}, less by {files[0] - files[1]:,}")
    print(f"resident: {loaded[0]:,.0f} -> {loaded[1]:,.0f}, less by {loaded[0] - loaded[1]:,.0f}")
    return {**document, "files": files, "resident": loaded}


def several(asked: argparse.Namespace) -> dict[str, Any]:
    """Time in so many processes of their own: what is the machine's mood differs from one to the next."""
    documents = []
    with tempfile.TemporaryDirectory() as place:
        for at in range(asked.runs):
            file = Path(place) / f"{at}.json"
            told = [sys.executable, "-m", "benchmarks.pruned", asked.model, "--plan", asked.plan]
            subprocess.run([*told, "--time", "--json", str(file)], check=True)
            documents.append(json.loads(file.read_text()))
    speeds = sorted(document["speedup"] for document in documents)
    print(f"{asked.runs} processes: {median(speeds):.3f} times as fast, from {speeds[0]:.3f} to {speeds[-1]:.3f}")
    return {"runs": documents}


def main() -> None:
    """Run it once, or time it several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plan", choices=["random", "uniform"], default="random")
    parser.add_argument("--runs", type=int, default=1, help="processes, one after another; more than 1: times only")
    parser.add_argument("--time", action="store_true", help="times only")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    document = one(asked) if asked.runs == 1 else several(asked)
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

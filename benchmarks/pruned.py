"""What cutting saves in an encoder: time of a pass, bytes of the file, resident bytes of a process that loaded it.

    python -m benchmarks.pruned [--json FILE] MODEL     half of the heads, drawn at random; 32 x 128 tokens

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

import headwise as hw
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


def main() -> None:
    """Cut, time, weigh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    original = hw.load(asked.model)
    blocks = original.layout.blocks
    every = [(path, head) for path, block in blocks.items() for head in range(block.query_heads)]
    plan: dict[str, list[int]] = {}
    for path, head in sorted(random.Random(0).sample(every, len(every) // 2)):
        plan.setdefault(path, []).append(head)
    small = hw.prune(original, plan, repair="none")
    assert small.surgery is not None
    width = original.config.hidden_size
    ledger = sum(
        len(heads) * (4 * width * blocks[path].d_v + 3 * blocks[path].d_v) * original.dtype.itemsize
        for path, heads in plan.items()
    )
    found = timing(original, small, repeats=15)
    with tempfile.TemporaryDirectory() as place:
        whole, cut = (one.save(Path(place) / name) for one, name in ((original, "whole"), (small, "small")))
        files = [sum(one.stat().st_size for one in folder.glob("*.safetensors")) for folder in (whole, cut)]
        loaded = [resident(str(folder)) for folder in (whole, cut)]
    print(f"heads: {len(every)} -> {len(every) - sum(map(len, plan.values()))}; {found.threads} threads")
    print(f"pass of {found.batch} x {found.length}: {found.before * 1e3:.0f} ms, gated {found.gated * 1e3:.0f} ms, "
          f"cut {found.after * 1e3:.0f} ms: {found.speedup:.2f} times as fast")  # fmt: skip
    print(f"ledger: {ledger:,} bytes; file: {files[0]:,} -> {files[1]:,}, less by {files[0] - files[1]:,}")
    print(f"resident: {loaded[0]:,.0f} -> {loaded[1]:,.0f}, less by {loaded[0] - loaded[1]:,.0f}")
    if asked.json is not None:
        document = {"timing": found.to_document(), "ledger": ledger, "files": files, "resident": loaded}
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

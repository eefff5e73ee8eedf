"""Peak memory of a scan against the plain forward pass, each in a process of its own.

    python -m benchmarks.memory            the table
    python -m benchmarks.memory --side scan --tokens 8192      one measurement (growth in bytes)

*Growth* is the peak of the resident set minus what the loaded model takes after one short warm-up pass. The processes
give freed blocks of 128 KiB and more back at once (``MALLOC_MMAP_THRESHOLD_``): otherwise the growth would be that of
the allocator's heap, which depends on the order of allocations more than on their sizes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

#: ``measures``: roles, pattern measures, ranks and C in one pass.
SIDES = ("plain", "scan", "measures", "eager")


def peak() -> int:
    """Peak resident set of this process since :func:`forget_peak`, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Let the peak begin at what is resident now, without what loading took for a moment."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as switch:
        switch.write("5")


def resident() -> int:
    """Resident set now, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()


def growth(side: str, tokens: int) -> int:
    """Bytes that one forward pass of ``side`` over ``tokens`` tokens adds to the resident set."""
    import torch

    import headwise as hw
    from benchmarks.measures import traced
    from benchmarks.scan import plain_once, scan_once, smollm2

    _, module = smollm2()
    model = hw.wrap(module)

    def once(ids: torch.Tensor) -> None:
        if side == "scan":
            scan_once(model, ids)
        elif side == "measures":
            traced(model, ids, ("roles", "pattern", "rank", "covariance"))
        elif side == "plain":
            plain_once(module, ids)
        else:
            with torch.no_grad():
                module(input_ids=ids, use_cache=False, output_attentions=True)

    if side == "eager":
        module.set_attn_implementation("eager")
    once(torch.randint(3, 40000, (1, 64)))
    forget_peak()
    before = resident()
    once(torch.randint(3, 40000, (1, tokens), generator=torch.Generator().manual_seed(1)))
    return peak() - before


def measured(side: str, tokens: int) -> int | None:
    """:func:`growth` in a fresh process; None where it does not fit."""
    command = [sys.executable, "-m", "benchmarks.memory", "--side", side, "--tokens", str(tokens)]
    giving_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=giving_back)
    return int(done.stdout) if done.returncode == 0 else None


def table(full: bool) -> list[tuple[str, str, str, str]]:
    """Rows: tokens, growth of each side in MiB, and the ratio of scan to plain."""
    rows = []
    for tokens in (2048, 4096, 8192) if full else (2048, 8192):
        sides = {side: measured(side, tokens) for side in SIDES if side != "eager" or tokens <= 2048 or full}
        shown = [f"{side} {'does not fit' if got is None else f'{got / 2**20:.0f}'}" for side, got in sides.items()]
        plain, scan = sides["plain"], sides["scan"]
        ratio = f"{scan / plain:.3f}" if plain and scan else "-"
        rows.append(
            (f"peak growth, SmolLM2 base, {tokens} tokens, MiB", *shown[:2], f"{ratio}; {', '.join(shown[2:])}")
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    if asked.side:
        print(growth(asked.side, asked.tokens))
    else:
        for row in table(full=True):
            print(*row, sep="  ")

"""The sizes of the tiled road's blocks: what KEY_BLOCK and BLOCK_SCORES cost on this machine.

    python -m benchmarks.kernels_blocks

Prints the time of one call with all row statistics for each pair of sizes, each the median of
interleaved rounds, beside SDPA without statistics.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import inputs
from headwise.kernels import Problem, Visible, Wanted, blocks, run, tiled_core

SHAPES = [((1, 9, 3, 2048, 64), True), ((8, 12, 12, 512, 32), False)]
KEYS = (256, 512, 1024)
SCORES = tuple(size * 1024 for size in (192, 384, 768, 1536))


@torch.no_grad()
def main(rounds: int = 5) -> None:
    """The table."""
    for shape, causal in SHAPES:
        q, k, v = inputs(shape)
        problem = Problem(q, k, v, Visible(causal=causal))
        times: dict[tuple[int, int], list[float]] = {}
        for _, keys, scores in itertools.product(range(rounds + 1), KEYS, SCORES):
            blocks.KEY_BLOCK = tiled_core.KEY_BLOCK = keys
            blocks.BLOCK_SCORES = scores
            start = time.perf_counter()
            run(problem, Wanted(rows=True, distance=True))
            times.setdefault((keys, scores), []).append(time.perf_counter() - start)
        plain = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shape[1] != shape[2])
            plain.append(time.perf_counter() - start)
        print(f"{shape}, {'causal' if causal else 'full'}: SDPA {statistics.median(plain[1:]) * 1e3:.1f} ms")
        for (keys, scores), taken in times.items():
            print(f"  {keys:5d} keys, {scores // 1024:5d} Ki scores: {statistics.median(taken[1:]) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()

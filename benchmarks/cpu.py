"""The native kernel with all row statistics against torch's attention with none, and against reading K and V once.

    python -m benchmarks cpu            the main lengths, one thread and two
    python -m benchmarks --all cpu      the long ones as well; benchmarks/grid.py has the grid of lengths and widths

A ratio below 1 means that the kernel was faster. Answers are compared with the float64 reference first. What is
timed is one call of the kernel from Python, its outputs allocated; ``run`` around it is timed in its own rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.pairs import Pairs, paired
from headwise.kernels import Problem, Visible, Wanted, native, reference, run

Shape = tuple[int, int, int, int, int]  # batch, query heads, key-value heads, length, width

MAIN: list[tuple[Shape, str]] = [
    ((1, 12, 12, 512, 64), "full"),
    ((1, 12, 12, 512, 64), "causal"),
    ((1, 12, 12, 2048, 64), "full"),
    ((1, 12, 12, 2048, 64), "causal"),
    ((8, 12, 12, 512, 32), "full"),
    ((8, 12, 12, 512, 32), "causal"),
    ((1, 8, 8, 2048, 128), "full"),
    ((1, 8, 8, 2048, 128), "causal"),
]
LONG: list[tuple[Shape, str]] = [
    ((1, 12, 12, 4096, 64), "full"),
    ((1, 12, 12, 4096, 64), "causal"),
    ((1, 8, 8, 4096, 128), "full"),
    ((1, 8, 8, 4096, 128), "causal"),
    ((1, 4, 4, 16384, 64), "full"),
    ((1, 4, 4, 16384, 64), "causal"),
    ((1, 4, 4, 16384, 64), "window"),
]
WINDOW = 256


def inputs(
    shape: Shape, queries: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit normal queries, keys and values."""
    batch, heads, groups, length, width = shape
    g = torch.Generator().manual_seed(0)
    sizes = ((heads, queries or length), (groups, length), (groups, length))
    q, k, v = (torch.randn(batch, h, n, width, generator=g).to(dtype) for h, n in sizes)
    return q, k, v


def visible_of(shape: Shape, kind: str) -> Visible:
    """Who sees whom; padding is on the right, from half of the length to none."""
    if kind == "padded":
        real = torch.linspace(shape[3] // 2, shape[3], shape[0]).long()
        return Visible(key_padding=torch.arange(shape[3]) < real[:, None])
    return Visible(causal=kind != "full", window=WINDOW if kind == "window" else None)


def theirs_of(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Callable[[], object]:
    """torch's call; a window has no torch call that is not n x n beyond 4,096 keys: plain causal stands in."""
    mask = None if visible.key_padding is None else visible.key_padding[:, None, None]
    causal = visible.causal
    if visible.window is not None and q.shape[2] <= 4096:
        i = torch.arange(q.shape[2])
        mask, causal = (i[:, None] >= i) & (i[:, None] - i < visible.window), False
    grouped = q.shape[1] != k.shape[1]
    return lambda: scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def kernel(problem: Problem, statistics: bool = True) -> Callable[[], native.Output]:
    """The kernel's call."""
    seen = problem.visible
    rules = None if seen.key_padding is None else native.Rules(key_padding=seen.key_padding)
    visible = (seen.causal, seen.window or 0, problem.offset)
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    return lambda: native.forward(q, k, v, scale, None, visible, None, statistics, rules)


def ran(problem: Problem) -> Callable[[], object]:
    """The same through the registry, with checks, choice and names."""
    wanted = Wanted(rows=True)
    return lambda: run(problem, wanted)


def check(problem: Problem) -> None:
    """The last rows of a few heads against the reference."""
    share = problem.q.shape[1] // problem.k.shape[1]
    rows = min(problem.q.shape[2], 64)
    small = Problem(
        problem.q[:, :share, -rows:], problem.k[:, :1], problem.v[:, :1], problem.visible
    )  # bottom right: they are the last queries
    truth = reference.attend(small, Wanted(rows=True))
    got = kernel(problem)()
    assert truth.rows is not None
    assert got.floats is not None
    tolerance = 1e-5 if problem.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.z[:, :share, -rows:].double(), truth.z, atol=tolerance, rtol=tolerance)
    named = zip(("lse", "entropy", "max_weight"), got.floats, strict=True)
    for name, found in named:
        want = getattr(truth.rows, name)
        torch.testing.assert_close(found[:, :share, -rows:].double(), want, atol=tolerance * 10, rtol=tolerance * 10)


def statistics_case(shape: Shape, kind: str, rounds: int, dtype: torch.dtype = torch.float32) -> Pairs:
    """All statistics against torch without."""
    q, k, v = inputs(shape, dtype=dtype)
    problem = Problem(q, k, v, visible_of(shape, kind))
    check(problem)
    inner = max(1, int(2e8 / (4 * shape[0] * shape[1] * shape[3] ** 2 * shape[4])))
    name = f"{threads()}, {shape}, {kind}{'' if dtype == torch.float32 else f', {dtype}'}"
    return paired(name, kernel(problem), theirs_of(q, k, v, problem.visible), rounds=rounds, inner=min(inner, 200))


def cost_of_statistics(shape: Shape, kind: str, rounds: int) -> Pairs:
    """The kernel with statistics against itself without."""
    problem = Problem(*inputs(shape), visible_of(shape, kind))
    return paired(f"{threads()}, statistics, {shape}, {kind}", kernel(problem), kernel(problem, False), rounds=rounds)


def short_cases(rounds: int) -> list[Pairs]:
    """Single tokens and very short inputs: the call itself."""
    found = []
    for length in (1, 16):
        q, k, v = inputs((1, 12, 12, length, 64))
        problem = Problem(q, k, v)
        theirs = theirs_of(q, k, v, problem.visible)
        found.append(paired(f"{threads()}, N {length}, kernel", kernel(problem), theirs, rounds=rounds, inner=300))
        found.append(paired(f"{threads()}, N {length}, run()", ran(problem), theirs, rounds=rounds, inner=300))
    return found


def decode_cases(length: int, rounds: int) -> list[Pairs]:
    """One query of 32 heads over 8 key-value heads of width 128."""
    q, k, v = inputs((1, 32, 8, length, 128), queries=1)
    problem = Problem(q, k, v, Visible(causal=True))
    check(problem)
    ours = kernel(problem)
    folded = q.view(1, 8, 4, 128)
    others: dict[str, Callable[[], object]] = {
        "SDPA enable_gqa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "SDPA, heads folded into rows": lambda: scaled_dot_product_attention(folded, k, v),
        "reading K and V once": lambda: (k.sum(), v.sum()),
    }
    name = f"{threads()}, decode, {length} keys / "
    return [paired(name + other, ours, theirs, rounds=rounds) for other, theirs in others.items()]


def threads() -> str:
    """How many threads run."""
    return f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def cases(full: bool) -> list[Pairs]:
    """Every comparison, on one thread and on two; ``full``: the long ones as well."""
    if native.why_not() is not None:
        return []
    before, found = torch.get_num_threads(), []
    try:
        for count in dict.fromkeys((1, min(2, before))):
            torch.set_num_threads(count)
            found += [statistics_case(shape, kind, 9) for shape, kind in MAIN]
            found += [cost_of_statistics(shape, kind, 9) for shape, kind in (MAIN[0], MAIN[2])]
            found += short_cases(9)
            found += decode_cases(8192, 9)
            found += decode_cases(32768, 5)
            found.append(statistics_case(MAIN[3][0], "causal", 5, torch.bfloat16))
            found.append(statistics_case(MAIN[3][0], "causal", 5, torch.float16))
            if full:
                found += [statistics_case(shape, kind, 3) for shape, kind in LONG]
    finally:
        torch.set_num_threads(before)
    return found

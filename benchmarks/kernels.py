"""hw.attention against torch's own attention: all statistics against none, folded decoding, forward and backward.

    python -m benchmarks.kernels        the same table as ``make bench``

Answers are compared with the float64 reference first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.pairs import Pairs, paired
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, reference, run

Shape = tuple[int, int, int, int, int]  # batch, query heads, key-value heads, length, width

STATISTICS: list[tuple[Shape, bool]] = [
    ((1, 9, 3, 2048, 64), True),
    ((1, 12, 12, 512, 64), False),
    ((8, 12, 12, 512, 32), False),
    ((32, 12, 12, 64, 32), False),
]
LONG: list[tuple[Shape, bool]] = [
    ((1, 9, 3, 512, 64), True),
    ((1, 12, 12, 2048, 64), False),
    ((1, 12, 12, 2048, 64), True),
    ((1, 12, 12, 4096, 64), True),
    ((1, 8, 8, 4096, 128), True),
    ((1, 32, 8, 2048, 128), True),
]


def inputs(shape: Shape, *, queries: int | None = None, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Unit normal queries, keys and values."""
    batch, heads, groups, length, width = shape
    torch.manual_seed(0)
    q = torch.randn(batch, heads, queries or length, width, requires_grad=grad)
    k, v = (torch.randn(batch, groups, length, width, requires_grad=grad) for _ in range(2))
    return q, k, v


def check(problem: Problem, wanted: Wanted) -> None:
    """Compare a few heads with the reference: z, and every statistic that is wanted."""
    share = problem.q.shape[1] // problem.k.shape[1]
    small = Problem(problem.q[:1, :share], problem.k[:1, :1], problem.v[:1, :1], problem.visible, problem.rule)
    if small.q.shape[2] * small.k.shape[2] > 2048 * 2048:
        small = Problem(
            small.q[:, :, -64:], small.k, small.v, small.visible, small.rule
        )  # bottom right: the last queries
    truth, ours = reference.attend(small, wanted), run(small, wanted)
    torch.testing.assert_close(ours.z.double(), truth.z, atol=1e-5, rtol=1e-4)
    if wanted.statistics:
        assert truth.rows is not None
        assert ours.rows is not None
        for name in ("lse", "entropy", "max_weight"):
            torch.testing.assert_close(
                getattr(ours.rows, name).double(), getattr(truth.rows, name), atol=1e-4, rtol=1e-4
            )
        assert torch.equal(ours.rows.argmax, truth.rows.argmax)


def statistics_case(shape: Shape, causal: bool, rounds: int) -> Pairs:
    """All row statistics, the distance included, against SDPA with none."""
    q, k, v = inputs(shape)
    problem, wanted = Problem(q, k, v, Visible(causal=causal)), Wanted(rows=True, distance=True)
    check(problem, wanted)
    grouped = shape[1] != shape[2]

    def ours() -> object:
        return run(problem, wanted)

    def theirs() -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    kind = "causal" if causal else "full"
    return paired(f"all row statistics / SDPA without, {shape}, {kind}", ours, theirs, rounds=rounds)


def decode_case(shape: Shape) -> Pairs:
    """One query per head: the heads of a group folded into rows, against enable_gqa."""
    q, k, v = inputs(shape, queries=1)
    problem = Problem(q, k, v, Visible(causal=True))
    check(problem, Wanted())
    assert run(problem).choice is not None

    def ours() -> object:
        return run(problem)

    def theirs() -> object:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    torch.testing.assert_close(run(problem).z, theirs(), atol=1e-5, rtol=1e-4)
    return paired(f"decoding, folded / enable_gqa, {shape}", ours, theirs, rounds=25, inner=3)


def backward_case(shape: Shape, rule: ScoreRule, name: str) -> Pairs:
    """Forward and backward of the blockwise road against the dense one."""
    q, k, v = inputs(shape, grad=True)
    problem = Problem(q, k, v, Visible(causal=True), rule)

    def step(backend: str) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(problem, backend=backend).z.sum(), (q, k, v))

    for a, b in zip(step("tiled")(), step("eager")(), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    return paired(f"forward and backward, tiled / dense, {name}, {shape}", step("tiled"), step("eager"), rounds=5)


def window_case(length: int, window: int) -> Pairs:
    """A sliding window against the whole triangle: blocks outside it are skipped."""
    q, k, v = inputs((1, 8, 8, length, 64))
    problem = Problem(q, k, v, Visible(causal=True, window=window))
    check(problem, Wanted(rows=True))

    def ours() -> object:
        return run(problem, Wanted(rows=True))

    def theirs() -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    return paired(f"window {window} with rows / SDPA causal, length {length}", ours, theirs, rounds=5)


@torch.no_grad()
def forward_cases(full: bool) -> list[Pairs]:
    """Everything without gradients."""
    found = [statistics_case(shape, causal, 9) for shape, causal in STATISTICS]
    if full:
        found += [statistics_case(shape, causal, 5) for shape, causal in LONG]
    found.append(decode_case((1, 32, 8, 8192, 128)))
    if full:
        found += [decode_case((1, 32, 8, 32768, 128)), decode_case((4, 32, 8, 2048, 128))]
        found.append(window_case(8192, 256))
    return found


def cases(full: bool) -> list[Pairs]:
    """Ratios of hw.attention's time to that of torch's."""
    found = forward_cases(full)
    found.append(backward_case((1, 8, 8, 1024, 64), ScoreRule(softcap=30.0), "soft cap"))
    return found


if __name__ == "__main__":
    for one in cases(full=False):
        print(*one.row(), sep="  ")

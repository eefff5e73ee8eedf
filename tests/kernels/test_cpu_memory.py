"""What the native kernel reads and writes: NaN where nobody looks, awkward pointers, threads, scratch."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from headwise.kernels import Problem, ScoreRule, Visible, Wanted, native, run

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


ROWS = Wanted(rows=True)


def both(problem, wanted=ROWS):
    return run(problem, wanted, backend="cpu"), run(problem, wanted, backend="reference")


def same(problem, wanted=ROWS):
    got, want = both(problem, wanted)
    torch.testing.assert_close(got.z.double(), want.z.double(), atol=4e-6, rtol=1e-5, equal_nan=True)
    for name in ("lse", "entropy", "max_weight"):
        torch.testing.assert_close(
            getattr(got.rows, name).double(), getattr(want.rows, name).double(), atol=4e-6, rtol=1e-5, equal_nan=True
        )
    assert torch.equal(got.rows.visible, want.rows.visible)
    return got


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("queries", [2, 67])
def test_what_lies_in_padding_never_matters(target, value, queries):
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 67, 16), torch.randn(2, 2, 67, 24)
    padding = torch.ones(2, 67, dtype=torch.bool)
    padding[0, :13], padding[1, 40:] = False, False
    clean = Problem(q, k, v, Visible(key_padding=padding, causal=True))
    hidden = ~padding[:, None, :, None]
    dirty = replace(clean, k=k.masked_fill(hidden, value), v=v.masked_fill(hidden, value))
    for a, b in ((run(clean, backend="cpu"), run(dirty, backend="cpu")), both(dirty)):
        torch.testing.assert_close(a.z.double(), b.z.double(), atol=4e-6, rtol=1e-5)
    same(dirty)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("queries", [3, 53])
def test_a_visible_nan_or_infinity_reaches_its_rows_and_no_others(target, value, place, queries):
    q, k, v = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 53, 8), torch.randn(1, 2, 53, 5)
    {"k": k, "v": v}[place][0, 1, 20, 3] = value
    got = same(Problem(q, k, v, Visible(causal=True)))
    assert got.z[:, 0].isfinite().all()
    before = [i for i in range(queries) if i + 53 - queries < 20]
    assert got.z[:, 1, before].isfinite().all()
    window = Problem(q, k, v, Visible(causal=True, window=4))
    same(window)
    mask = torch.ones(1, 1, queries, 53, dtype=torch.bool)
    mask[..., 20] = False
    assert same(Problem(q, k, v, Visible(mask=mask))).z.isfinite().all()
    bias = torch.zeros(1, 1, queries, 53).masked_fill(~mask, -torch.inf)
    assert same(Problem(q, k, v, rule=ScoreRule(bias=bias))).z.isfinite().all()


def test_a_nan_query_spoils_its_own_row_alone(target):
    q, k, v = torch.randn(1, 1, 41, 8), torch.randn(1, 1, 41, 8), torch.randn(1, 1, 41, 8)
    q[0, 0, 17] = torch.nan
    z = run(Problem(q, k, v), backend="cpu").z
    assert z[0, 0, 17].isnan().all()
    assert torch.cat([z[0, 0, :17], z[0, 0, 18:]]).isfinite().all()


@pytest.mark.parametrize("shift", [1, 3, 7])
def test_misaligned_and_strided_tensors(target, shift, dtype):
    def moved(*shape):
        flat = torch.randn(2 * shape[0] * shape[1] * shape[2] * (shape[3] + 5) + shift).to(dtype)
        size = shape[0] * shape[1] * shape[2] * (shape[3] + 5)
        return (
            flat[shift : shift + size]
            .view(shape[0], shape[2], shape[1], shape[3] + 5)[..., 2 : 2 + shape[3]]
            .transpose(1, 2)
        )

    q, k, v = moved(2, 4, 37, 11), moved(2, 2, 45, 11), moved(2, 2, 45, 13)
    assert not k.is_contiguous()
    got = run(Problem(q, k, v, Visible(causal=True)), Wanted(rows=True), backend="cpu")
    plain = run(
        Problem(q.contiguous(), k.contiguous(), v.contiguous(), Visible(causal=True)), Wanted(rows=True), backend="cpu"
    )
    torch.testing.assert_close(got.z, plain.z)
    torch.testing.assert_close(got.rows.lse, plain.rows.lse)
    assert got.choice.notes == ()


def test_a_last_axis_that_is_not_contiguous_is_copied_and_said_to_be():
    q, k, v = torch.randn(1, 2, 6, 9).mT, torch.randn(1, 2, 9, 6), torch.randn(1, 2, 9, 6)
    answer = run(Problem(q, k, v), backend="cpu")
    assert answer.choice.notes == ("q was copied: the kernel reads any strides but needs the last axis contiguous",)
    torch.testing.assert_close(answer.z, run(Problem(q.contiguous(), k, v), backend="cpu").z)


def test_broadcast_inputs_are_read_in_place():
    q, k, v = (
        torch.randn(1, 1, 9, 4).expand(3, 2, 9, 4),
        torch.randn(1, 1, 9, 4).expand(3, 1, 9, 4),
        torch.randn(3, 1, 9, 4),
    )
    same(Problem(q, k, v))


def test_outputs_are_written_whole(target, monkeypatch):
    """Poisoned memory comes back without a trace of poison."""
    import headwise.kernels.native as module

    def poisoned(shape, dtype=torch.float32):
        return torch.full(shape, 12345) if dtype == torch.int64 else torch.full(shape, 3e33, dtype=dtype)

    class Torch:
        empty = staticmethod(poisoned)

        def __getattr__(self, name):
            return getattr(torch, name)

    q, k, v = torch.randn(2, 3, 29, 5), torch.randn(2, 3, 31, 5), torch.randn(2, 3, 31, 7)
    padding = torch.zeros(2, 31, dtype=torch.bool)
    padding[1, 3:] = True
    classes = torch.zeros(1, 31, dtype=torch.uint8)
    wanted = Wanted(rows=True, distance=True, classes=classes, n_classes=2)
    problem = Problem(q, k, v, Visible(causal=True, key_padding=padding), ScoreRule(sinks=torch.zeros(3)))
    want = run(problem, wanted, backend="cpu")
    monkeypatch.setattr(module, "torch", Torch())
    got = run(problem, wanted, backend="cpu")
    assert torch.equal(want.z, got.z)
    for name, value in vars(want.rows).items():
        if value is not None:
            assert torch.equal(value, getattr(got.rows, name)), name


def test_many_threads_at_once(target):
    problems = []
    for n in (1, 7, 130, 601):
        q, k, v = torch.randn(2, 4, n, 16), torch.randn(2, 2, 601, 16), torch.randn(2, 2, 601, 16)
        problems.append(Problem(q, k, v, Visible(causal=True)))
    want = [run(problem, Wanted(rows=True), backend="cpu") for problem in problems]
    with ThreadPoolExecutor(8) as pool:
        jobs = [(i % 4, pool.submit(run, problems[i % 4], Wanted(rows=True), backend="cpu")) for i in range(64)]
        for i, job in jobs:
            assert torch.equal(job.result().z, want[i].z)
            assert torch.equal(job.result().rows.entropy, want[i].rows.entropy)


def test_a_team_of_threads_without_openmp_gives_the_same():
    """HEADWISE_THREADS=std: no OpenMP runtime is used."""
    code = (
        "import torch, headwise.kernels as h\n"
        "from headwise.kernels import native\n"
        "torch.manual_seed(0); torch.set_num_threads(3)\n"
        "q, k, v = (torch.randn(2, 3, 301, 16) for _ in range(3))\n"
        "answer = h.run(h.Problem(q, k, v), h.Wanted(rows=True), backend='cpu')\n"
        "want = h.run(h.Problem(q, k, v), h.Wanted(rows=True), backend='reference')\n"
        "assert torch.allclose(answer.z, want.z, atol=1e-5)\n"
        "print(native.core().team())\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HEADWISE_THREADS": "std"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "std::thread"


def test_the_forced_target_runs_and_an_unknown_one_is_refused_with_the_list():
    for name in native.core().targets():
        out = subprocess.run(
            [sys.executable, "-c", "from headwise.kernels import native; print(native.target(), native.why_not())"],
            env={**os.environ, "HEADWISE_TARGET": name},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.split() == [name, "None"]
    out = subprocess.run(
        [sys.executable, "-c", "from headwise.kernels import backends; print(backends()['cpu'])"],
        env={**os.environ, "HEADWISE_TARGET": "mmx"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "HEADWISE_TARGET=mmx is not a target that this machine can run (" in out.stdout


@pytest.mark.parametrize("queries", [1, 1201])
def test_scratch_is_at_most_3_mb_per_thread(queries):
    """The process may grow by the outputs, and by 3 MB for each of two threads."""
    code = f"""
import resource, torch
from headwise.kernels import native
torch.set_num_threads(2)
q, k, v = torch.randn(1, 8, {queries}, 128), torch.randn(1, 8, 8192, 128), torch.randn(1, 8, 8192, 128)
native.forward(q[:, :, :1, :8], k[:, :, :64, :8], v[:, :, :64, :8], 1.0, None, (False, 0, 0), None, True)
def high(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = high()
out = native.forward(q, k, v, 0.1, None, (True, 0, 0), None, True)
print((high() - before) * 1024 - sum(x.numel() * x.element_size() for x in out if x is not None))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) <= 2 * 3 * 2**20


def test_column_sums_equal_the_patterns(target, dtype):
    for options in ({}, {"causal": True}, {"causal": True, "window": 9}):
        q, k, v = (
            torch.randn(2, 4, 61, 9).to(dtype),
            torch.randn(2, 2, 601, 9).to(dtype),
            torch.randn(2, 2, 601, 9).to(dtype),
        )
        padding = torch.rand(2, 601) < 0.8
        padding[0] = False
        rule = ScoreRule(sinks=torch.randn(4), softcap=3.0, bias=torch.randn(1, 4, 1, 601))
        problem = Problem(q, k, v, Visible(key_padding=padding, **options), rule)
        from headwise.kernels import received

        weights = torch.rand(1, 61)
        got = received(problem, row_weights=weights)
        pattern = run(
            Problem(q.float(), k.float(), v.float(), problem.visible, rule), Wanted(weights=True), backend="reference"
        ).weights
        torch.testing.assert_close(got, (pattern * weights[:, None, :, None]).sum(-2), atol=2e-5, rtol=1e-4)
        assert (got[0] == 0).all()


def test_column_sums_without_the_kernel_are_the_same(no_native):
    from headwise.kernels import received

    q, k = torch.randn(2, 4, 61, 9), torch.randn(2, 2, 45, 9)
    problem = Problem(q, k, k, Visible(causal=True, mask=torch.rand(1, 1, 61, 45) < 0.7))
    pattern = run(problem, Wanted(weights=True), backend="reference").weights
    torch.testing.assert_close(received(problem), pattern.sum(-2), atol=1e-5, rtol=1e-5)

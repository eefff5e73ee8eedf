"""What the kernel tests share: the backends, the dtypes, small blocks, and problems with known answers."""

from __future__ import annotations

import pytest
import torch

from headwise.kernels import Problem, native

BACKENDS = ("reference", "eager", "sdpa", "tiled", *(() if native.why_not() else ("cpu",)))


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS)
    if "dtype" in metafunc.fixturenames:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        metafunc.parametrize("dtype", dtypes, ids=[str(dtype).removeprefix("torch.") for dtype in dtypes])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=native.core().targets() if native.core() else ["none"])
def target(request):
    """Every instruction set that the native kernel was built for and that this machine can run."""
    with native.forced(request.param):
        yield request.param


@pytest.fixture
def no_native(monkeypatch):
    """As where the compiled extension cannot be loaded."""
    monkeypatch.setattr("headwise.kernels.native.why_not", lambda: "the native kernel is not built")


@pytest.fixture
def uniform():
    """A problem whose queries are zero, so that every visible key gets the same weight: values (K,) or (G, K)."""

    def make(values, queries, heads=1, dtype=torch.float32, **parts):
        v = torch.tensor(values, dtype=dtype)
        v = v.view(1, -1, v.shape[-1], 1)
        q = torch.zeros(1, heads, queries, 2, dtype=dtype)
        k = torch.randn(1, v.shape[1], v.shape[2], 2).to(dtype)
        return Problem(q, k, v, **parts)

    return make


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of so few keys and rows that short inputs cross many of their edges."""

    def make(keys=8, scores=8 * 24):
        monkeypatch.setattr("headwise.kernels.blocks.KEY_BLOCK", keys)
        monkeypatch.setattr("headwise.kernels.tiled_core.KEY_BLOCK", keys)
        monkeypatch.setattr("headwise.kernels.blocks.BLOCK_SCORES", scores)

    return make

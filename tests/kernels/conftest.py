"""What the kernel tests share: problems by size, and the backends that can compute one."""

from __future__ import annotations

import pytest
import torch

from headwise.kernels import Problem, Wanted, choose

BACKENDS = ("reference", "eager", "sdpa", "tiled")


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS)
    if "dtype" in metafunc.fixturenames:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        metafunc.parametrize("dtype", dtypes, ids=[str(dtype).removeprefix("torch.") for dtype in dtypes])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
def can():
    """Whether a backend takes a problem; what sdpa declines is tested in test_registry."""

    def ask(backend, problem, wanted=None):
        return (
            backend != "sdpa"
            or "sdpa" not in dict(choose(problem, wanted or Wanted(), "eager").reasons)
            or (dict(choose(problem, wanted or Wanted(), "eager").reasons)["sdpa"] == "eager was asked for")
        )

    return ask

"""The shortest road through the native kernel: the same answers, and only where there is nothing to check or to say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.errors import ShapeError
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, attention, cpu, native, run

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))

X = torch.randn(2, 4, 7, 3, generator=torch.Generator().manual_seed(0))


def quick(q=X, k=X, v=X, causal=False, window=None, offset=None, scale=None, softcap=None, rows=True):
    return cpu.quick(q, k, v, causal, window, offset, scale, softcap, rows)


@pytest.mark.parametrize("queries", [1, 5, 16, 131])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 3},
        {"window": 4},
        {"offset": 2, "causal": True},
        {"scale": 0.7},
        {"softcap": 2.0},
    ],
)
def test_both_roads_give_the_same_bits(target, dtype, queries, options):
    q, k, v = (torch.randn(2, h, n, d).to(dtype) for h, n, d in ((6, queries, 8), (3, 133, 8), (3, 133, 20)))
    seen = {name: value for name, value in options.items() if name in ("causal", "window", "offset")}
    rule = {name: value for name, value in options.items() if name not in seen}
    problem = Problem(q, k, v, Visible(**seen), ScoreRule(**rule))
    careful = run(problem, Wanted(rows=True), backend="cpu")
    found = quick(q, k, v, **options)
    assert found is not None
    z, rows = found
    assert torch.equal(z, careful.z)
    assert z.stride() == careful.z.stride()
    for name in ("lse", "entropy", "max_weight", "argmax", "visible"):
        got, want = getattr(rows, name), getattr(careful.rows, name)
        assert got.dtype == want.dtype, name
        assert torch.equal(got, want), name
    alone = quick(q, k, v, rows=False, **options)
    if dtype == torch.bfloat16:
        assert alone is None
    else:
        assert torch.equal(alone[0], z)
        assert alone[1] is None


@pytest.mark.parametrize(
    "unusual",
    [
        {"q": X.double(), "k": X.double(), "v": X.double()},
        {"q": X[0]},
        {"k": X.half()},
        {"k": X[:, :3]},
        {"v": X[:, :, :6]},
        {"q": X[:1]},
        {"q": X[..., :2]},
        {"q": X.mT.contiguous().mT},
        {"q": X[:, :, :0]},
        {"k": X[:, :, :0], "v": X[:, :, :0]},
        {"v": X[..., :0]},
        {"q": X.to("meta"), "k": X.to("meta"), "v": X.to("meta")},
        {"q": X.clone().requires_grad_()},
        {"q": None},
        {"causal": 1},
        {"window": 0},
        {"window": True},
        {"window": 2.0},
        {"offset": 1.5},
        {"scale": "1"},
        {"scale": float("nan")},
        {"scale": float("inf")},
        {"softcap": -1.0},
        {"softcap": 0.0},
        {"softcap": float("nan")},
        {"softcap": float("inf")},
    ],
)
def test_whatever_is_unusual_takes_the_careful_road(unusual):
    assert quick() is not None
    assert quick(**unusual) is None


def test_a_tensor_that_needs_gradients_is_quick_only_where_none_are_taken():
    q = torch.nn.Parameter(X.clone())
    assert quick(q) is None
    with torch.no_grad():
        z, rows = quick(q)
    assert type(z) is torch.Tensor
    assert not z.requires_grad
    assert not rows.entropy.requires_grad


def test_modes_subclasses_and_transforms_see_every_operation():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        pass

    with Mode():
        assert quick() is None
    assert quick(X.as_subclass(Own)) is None
    found = []
    torch.func.vmap(lambda q: (found.append(quick(q[None], X[:1], X[:1])), q)[1])(X)
    assert found == [None]
    with torch.autograd.forward_ad.dual_level():
        assert quick() is None


def test_run_and_attention_take_it_and_say_so():
    answer = run(Problem(X, X, X, Visible(causal=True)), Wanted(rows=True))
    assert answer.choice.backend == "cpu"
    assert dict(answer.choice.reasons) == dict.fromkeys(("sdpa", "tiled", "eager", "reference"), "cpu comes first")
    z, rows = attention(X, X, X, causal=True, rows=True)
    assert torch.equal(z, answer.z)
    assert torch.equal(rows.lse, answer.rows.lse)
    gated = attention(X, X, X, causal=True, gates=torch.tensor([0.0, 1.0, 2.0, -1.0]))
    torch.testing.assert_close(gated[:, 1], z[:, 1])
    assert (gated[:, 0] == 0).all()
    with pytest.raises(ShapeError, match="q and k must have the same width"):
        run(Problem(X[..., :2], X, X))


def test_an_output_outlives_the_others():
    z, rows = quick()
    want = [part.clone() for part in (z, rows.lse, rows.argmax)]
    kept = rows.argmax
    del z, rows
    for _ in range(50):
        quick(torch.randn(2, 4, 7, 3))
    assert torch.equal(kept, want[2])
    z, rows = quick()
    z.add_(1.0)
    assert torch.equal(rows.lse, want[1])
    torch.testing.assert_close(z, want[0] + 1.0)


def test_outputs_are_written_whole():
    """New memory comes filled with a pattern, and none of it is left."""
    code = (
        "import torch\n"
        "from headwise.kernels import cpu\n"
        "torch.manual_seed(0)\n"
        "q, k, v = torch.randn(2, 3, 29, 5), torch.randn(2, 3, 31, 5), torch.randn(2, 3, 31, 7)\n"
        "z, rows = cpu.quick(q, k, v, True, 3, -1, None, None, True)\n"  # the first rows see no key
        "print([x.double().sum().item() for x in (z, rows.entropy, rows.max_weight, rows.argmax, rows.visible)])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MALLOC_PERTURB_": fill},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for fill in ("0", "165", "90")
    ]
    assert said[0] == said[1] == said[2]


def test_without_torchs_table_the_careful_road_is_taken(monkeypatch):
    monkeypatch.setattr(native, "_LOADED", native._LOADED._replace(exchanges=False))
    assert quick() is None
    assert run(Problem(X, X, X), Wanted(rows=True)).choice.backend == "cpu"

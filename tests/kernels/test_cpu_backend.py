"""The native backend's place: when it is chosen, what it refuses, and what autograd, compile and export see of it."""

from __future__ import annotations

import builtins
import importlib

import pytest
import torch

from headwise.errors import UnsupportedError
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, backends, choose, native, run

built = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))

X = torch.randn(2, 4, 7, 3, generator=torch.Generator().manual_seed(0))


@built
@pytest.mark.parametrize("wanted", [Wanted(), Wanted(rows=True), Wanted(distance=True)])
def test_it_comes_first_on_the_cpu(wanted):
    choice = choose(Problem(X, X, X, Visible(causal=True)), wanted)
    assert choice.backend == "cpu"
    assert dict(choice.reasons) == dict.fromkeys(("sdpa", "tiled", "eager", "reference"), "cpu comes first")
    assert native.target() in backends()["cpu"]


@built
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            Problem(X.double(), X.double(), X.double()),
            "float32, bfloat16 and float16, and the tensors are torch.float64",
        ),
        (Problem(X, X, X, Visible(predicate=lambda b, h, i, j: j <= i)), "a predicate is a Python function"),
        (Problem(X.to("meta"), X.to("meta"), X.to("meta")), "the tensors are on meta"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(problem, reason):
    assert reason in dict(choose(problem, Wanted(rows=True)).reasons)["cpu"]
    with pytest.raises(UnsupportedError, match=f"backend='cpu' cannot compute this: .*{reason}"):
        run(problem, Wanted(rows=True), backend="cpu")


@built
def test_it_stands_back_where_gradients_of_plain_attention_are_wanted_and_runs_if_asked():
    q = X.clone().requires_grad_()
    choice = choose(Problem(q, X, X))
    assert choice.backend == "sdpa"
    assert dict(choice.reasons)["cpu"].startswith("gradients of plain attention are wanted")

    def gradient(dtype, backend):
        q, x = X.to(dtype).requires_grad_(), X.to(dtype)
        return torch.autograd.grad(run(Problem(q, x, x), backend=backend).z.square().sum(), q)[0].double()

    truth = gradient(torch.float64, "eager")
    off, torchs = ((gradient(torch.float32, name) - truth).abs().max() for name in ("cpu", "sdpa"))
    assert off <= 2 * torchs + 1e-6 * truth.abs().max()
    with torch.no_grad():
        assert choose(Problem(q, X, X)).backend == "cpu"


@built
@pytest.mark.parametrize("units", [False, True])
def test_it_stands_back_where_torch_has_matrix_units_for_bfloat16_and_z_alone_is_wanted(units, monkeypatch):
    monkeypatch.setattr("headwise.kernels.cpu._matrix_units", lambda: units)
    x = torch.randn(1, 2, 33, 8).bfloat16()
    plain = Problem(x, x, x, Visible(causal=True))
    choice = run(plain).choice
    assert choice.backend == ("sdpa" if units else "cpu")
    if units:
        assert "torch multiplies bfloat16 on this processor's matrix units (AMX)" in dict(choice.reasons)["cpu"]
    assert run(plain, Wanted(rows=True)).choice.backend == "cpu"
    assert run(plain, backend="cpu").choice.backend == "cpu"
    assert choose(Problem(x[:, :, :1], x, x)).backend == "cpu"
    assert choose(Problem(x.float(), x.float(), x.float())).backend == "cpu"
    assert choose(Problem(x, x, x, Visible(causal=True), ScoreRule(softcap=2.0))).backend == "cpu"


@built
def test_gradients_equal_those_of_the_reference():
    q, k, v = (torch.randn(2, h, n, 5, requires_grad=True) for h, n in ((4, 23), (2, 29), (2, 29)))
    bias, sinks = torch.randn(1, 4, 1, 29, requires_grad=True), torch.randn(4, requires_grad=True)
    mask = torch.rand(2, 1, 23, 29) < 0.6
    mask[0, 0, 5] = False
    problem = Problem(q, k, v, Visible(causal=True, mask=mask), ScoreRule(softcap=3.0, bias=bias, sinks=sinks))
    pairs = torch.randint(-1, 29, (2, 1, 23))
    factor = torch.randn(2, 4, 23)
    found = {}
    for name in ("cpu", "reference"):
        answer = run(problem, Wanted(rows=True, distance=True, pairs=pairs), backend=name)
        rows = answer.rows
        loss = answer.z.square().sum() + (factor * (rows.entropy + rows.max_weight + rows.distance + rows.sink)).sum()
        found[name] = torch.autograd.grad(loss + rows.pairs.sum(), (q, k, v, bias, sinks))
    for a, b in zip(found["cpu"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


@built
def test_the_operator_passes_torchs_own_checks():
    import headwise.kernels.cpu_function  # noqa: F401

    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    args = (
        q,
        k,
        v,
        torch.randn(1, 2, 9, 9),
        None,
        torch.ones(1, 9, dtype=torch.bool),
        None,
        True,
        4,
        0,
        0.5,
        2.0,
        True,
        True,
    )
    torch.library.opcheck(torch.ops.headwise.attention.default, args, test_utils=("test_schema", "test_faketensor"))


@built
def test_the_operator_is_in_the_exported_graph():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            answer = run(Problem(q, k, v, Visible(causal=True)), Wanted(rows=True))
            return answer.z, answer.rows.entropy

    n = torch.export.Dim("n", min=2, max=64)
    args = (torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    exported = torch.export.export(Module(), args, dynamic_shapes=({2: n}, {2: n}, {2: n}))
    graphs = (module.graph for module in exported.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    assert any("headwise.attention" in str(node.target) for graph in graphs for node in graph.nodes)
    for length in (3, 40):
        args = tuple(torch.randn(1, 2, length, 4) for _ in range(3))
        for a, b in zip(exported.module()(*args), Module()(*args), strict=True):
            torch.testing.assert_close(a, b)


def test_an_extension_that_cannot_be_loaded_is_reported_and_nothing_else_changes(monkeypatch):
    real = builtins.__import__

    def refusing(name, globals=None, locals=None, fromlist=(), level=0):
        if "_core" in (fromlist or ()):
            raise ImportError("undefined symbol: made_up")
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", refusing)
    loaded = native._load()
    monkeypatch.setattr(builtins, "__import__", real)
    assert loaded.core is None
    assert "could not be loaded: undefined symbol: made_up" in loaded.why_not
    monkeypatch.setattr(native, "_LOADED", loaded)
    choice = run(Problem(X, X, X), Wanted(rows=True)).choice
    assert choice.backend == "tiled"
    assert "undefined symbol: made_up" in dict(choice.reasons)["cpu"]
    with pytest.raises(UnsupportedError, match="undefined symbol: made_up"):
        run(Problem(X, X, X), backend="cpu")
    importlib.import_module("headwise.kernels")

"""torch.compile, torch.export with a dynamic length, torch.func.vmap, autocast, the meta device."""

from __future__ import annotations

import warnings

import pytest
import torch

from headwise.errors import UnsupportedError
from headwise.kernels import Problem, Visible, Wanted, attention, choose, run


def everything(q, k, v, padding, gates):
    z, rows = attention(q, k, v, causal=True, key_padding=padding, gates=gates, rows=True, softcap=3.0)
    return z, rows.entropy, rows.max_weight, rows.argmax, rows.visible


def plain(q, k, v, padding, gates):
    del padding
    return (attention(q, k, v, causal=True, gates=gates),)


def padded(q, k, v, padding, gates):
    return (attention(q, k, v, key_padding=padding, gates=gates),)


def inputs(n, grad=False):
    q, k, v = torch.randn(2, 4, n, 6), torch.randn(2, 2, n, 6), torch.randn(2, 2, n, 5)
    padding = torch.ones(2, n, dtype=torch.bool)
    padding[0, :2] = False
    return [x.requires_grad_(grad) for x in (q, k, v)] + [padding, torch.rand(4, requires_grad=grad)]


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, at import
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [everything, plain, padded])
def test_compiled_equals_eager_forward_and_backward(function, compiler):
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=compiler)
    for n in (7, 11):
        args = inputs(n, grad=True)
        leaves = [x for x in args if x.requires_grad]
        results = []
        for f in (function, compiled):
            found = f(*args)
            loss = sum((x**2).sum() for x in found if x.is_floating_point())
            results.append((*found, *torch.autograd.grad(loss, leaves)))
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a.double(), b.double(), atol=1e-5)


@pytest.mark.parametrize("function", [everything, plain, padded])
def test_exported_with_a_dynamic_length_equals_eager(function):
    n = torch.export.Dim("n", min=2, max=512)
    args = tuple(inputs(5))
    shapes = (({2: n}, {2: n}, {2: n}, {1: n}, None),)
    exported = torch.export.export(Module(function), args, dynamic_shapes=shapes).module()
    for length in (3, 9, 64):
        args = inputs(length)
        for padding in (args[3], torch.ones_like(args[3])):
            args[3] = padding
            for a, b in zip(exported(*args), function(*args), strict=True):
                assert torch.allclose(a.double(), b.double(), atol=1e-6)


def test_the_operators_pass_torchs_own_checks():
    import headwise.kernels.tiled_op  # noqa: F401

    q, k, v, padding, _ = inputs(5, grad=True)
    args = (q, k, v.detach(), None, None, padding, None, True, 3, 0, 0.5, 2.0, True, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(torch.ops.headwise.tiled.default, args, test_utils=("test_schema", "test_faketensor"))


def test_a_predicate_cannot_be_traced_and_runs_dense_saying_so():
    def function(q):
        choice = choose(Problem(q, q, q, Visible(predicate=lambda b, h, i, j: j <= i)))
        assert choice.backend == "eager"
        return q

    torch.export.export(Module(function), (torch.randn(1, 2, 5, 4),))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_vmap_over_a_batch_of_gates(softcap, shape):
    q, k, v, _, _ = inputs(7)
    gates = torch.rand(3, *shape)

    def gated(gate):
        return attention(q, k, v, causal=True, gates=gate, softcap=softcap)

    assert torch.allclose(torch.func.vmap(gated)(gates), torch.stack([gated(gate) for gate in gates]), atol=1e-6)
    score = torch.func.grad(lambda gate: (gated(gate) ** 2).sum())
    assert torch.allclose(torch.func.vmap(score)(gates), torch.stack([score(gate) for gate in gates]), atol=1e-4)


def test_vmap_over_everything_else():
    q, k, v = torch.randn(3, 2, 4, 7, 6), torch.randn(2, 2, 7, 6), torch.randn(2, 2, 7, 5)
    bias, mask, padding = torch.randn(3, 1, 4, 7, 7), torch.rand(3, 1, 1, 7, 7) < 0.7, torch.rand(3, 2, 7) < 0.8

    def scored(q, bias, mask, padding):
        z, rows = attention(q, k, v, causal=True, bias=bias, mask=mask, key_padding=padding, rows=True)
        return (z**2).sum() + (rows.entropy**2).sum()

    args = (q, bias, mask, padding)
    found = torch.func.vmap(torch.func.grad_and_value(scored, argnums=(0, 1)))(*args)
    want = [torch.func.grad_and_value(scored, argnums=(0, 1))(*one) for one in zip(*args, strict=True)]
    assert torch.allclose(found[1], torch.stack([value for _, value in want]), atol=1e-4)
    for place in (0, 1):
        assert torch.allclose(found[0][place], torch.stack([g[place] for g, _ in want]), atol=1e-4)


def test_gate_gradients_equal_the_inner_product_and_a_finite_difference():
    q, k, v, _, _ = inputs(7)
    gates, factor = torch.ones(2, 4, requires_grad=True), torch.randn(2, 4, 7, 5)
    (gradient,) = torch.autograd.grad((attention(q, k, v, gates=gates) * factor).sum(), gates)
    z = attention(q, k, v)
    assert torch.allclose(gradient, (z * factor).sum((-1, -2)), atol=1e-5)
    step = torch.zeros(2, 4)
    step[1, 2] = 1e-2
    slope = ((attention(q, k, v, gates=gates.detach() + step) - z) * factor).sum() / 1e-2
    assert slope.item() == pytest.approx(gradient[1, 2].item(), rel=1e-3, abs=1e-3)


def test_autocast_does_not_lower_the_scores(backend):
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    want = run(Problem(q, k, v), backend=backend).z
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(Problem(q, k, v), backend=backend).z, want)
        mixed = attention(q, k, v.bfloat16(), backend=backend)
    assert mixed.dtype == torch.bfloat16


def test_the_meta_device_gives_shapes():
    q, k, v = (
        torch.empty(2, 4, 7, 6, device="meta"),
        torch.empty(2, 2, 7, 6, device="meta"),
        torch.empty(2, 2, 7, 5, device="meta"),
    )
    answer = run(Problem(q, k, v, Visible(causal=True)), Wanted(rows=True, distance=True))
    assert answer.z.shape == (2, 4, 7, 5)
    assert answer.rows.entropy.shape == answer.rows.argmax.shape == answer.rows.distance.shape == (2, 4, 7)


def test_many_threads_at_once_give_the_same_answer():
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = (torch.randn(2, 3, 150, 16) for _ in range(3))
    want = run(Problem(q, k, v, Visible(causal=True)), Wanted(rows=True))
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(run, Problem(q, k, v, Visible(causal=True)), Wanted(rows=True)) for _ in range(32)]
    for job in jobs:
        assert torch.equal(job.result().z, want.z)
        assert torch.equal(job.result().rows.entropy, want.rows.entropy)


def test_unsupported_is_a_headwise_error():
    with pytest.raises(UnsupportedError):
        attention(*(torch.zeros(1, 1, 2, 2),) * 3, rows=True, backend="sdpa")

"""Gradients: against finite differences, against the reference, and finite whatever is hidden."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import gradcheck

from headwise.errors import UnsupportedError
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, run

VISIBLE = {
    "full": lambda: Visible(),
    "causal": lambda: Visible(causal=True),
    "window": lambda: Visible(causal=True, window=3),
    "band": lambda: Visible(window=2),
    "padding": lambda: Visible(causal=True, key_padding=torch.tensor([[False] * 4 + [True] * 7, [True] * 11])),
    "mask": lambda: Visible(mask=torch.rand(2, 1, 7, 11) < 0.3),
}
RULES = ("plain", "capped", "bias", "sinks", "all")
OUTPUTS = ("lse", "entropy", "max_weight", "sink", "distance", "pairs")


def inputs(rule):
    def leaf(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    tensors = {"q": leaf(2, 4, 7, 3), "k": leaf(2, 2, 11, 3), "v": leaf(2, 2, 11, 5)}
    if rule in ("bias", "all"):
        tensors["bias"], tensors["additive_mask"] = leaf(1, 4, 7, 11), leaf(2, 1, 1, 11)
    if rule in ("sinks", "all"):
        tensors["sinks"] = leaf(4)
    return tensors


def compute(visible, rule, backend, names, tensors, pairs):
    named = dict(zip(names, tensors, strict=True))
    q, k, v = named.pop("q"), named.pop("k"), named.pop("v")
    rules = ScoreRule(softcap=2.0 if rule in ("capped", "all") else None, **named)
    answer = run(Problem(q, k, v, visible, rules), Wanted(rows=True, distance=True, pairs=pairs), backend=backend)
    found = [answer.z] + [getattr(answer.rows, name) for name in OUTPUTS if getattr(answer.rows, name) is not None]
    # A row that sees nothing has lse -inf, which no finite difference can be taken of.
    return tuple(torch.where(torch.isinf(x), 0.0, x) for x in found)


@pytest.mark.parametrize(("kind", "rule"), list(itertools.product(VISIBLE, RULES)))
def test_gradients_of_everything_equal_finite_differences(small_blocks, kind, rule):
    small_blocks(keys=4, scores=4 * 4)
    tensors, visible, pairs = inputs(rule), VISIBLE[kind](), torch.randint(-1, 11, (2, 2, 7))
    names = tuple(tensors)
    assert gradcheck(
        lambda *x: compute(visible, rule, "tiled", names, x, pairs), tuple(tensors.values()), fast_mode=True, atol=1e-6
    )


@pytest.mark.parametrize("backend_", ["eager", "tiled"])
@pytest.mark.parametrize(("kind", "rule"), list(itertools.product(VISIBLE, RULES)))
def test_gradients_of_everything_equal_the_reference(small_blocks, kind, rule, backend_):
    small_blocks()
    tensors, visible, pairs = inputs(rule), VISIBLE[kind](), torch.randint(-1, 11, (2, 2, 7))
    names, leaves = tuple(tensors), tuple(tensors.values())
    want = compute(visible, rule, "reference", names, leaves, pairs)
    factors = [torch.randn(x.shape, dtype=x.dtype) for x in want]
    gradients = []
    for found in (want, compute(visible, rule, backend_, names, leaves, pairs)):
        loss = sum((x * factor).sum() for x, factor in zip(found, factors, strict=True))
        gradients.append(torch.autograd.grad(loss, leaves))
    for name, a, b in zip(names, *gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-11), name


@pytest.mark.parametrize("output", ["z", "lse", "entropy", "max_weight", "distance"])
def test_one_output_alone_has_its_gradient(output):
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = []
    for backend in ("reference", "tiled"):
        answer = run(Problem(q, k, v, Visible(causal=True)), Wanted(rows=True, distance=True), backend=backend)
        x = answer.z if output == "z" else getattr(answer.rows, output)
        found.append(torch.autograd.grad((x**2).sum(), (q, k), retain_graph=True))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_errors_of_gradients_are_at_most_twice_those_of_plain_torch(dtype):
    q, k, v = (torch.randn(1, 4, 201, 32).to(dtype).requires_grad_() for _ in range(3))
    factor = torch.randn(1, 4, 201, 32)

    def gradients(z, inputs):
        return torch.autograd.grad((z.double() * factor).sum(), inputs)

    hidden = torch.ones(201, 201, dtype=torch.bool).triu(1)
    plain = torch.softmax(((q * 32**-0.5) @ k.mT).masked_fill(hidden, -torch.inf), -1, torch.float32).to(dtype) @ v
    visible = Visible(causal=True)
    truth = gradients(run(Problem(q.double(), k.double(), v.double(), visible), backend="reference").z, (q, k, v))
    exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    truth = gradients(run(Problem(*exact, visible), backend="reference").z, exact)
    theirs = gradients(plain, (q, k, v))
    for backend in ("tiled", "sdpa"):
        ours = gradients(run(Problem(q, k, v, visible), backend=backend).z, (q, k, v))
        for a, b, want in zip(ours, theirs, truth, strict=True):
            error, bound = (a - want).abs().max(), (b - want).abs().max()
            assert error <= 2 * bound + torch.finfo(dtype).eps * want.abs().max()


POISON = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("bad", POISON)
@pytest.mark.parametrize("causal", [False, True])
def test_what_no_query_sees_never_matters(backend, small_blocks, bad, causal):
    small_blocks()
    q, k, v = (torch.randn(2, 2, 20, 3) for _ in range(3))
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[0, :9] = padding[1, 17:] = False
    problem = {"visible": Visible(causal=causal, key_padding=padding)}
    spoiled = [x.masked_fill(~padding[:, None, :, None], bad) for x in (k, v)]
    results = []
    for keys, values in ((k, v), spoiled):
        leaves = [x.clone().requires_grad_() for x in (q, keys, values)]
        try:
            z = run(Problem(*leaves, **problem), backend=backend).z
        except UnsupportedError:
            pytest.skip("declined")
        results.append((z, *torch.autograd.grad(z.sum(), leaves)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.allclose(clean, dirty, atol=1e-6)


@pytest.mark.parametrize("bad", POISON)
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_what_is_not_finite_reaches_only_the_rows_that_see_it(backend, small_blocks, bad, where):
    small_blocks()
    q, k, v = (torch.randn(1, 2, 20, 3) for _ in range(3))
    clean = run(Problem(q, k, v, Visible(causal=True)), backend="reference").z
    spoiled = {"q": q, "k": k, "v": v}
    spoiled[where][:, 0, 13] = bad
    try:
        z = run(Problem(**spoiled, visible=Visible(causal=True)), backend=backend).z
    except UnsupportedError as refusal:
        assert backend == "sdpa"
        assert "NaN or infinity" in str(refusal)  # noqa: PT017
        return
    touched = torch.zeros(1, 2, 20, dtype=torch.bool)
    touched[:, 0, 13 : 14 if where == "q" else 20] = True
    assert torch.allclose(z[~touched], clean[~touched], atol=1e-6)
    if where == "v" or bad is torch.nan:
        assert not z[touched].isfinite().any()


def test_hidden_nan_leaves_every_gradient_of_the_other_rows_alone(small_blocks):
    small_blocks()
    found = []
    for spoil in (False, True):
        torch.manual_seed(1)
        q, k, v = (torch.randn(1, 2, 20, 3, dtype=torch.float64) for _ in range(3))
        if spoil:
            k[:, :, 13:], v[:, :, 13:], q[:, :, 13:] = torch.nan, torch.inf, torch.nan
        leaves = [x.requires_grad_() for x in (q, k, v)]
        answer = run(Problem(*leaves, visible=Visible(causal=True)), Wanted(rows=True), backend="tiled")
        loss = (
            answer.z[:, :, :13].sum() + answer.rows.entropy[:, :, :13].sum() + answer.rows.max_weight[:, :, :13].sum()
        )
        found.append([x[:, :, :13] for x in torch.autograd.grad(loss, leaves)])
    for clean, dirty in zip(*found, strict=True):
        assert torch.allclose(clean, dirty, atol=1e-12)


def test_second_derivatives_are_refused_with_the_way_out():
    q = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    z = run(Problem(q, q, q), backend="tiled").z
    (gradient,) = torch.autograd.grad((z**2).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="backend='eager'"):
        torch.autograd.grad(gradient.sum(), q)

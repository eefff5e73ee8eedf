"""Repair: the closed form against a direct regression, copies of heads, biases, and statistics that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import InputError, MeasureError
from headwise.measures.covariance import Statistics
from headwise.models import wrap
from headwise.surgery import Moments, prune, solve
from headwise.verbs.statistics import statistics
from tests.surgery import small
from tests.surgery.small import IDS, apart, outputs

BLOCK = "encoder.layer.0.attention.self"
TEXT = [{"input_ids": torch.randint(4, 31, (1, 13), generator=torch.Generator().manual_seed(at))} for at in range(23)]


def moments(z: Tensor) -> Moments:
    return Moments(z.mean(0), torch.cov(z.T, correction=0), len(z))


def regression(z: Tensor, weight: Tensor, columns: list[int]) -> Tensor:
    """What the kept columns can say of z W, by plain least squares with an intercept."""
    design = torch.cat([z[:, columns], torch.ones(len(z), 1, dtype=z.dtype)], 1)
    return design @ torch.linalg.lstsq(design, z @ weight).solution


def test_least_squares_is_the_regression() -> None:
    draw = torch.Generator().manual_seed(5)
    z = (
        torch.randn(997, 7, generator=draw, dtype=torch.float64)
        @ torch.randn(7, 7, generator=draw, dtype=torch.float64)
        + 3
    )
    weight = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    new, added = solve(moments(z), weight, [0, 2, 5], "least_squares", ridge=1e-12)
    assert apart([z[:, [0, 2, 5]] @ new + added], [regression(z, weight, [0, 2, 5])]) < 1e-8


def test_least_squares_without_an_intercept_is_the_regression_through_the_origin() -> None:
    draw = torch.Generator().manual_seed(5)
    z = torch.randn(997, 7, generator=draw, dtype=torch.float64) + 3
    weight = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    kept = [0, 2, 5]
    new, added = solve(moments(z), weight, kept, "least_squares_no_bias", ridge=1e-12)
    assert not bool(added.any())
    direct = z[:, kept] @ torch.linalg.lstsq(z[:, kept], z @ weight).solution
    assert apart([z[:, kept] @ new], [direct]) < 1e-8
    pulled, _ = solve(moments(z), weight, kept, "least_squares_no_bias", ridge=1e9)
    assert apart([pulled], [weight[kept]]) < 1e-6


def test_ridge_pulls_towards_the_weights_that_are_there() -> None:
    draw = torch.Generator().manual_seed(5)
    z = torch.randn(997, 7, generator=draw, dtype=torch.float64)
    weight = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    new, _ = solve(moments(z), weight, [0, 2, 5], "least_squares", ridge=1e9)
    assert apart([new], [weight[[0, 2, 5]]]) < 1e-6


def test_copies_of_a_head_cost_nothing() -> None:
    """C_KK is singular when two kept heads are copies; the ridge decides, and the prediction is still exact."""
    draw = torch.Generator().manual_seed(5)
    one = torch.randn(997, 3, generator=draw, dtype=torch.float64)
    z = torch.cat([one, one, one], 1)
    weight = torch.randn(9, 5, generator=draw, dtype=torch.float64)
    new, added = solve(moments(z), weight, list(range(6)), "least_squares")
    assert apart([z[:, :6] @ new + added], [z @ weight]) < 2e-2


def test_bias_is_the_mean_of_what_went() -> None:
    z = torch.tensor([[1.0, 10.0], [3.0, 30.0]], dtype=torch.float64)
    new, added = solve(moments(z), torch.tensor([[2.0], [5.0]], dtype=torch.float64), [0], "bias")
    assert (float(new), float(added)) == (2.0, 100.0)
    whole, constant = solve(moments(z), torch.tensor([[2.0], [5.0]], dtype=torch.float64), [], "least_squares")
    assert whole.shape == (0, 1)
    assert float(constant) == 104.0


def fidelity(model: nn.Module, other: nn.Module) -> float:
    expected, found = outputs(model, input_ids=IDS)[0], outputs(other, input_ids=IDS)[0]
    return float((expected - found).square().mean())


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    return small.bert()


@pytest.fixture(scope="module")
def known(bert: nn.Module) -> Statistics:
    return statistics(bert, inputs=TEXT)


def test_each_repair_is_better_than_the_one_before(bert: nn.Module, known: Statistics) -> None:
    plan = {BLOCK: [1, 2]}
    pruned = {
        method: prune(bert, plan, repair=method, statistics=known)
        for method in ("none", "bias", "least_squares", "least_squares_no_bias")
    }
    seen = {method: apart_on_text(bert, one.module) for method, one in pruned.items()}
    assert seen["least_squares"] < seen["bias"] < seen["none"]
    assert seen["least_squares"] < seen["least_squares_no_bias"] < seen["none"]
    records = {method: one.surgery.repair for method, one in pruned.items() if one.surgery is not None}
    assert records["none"]["layers"] == []
    assert records["least_squares_no_bias"]["layers"][0]["left"] == pytest.approx(
        seen["least_squares_no_bias"], rel=1e-3
    )
    (layer,) = records["least_squares"]["layers"]
    assert layer["rows"] == 23 * 13
    assert layer["columns"] == 10
    assert layer["left"] == pytest.approx(seen["least_squares"], rel=1e-3)
    assert layer["lost"] == pytest.approx(seen["none"], rel=1e-3)


def apart_on_text(model: Any, other: Any) -> float:
    """Squared change of layer 0's attention output over the text, over its variance: what the record predicts."""
    taken: list[list[Tensor]] = [[], []]
    for into, one in zip(taken, (model, other), strict=True):
        dense = one.encoder.layer[0].attention.output.dense
        handle = dense.register_forward_hook(lambda _m, _a, out, into=into: into.append(out.double().flatten(0, 1)))
        for given in TEXT:
            outputs(one, **given)
        handle.remove()
    before, after = torch.cat(taken[0]), torch.cat(taken[1])
    return float((before - after).square().sum(1).mean() / (before - before.mean(0)).square().sum(1).mean())


def test_shared_block_is_repaired_for_all_its_sites() -> None:
    albert = small.albert()
    known = statistics(albert, inputs=TEXT)
    block = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    pruned = prune(albert, {block: [2]}, statistics=known)
    assert pruned.surgery is not None
    (layer,) = pruned.surgery.repair["layers"]
    assert layer["rows"] == 3 * 23 * 13
    assert 0 <= layer["left"] < layer["lost"]


def test_an_intercept_is_added_where_there_was_no_bias() -> None:
    llama: Any = small.decoder("Llama")
    known = statistics(llama, inputs=TEXT)
    pruned: Any = prune(llama, {"model.layers.0.self_attn": [1, 2]}, statistics=known).module
    assert llama.model.layers[0].self_attn.o_proj.bias is None
    assert pruned.model.layers[0].self_attn.o_proj.bias.shape == (24,)
    assert pruned.model.layers[1].self_attn.o_proj.bias is None


def test_every_head_of_a_layer_leaves_its_mean(bert: nn.Module, known: Statistics) -> None:
    pruned = prune(bert, {BLOCK: [0, 1, 2, 3]}, statistics=known)
    assert pruned.surgery is not None
    (layer,) = pruned.surgery.repair["layers"]
    assert layer["left"] == pytest.approx(1.0)


def test_statistics_that_do_not_fit(bert: nn.Module, known: Statistics) -> None:
    with pytest.raises(InputError, match="needs statistics"):
        prune(bert, {BLOCK: [1]})
    with pytest.raises(InputError, match="must be one of none, bias, least_squares, least_squares_no_bias"):
        prune(bert, {BLOCK: [1]}, repair="magic", statistics=known)
    with pytest.raises(InputError, match="ridge must be a number"):
        prune(bert, {BLOCK: [1]}, ridge=-1.0, statistics=known)
    other = small.bert()
    with torch.no_grad():
        next(iter(other.parameters())).add_(1.0)
    with pytest.raises(InputError, match="the statistics are of the weights"):
        prune(other, {BLOCK: [1]}, statistics=known)
    with pytest.raises(InputError, match="the statistics are of the weights"):
        prune(prune(bert, {BLOCK: [1]}, statistics=known), {BLOCK: [1]}, statistics=known)


def test_statistics_that_are_not_finite(bert: nn.Module) -> None:
    broken = statistics(bert, inputs=TEXT)
    site = next(iter(broken))
    broken[site].z._products[0, 0] = float("nan")
    with pytest.raises(MeasureError, match="not finite"):
        prune(bert, {BLOCK: [1]}, statistics=broken)


def test_half_precision_is_solved_in_float64(bert: nn.Module) -> None:
    import copy

    half = copy.deepcopy(bert).to(torch.bfloat16)
    known = statistics(half, inputs=TEXT)
    pruned = prune(wrap(half), {BLOCK: [1, 2]}, statistics=known)
    assert pruned.dtype == torch.bfloat16
    assert pruned.surgery is not None
    (layer,) = pruned.surgery.repair["layers"]
    assert layer["left"] < layer["lost"]


def test_heads_that_never_vary_leave_nothing_to_learn() -> None:
    """Dead heads are the first to go; their covariance is zero."""
    bert: Any = small.bert()
    for layer in bert.encoder.layer:
        torch.nn.init.zeros_(layer.attention.self.value.weight)
    pruned = prune(bert, {BLOCK: [1]}, statistics=statistics(bert, inputs=TEXT))
    assert apart(outputs(pruned.module, input_ids=IDS), outputs(bert, input_ids=IDS)) < 1e-5


def test_a_singular_covariance_without_a_ridge() -> None:
    z = torch.tensor([[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
    with pytest.raises(MeasureError, match="has no inverse, and ridge is 0 or too small"):
        solve(moments(z), torch.ones(3, 2), [0, 1], "least_squares", ridge=0.0)


def test_a_plan_for_other_numbers_of_heads() -> None:
    """A plan without weights fits any model with its blocks, and no other."""
    from headwise.plans import HeadCut, HeadPlan

    def plan(**blocks: tuple[int, int]) -> HeadPlan:
        return HeadPlan((HeadCut(BLOCK, 1),), blocks={BLOCK: (4, 4), **blocks})

    assert prune(small.bert(), plan(), repair="none").surgery
    with pytest.raises(InputError, match="the plan was made for 8 query heads and 4 key-value heads, and the model"):
        prune(small.bert(), plan(**{BLOCK: (8, 4)}), repair="none")
    with pytest.raises(InputError, match="the plan was made for another model: the model has no attention block 'x'"):
        prune(small.bert(), plan(x=(4, 4)), repair="none")

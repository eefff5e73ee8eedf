"""Two copies of one head: criteria that know the set take one and hold on to the other; one-shot ones cannot."""

from __future__ import annotations

import pytest

from headwise.plans import (
    Criterion,
    Fisher,
    Greedy,
    LayerCost,
    Lazy,
    LeaveOneOut,
    Michel,
    Pool,
    SetAware,
    Unit,
    WeightNorm,
    removals,
)
from tests.plans import fakes

HEADS, D_V, PAIR = 7, 3, (2, 5)


@pytest.fixture(scope="module")
def cost() -> LayerCost:
    return fakes.layer(fakes.moments(11, HEADS, D_V, copies=PAIR), HEADS, energy=10.0)


def order(criterion: Criterion) -> list[int]:
    return [step.unit.heads[0] for step in removals(criterion, Pool(fakes.shapes(HEADS), per_layer=0))]


def units() -> tuple[Unit, ...]:
    return Pool(fakes.shapes(HEADS)).units


def exact(cost: LayerCost) -> fakes.Exact:
    return fakes.Exact(lambda _block, gone: cost(gone))


@pytest.mark.parametrize("name", ["set-aware", "greedy", "lazy"])
def test_one_goes_for_nearly_nothing_and_the_other_stays(cost: LayerCost, name: str) -> None:
    made: dict[str, Criterion] = {
        "set-aware": SetAware({"a": cost}),
        "greedy": Greedy(exact(cost)),
        "lazy": Lazy(SetAware({"a": cost}), exact(cost), 3),
    }
    steps = list(removals(made[name], Pool(fakes.shapes(HEADS), per_layer=0)))
    first, second = steps[0], steps[1]
    assert first.unit.heads[0] in PAIR
    assert first.score < 0.01 * second.score
    other = PAIR[1] if first.unit.heads[0] == PAIR[0] else PAIR[0]
    place = [step.unit.heads[0] for step in steps].index(other)
    alone = {head: cost([PAIR[0], head]) for head in range(HEADS) if head != PAIR[0]}
    dearer = sum(alone[PAIR[1]] > value for head, value in alone.items() if head not in PAIR)
    assert place >= 1 + min(dearer, 2)


@pytest.mark.parametrize("name", ["leave-one-out", "michel", "fisher", "weight-norm"])
def test_one_shot_scores_see_two_equals(cost: LayerCost, name: str) -> None:
    """Both are ranked side by side: any budget that does not split the tie takes both or neither."""
    W = cost.W_O.reshape(HEADS, D_V, -1).copy()
    W[PAIR[1]] = W[PAIR[0]]
    twins = LayerCost(cost.covariance, W.reshape(HEADS * D_V, -1), HEADS, energy=10.0, repair="bias")
    made: dict[str, Criterion] = {
        "leave-one-out": LeaveOneOut(exact(twins), units()),
        "michel": Michel(exact(twins), units()),
        "fisher": Fisher(exact(twins), units()),
        "weight-norm": WeightNorm({"a": W}),
    }
    found = order(made[name])
    assert abs(found.index(PAIR[0]) - found.index(PAIR[1])) == 1


def test_leave_one_out_with_repair_takes_both_first(cost: LayerCost) -> None:
    """Each copy alone is free, so both lead the ranking, and the first budget of two heads loses the pair."""
    found = order(LeaveOneOut(exact(cost), units()))
    assert set(found[:2]) == set(PAIR)
    assert cost(found[:2]) > 20 * cost(order(SetAware({"a": cost}))[:2]) or cost(found[:2]) > 10 * cost([PAIR[0]])
    assert set(order(SetAware({"a": cost}))[:2]) != set(PAIR)

"""Pools, budgets, orders and searches, on fakes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import InputError, MeasureError
from headwise.plans import (
    BlockShape,
    Budget,
    Fisher,
    Greedy,
    Lazy,
    LeaveOneOut,
    Ledger,
    Michel,
    Pool,
    RandomOrder,
    SetAware,
    Unit,
    WeightNorm,
    choose,
    most_within,
    removals,
)
from tests.plans import fakes


class Given:
    """A criterion with a number for each head."""

    name, passes = "given", 0.0

    def __init__(self, scores: dict[tuple[str, int], float]) -> None:
        self._scores = scores

    def scores(self, removed: tuple[Unit, ...], candidates: Sequence[Unit]) -> list[float]:
        return [sum(self._scores[unit.block, head] for head in unit.heads) for unit in candidates]


def numbered(blocks: list[BlockShape]) -> Given:
    names = [(shape.block, head) for shape in blocks for head in range(shape.query_heads)]
    return Given({name: float(at) for at, name in enumerate(names)})


def chosen(blocks: list[BlockShape], budget: Budget, only: list[str] | None = None, **rules: object) -> list[str]:
    pool = Pool(blocks, blocks=only, **rules)  # type: ignore[arg-type]
    return [str(step.unit) for step in choose(numbered(blocks), pool, budget, Ledger(blocks, 1000))]


def test_keep_takes_the_nearest_number() -> None:
    assert chosen(fakes.shapes(3, 4), Budget(keep=0.6)) == ["a:0", "a:1", "b:0"]
    assert chosen(fakes.shapes(3, 4), Budget(keep=1.0)) == []
    assert len(chosen(fakes.shapes(12, 12, 12, 12, 12, 12), Budget(keep=0.6))) == 72 - 43


def test_every_layer_keeps_its_least_and_what_is_protected() -> None:
    assert chosen(fakes.shapes(3, 4), Budget(keep=0.5), per_layer=2) == ["a:0", "b:0", "b:1"]
    taken = chosen(fakes.shapes(3, 4), Budget(keep=0.6), protected={("a", 0), ("a", 1)}, per_layer=0)
    assert taken == ["a:2", "b:0", "b:1"]


def test_only_some_blocks() -> None:
    assert chosen(fakes.shapes(3, 4), Budget(keep=0.7), only=["b"]) == ["b:0", "b:1"]


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.integers(0, 2), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_pool_laws(counts: list[int], least: int, draw: object) -> None:
    """Whatever order: nothing goes twice, every layer keeps its least, and all that may go goes."""
    blocks = fakes.shapes(*counts)
    pool = Pool(blocks, per_layer=least)
    seed = draw.randrange(1000)  # type: ignore[attr-defined]
    gone = [step.unit for step in removals(RandomOrder(pool.units, seed), pool)]
    assert len(set(gone)) == len(gone)
    lost = Counter(unit.block for unit in gone)
    assert all(lost[shape.block] == max(0, shape.query_heads - least) for shape in blocks)


def test_uniform_counts_end_on_a_whole_round() -> None:
    taken = chosen(fakes.shapes(4, 4, 4), Budget(keep=0.7), uniform=True)
    assert Counter(name[0] for name in taken) == {"a": 1, "b": 1, "c": 1}
    blocks = [fakes.grouped("a", 2, 3), fakes.grouped("b", 2, 3)]
    taken = chosen(blocks, Budget(keep=0.6), uniform=True)
    assert taken == ["a:0", "a:3", "b:0", "b:3"]


def test_groups_go_whole() -> None:
    blocks = [fakes.grouped("a", 3, 2, per_head=5, per_kv=3, cache_per_kv=4.0)]
    assert chosen(blocks, Budget(keep=0.5), unit="group", per_layer=2) == ["a:0,1", "a:2,3"]
    assert chosen(blocks, Budget(cache_bytes=8), unit="group") == ["a:0,1"]
    with pytest.raises(InputError, match=r"cache_bytes=1 cannot be reached: .* 4 bytes per token are left"):
        chosen(blocks, Budget(cache_bytes=1), unit="group")


def test_parameters_and_seconds() -> None:
    blocks = [BlockShape("a", (0, 1), 10, 5, seconds=3.0), BlockShape("b", (0, 1), 100, 50, seconds=1.0)]
    ledger = Ledger(blocks, 1000, seconds=6.0)
    assert ledger.before.heads == 4
    assert ledger.after([Unit("a", (0,))]).parameters == 985
    assert ledger.after([Unit("a", (0,))]).seconds == 4.5
    even = Given(dict.fromkeys([("a", 0), ("a", 1), ("b", 0), ("b", 1)], 1.0))
    pool = Pool(blocks)
    by_size = [str(step.unit) for step in choose(even, pool, Budget(params=850), ledger)]
    by_time = [str(step.unit) for step in choose(even, pool, Budget(speed=1.3), ledger)]
    assert by_size == ["b:0"]  # equal costs: what saves most goes first
    assert by_time == ["a:0"]


def test_what_a_budget_refuses() -> None:
    for wrong, words in (
        ({}, "give one budget of keep, params, cache_bytes, speed, max_loss; none came"),
        ({"keep": 0.5, "params": 3}, "keep, params came"),
        ({"keep": 0.0}, r"keep must lie in \(0, 1\]"),
        ({"keep": 1.5}, r"keep must lie in \(0, 1\]"),
        ({"keep": 60}, "and is 60; 60 percent are 0.6"),
        ({"speed": 0.5}, "speed must be at least 1"),
        ({"max_loss": -1.0}, "max_loss must be at least 0"),
        ({"keep": float("nan")}, "keep must be a number, and is nan"),
        ({"params": True}, "params must be a number, and is True"),
    ):
        with pytest.raises(InputError, match=words):
            Budget(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="keeps nothing that goes with a head"):
        chosen(fakes.shapes(3), Budget(cache_bytes=1))
    with pytest.raises(InputError, match="there are none; give seconds"):
        chosen(fakes.shapes(3), Budget(speed=1.1))
    with pytest.raises(InputError, match=r"keep=0.1 cannot be reached: .* 3 of 9 heads are left .*at least 1 head\)"):
        chosen(fakes.shapes(3, 3, 3), Budget(keep=0.1))


def test_what_a_pool_refuses() -> None:
    for wrong, words in (
        ({"per_layer": -1}, "per_layer must be a whole number of heads"),
        ({"unit": "pair"}, "unit must be 'head' or 'group'"),
        ({"protected": {("a", 3)}}, "head 3 of a is protected, and the model has no such head"),
        ({"protected": {("z", 0)}}, "head 0 of z is protected"),
    ):
        with pytest.raises(InputError, match=words):
            Pool(fakes.shapes(3), **wrong)  # type: ignore[arg-type]


def test_nan_is_refused_by_name() -> None:
    blocks = fakes.shapes(2)
    with pytest.raises(MeasureError, match="the criterion given gives NaN for a:1"):
        list(removals(Given({("a", 0): 1.0, ("a", 1): math.nan}), Pool(blocks)))


def test_random_orders_differ_by_seed_and_not_by_run() -> None:
    pool = Pool(fakes.shapes(5, 7))
    orders = [[str(step.unit) for step in removals(RandomOrder(pool.units, seed), pool)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_weight_norm_is_the_norm() -> None:
    W = np.random.default_rng(0).normal(size=(3, 2, 5))
    scores = WeightNorm({"a": W}).scores((), Pool(fakes.shapes(3)).units)
    assert scores == pytest.approx([np.linalg.norm(W[head]) for head in range(3)])


def additive(block: str, gone: frozenset[int]) -> float:
    return sum(0.1 * head + (0.05 if block == "b" else 0.0) + 0.01 for head in gone)


def test_what_each_criterion_costs() -> None:
    pool = Pool(fakes.shapes(3, 4), per_layer=0)
    for made, count, expected in (
        (lambda exact: LeaveOneOut(exact, pool.units), 3, 7),
        (lambda exact: Greedy(exact), 3, 7 + 6 + 5),
        (lambda exact: Fisher(exact, pool.units), 3, 3),
        (lambda exact: Michel(exact, pool.units), 3, 3),
        (lambda exact: Michel(exact, pool.units, step=0.3), 5, 9),
    ):
        exact = fakes.Exact(additive)
        criterion = made(exact)
        steps = removals(criterion, pool)
        for _ in range(count):
            next(steps)
        assert criterion.passes == expected, criterion.name


def test_exact_criteria_agree_where_costs_add_up() -> None:
    pool = Pool(fakes.shapes(3, 4))
    orders = [
        [str(step.unit) for step in removals(made, pool)]
        for made in (LeaveOneOut(fakes.Exact(additive), pool.units), Greedy(fakes.Exact(additive)))
    ]
    assert orders[0] == orders[1]


def test_michel_is_normalised_by_layer() -> None:
    pool = Pool(fakes.shapes(2, 2))
    large = fakes.Exact(lambda block, gone: sum((100 if block == "b" else 1) * (3 + head) for head in gone))
    assert Michel(large, pool.units).scores((), pool.units) == pytest.approx([0.6, 0.8, 0.6, 0.8])
    assert Michel(large, pool.units, per_layer=False).scores((), pool.units) == [3, 4, 300, 400]


def test_lazy_runs_only_its_shortlist_and_takes_the_best_of_it() -> None:
    blocks = fakes.shapes(6)
    rough = numbered(blocks)
    exact = fakes.Exact(lambda _block, gone: sum(10.0 - head for head in gone))
    lazy = Lazy(rough, exact, width=3)
    order = [step.unit.heads[0] for step in removals(lazy, Pool(blocks))]
    assert order == [2, 3, 4, 5, 1]  # of the three with the lowest numbers the highest
    assert exact.asked == [3, 3, 3, 3, 2]
    with pytest.raises(InputError, match="width must be a whole number of heads, at least 1, and is 0"):
        Lazy(rough, exact, width=0)


def test_lazy_learns_what_the_costs_of_a_block_are_worth() -> None:
    """All heads of block b cost 100 times what the rough criterion says; all of a go before the second of b."""
    blocks = fakes.shapes(5, 5)
    rough = Given({(block.block, head): float(head + 1) for block in blocks for head in range(5)})
    exact = fakes.Exact(lambda block, gone: sum((100.0 if block == "b" else 1.0) * (head + 1) for head in gone))
    lazy = Lazy(rough, exact, width=1)
    order = [str(step.unit) for step in removals(lazy, Pool(blocks))]
    assert order == ["a:0", "a:1", "a:2", "a:3", "b:0", "b:1", "b:2", "b:3"]
    assert exact.asked == [2, 1, 1, 1, 1, 1, 1, 1]  # the cheapest of each block, then one
    assert lazy.worth("b") > 5 * lazy.worth("a")


def test_lazy_learns_nothing_from_units_that_cost_nothing() -> None:
    blocks = fakes.shapes(3, 3)
    lazy = Lazy(numbered(blocks), fakes.Exact(lambda _block, _gone: 0.0), width=2)
    assert len(list(removals(lazy, Pool(blocks)))) == 4
    assert lazy.worth("a") == lazy.worth("b") == 1.0


def test_set_aware_adds_up_to_the_cost_of_the_set() -> None:
    layers = {name: fakes.layer(fakes.moments(at, 4, 3), 4, energy=1.0 + at) for at, name in enumerate("ab")}
    criterion, pool = SetAware(layers), Pool(fakes.shapes(4, 4))
    steps = list(removals(criterion, pool))
    assert sum(step.score for step in steps) == pytest.approx(criterion.cost([step.unit for step in steps]))


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.3, 1.0, 5.0])
def test_a_loss_is_kept_on_both_halves(limit: float) -> None:
    pool = Pool(fakes.shapes(5, 6), per_layer=0)
    order = removals(RandomOrder(pool.units), pool)
    found = most_within(limit, order, pool, lambda gone: 0.1 * len(gone), lambda gone: 0.12 * len(gone))
    count = len(found.steps)
    assert 0.12 * count <= limit
    assert count == 11 or 0.12 * (count + 1) > limit


def test_a_loss_search_draws_no_more_than_it_needs() -> None:
    pool = Pool(fakes.shapes(64))
    drawn = []
    steps = (drawn.append(step) or step for step in removals(RandomOrder(pool.units), pool))  # type: ignore[func-returns-value]
    most_within(0.5, steps, pool, lambda gone: 0.1 * len(gone), lambda gone: 0.1 * len(gone))
    assert len(drawn) == 8

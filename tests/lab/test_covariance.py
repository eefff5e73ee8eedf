"""The closed form of what removing heads costs, against doing it."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.lab.covariance import RemovalCost

ROWS, HEADS, D_V, D_MODEL = 211, 5, 3, 17


@pytest.fixture
def z() -> Tensor:
    random = torch.Generator().manual_seed(0)
    mix = torch.randn(HEADS * D_V, HEADS * D_V, generator=random, dtype=torch.float64)
    raw = torch.randn(ROWS, HEADS * D_V, generator=random, dtype=torch.float64)
    return (raw @ mix + 2).unflatten(1, (HEADS, D_V))


@pytest.fixture
def output_weight() -> Tensor:
    return torch.randn(HEADS * D_V, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def refit(z: Tensor, W_O: Tensor, removed: tuple[int, ...]) -> float:
    """Least squares with an intercept, done with lstsq."""
    target = z.flatten(1) @ W_O
    kept = [head for head in range(HEADS) if head not in removed]
    design = torch.cat([z[:, kept].flatten(1), torch.ones(len(z), 1, dtype=z.dtype)], 1)
    left = target - design @ torch.linalg.lstsq(design, target).solution
    return float(left.square().sum() / (target - target.mean(0)).square().sum())


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_repaired_cost_is_that_of_a_refit(z: Tensor, output_weight: Tensor, count: int) -> None:
    cost = RemovalCost(z, output_weight)
    for removed in combinations(range(HEADS), count):
        assert cost(removed) == pytest.approx(refit(z, output_weight, removed), rel=1e-6)


def test_unrepaired_cost_is_that_of_the_mean_in_the_place_of_the_head(z: Tensor, output_weight: Tensor) -> None:
    cost = RemovalCost(z, output_weight, repaired=False)
    target = z.flatten(1) @ output_weight
    ablated = z.clone()
    ablated[:, [1, 3]] = z[:, [1, 3]].mean(0)
    left = (target - ablated.flatten(1) @ output_weight).square().sum()
    assert cost([1, 3]) == pytest.approx(float(left / (target - target.mean(0)).square().sum()), rel=1e-9)


def test_two_copies_are_each_free_and_together_dear(z: Tensor, output_weight: Tensor) -> None:
    z[:, 4] = z[:, 2]
    cost = RemovalCost(z, output_weight)
    assert cost([2]) < 1e-9
    assert cost([4]) < 1e-9
    assert cost([2, 4]) > 0.01
    assert cost.most_within(1e-6) == 1


def test_nothing_removed_costs_nothing_and_everything_costs_all(z: Tensor, output_weight: Tensor) -> None:
    cost = RemovalCost(z, output_weight)
    assert cost([]) == 0
    assert cost(range(HEADS)) == pytest.approx(1)


def test_the_best_set_is_no_dearer_than_the_greedy_one_and_repair_never_hurts(z: Tensor, output_weight: Tensor) -> None:
    cost, plain = RemovalCost(z, output_weight), RemovalCost(z, output_weight, repaired=False)
    for count in range(1, HEADS):
        best, greedy = cost.best(count), cost.greedy(count)
        assert len(set(greedy)) == count
        assert cost(best) <= cost(greedy) + 1e-12
        assert cost(best) <= plain(best)


def test_shapes_and_heads_are_checked(z: Tensor, output_weight: Tensor) -> None:
    with pytest.raises(InputError, match="W_O must have 5 x 3 = 15 rows, got 14"):
        RemovalCost(z, output_weight[1:])
    with pytest.raises(InputError, match=r"heads must lie in 0 to 4, got \[1, 5\]"):
        RemovalCost(z, output_weight)([5, 1])

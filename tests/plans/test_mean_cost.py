"""The closed form of running means against the repair that it prices, solved head set by head set."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from headwise.errors import InputError
from headwise.layout import Block
from headwise.plans import BlockShape, Budget, LayerCost, Ledger, RunningMeanCost, Unit
from headwise.plans.layer_cost import Repair
from headwise.surgery.repair import Moments, columns_of, loss, merged, solve

D_V, KV_MAP, WIDTH = 3, (0, 0, 1, 1, 1), 7


def moments() -> tuple[Moments, Any]:
    """Of five heads and two running means that are mixtures of the same few things; and W_O."""
    draw = torch.Generator().manual_seed(5)
    columns = (len(KV_MAP) + 2) * D_V
    rows = torch.randn(400, 13, generator=draw, dtype=torch.float64) @ torch.randn(
        13, columns, generator=draw, dtype=torch.float64
    )
    rows += 0.3 * torch.randn(400, columns, generator=draw, dtype=torch.float64) + 1.5
    weight = torch.randn(len(KV_MAP) * D_V, WIDTH, generator=draw, dtype=torch.float64)
    return Moments(rows.mean(0), torch.cov(rows.T, correction=0), 400), weight


def sets() -> list[tuple[int, ...]]:
    return [gone for size in range(1, 6) for gone in combinations(range(5), size)]


def repaired(gone: tuple[int, ...], method: str, ridge: float) -> tuple[float, float]:
    """The loss after the repair, and the penalty on how far the weights went, both of the layer's output."""
    found, weight = moments()
    block = Block("attn", 5, 2, D_V, D_V, KV_MAP)
    carriers = {}
    for kv in {KV_MAP[head] for head in gone}:
        members = tuple(head for head in gone if KV_MAP[head] == kv)
        carriers[members[0]] = members
    left = [head for head in range(5) if head not in gone or head in carriers]
    columns, start = columns_of(block, left, carriers), merged(block, left, carriers, weight)
    new, added = solve(found, weight, columns, method, ridge, start)
    whole = torch.cat([weight, weight.new_zeros(2 * D_V, WIDTH)])
    energy = float((whole * (found.covariance @ whole)).sum())
    lost = loss(found, weight, columns, new, added) * energy
    second = found.covariance + (torch.outer(found.mean, found.mean) if method == "least_squares_no_bias" else 0)
    pull = ridge * float(second.diagonal().mean())
    return lost, pull * float((new - start).square().sum())


@pytest.mark.parametrize(
    ("repair", "ridge"),
    [("least_squares", 1e-2), ("least_squares", 0.0), ("bias", 0.0), ("least_squares_no_bias", 1e-2)],
)
def test_it_is_what_the_repair_leaves(repair: Repair, ridge: float) -> None:
    found, weight = moments()
    options: dict[str, Any] = {"repair": repair, "ridge": ridge, "mean": found.mean.numpy()}
    cost = RunningMeanCost(found.covariance.numpy(), weight.numpy(), KV_MAP, **options)
    for gone in sets():
        lost, penalty = repaired(gone, repair, ridge)
        assert cost(gone) == pytest.approx(lost + penalty, rel=1e-6, abs=1e-7 * cost((0, 1, 2, 3, 4)))


def test_without_repair_means_count() -> None:
    found, weight = moments()
    options: dict[str, Any] = {"repair": "none", "mean": found.mean.numpy()}
    cost = RunningMeanCost(found.covariance.numpy(), weight.numpy(), KV_MAP, **options)
    for gone in sets():
        change = torch.cat([weight, weight.new_zeros(2 * D_V, WIDTH)])
        for head in range(5):
            part = slice(head * D_V, (head + 1) * D_V)
            if head in gone:
                mean = (5 + KV_MAP[head]) * D_V
                change[mean : mean + D_V] -= weight[part]
            else:
                change[part] = 0
        moment = found.covariance + torch.outer(found.mean, found.mean)
        assert cost(gone) == pytest.approx(float((change * (moment @ change)).sum()), rel=1e-9)


def test_with_least_squares_it_is_never_dearer_than_nothing() -> None:
    """What is left may use the running means as well; and it gains where they say something."""
    found, weight = moments()
    plain = LayerCost(found.covariance[:15, :15].numpy(), weight.numpy(), 5, ridge=1e-12)
    cost = RunningMeanCost(found.covariance.numpy(), weight.numpy(), KV_MAP, ridge=1e-12)
    assert all(cost(gone) <= plain(gone) * (1 + 1e-6) for gone in sets())
    assert cost((0, 1)) < 0.9 * plain((0, 1))


def test_heads_that_do_not_exist() -> None:
    found, weight = moments()
    cost = RunningMeanCost(found.covariance.numpy(), weight.numpy(), KV_MAP)
    with pytest.raises(InputError, match=r"heads must lie in 0 to 4, got \[5\]"):
        cost([5])
    assert cost([]) == 0
    assert np.isfinite(cost([0, 1, 2, 3, 4]))


def test_the_ledger_keeps_one_head_of_every_group() -> None:
    shapes = [BlockShape("a", KV_MAP, per_head=10, per_kv=4, intercept=2, cache_per_kv=8.0)]
    ledger = Ledger(shapes, 1000, running=True)
    gone = [Unit("a", (0, 1)), Unit("a", (2,))]
    left = ledger.after(gone)
    assert (left.heads, left.parameters, left.cache_bytes) == (2, 1000 - 10 + 2, 16.0)
    assert ledger.carriers(gone) == 2
    assert Budget(keep=0.4).saving(ledger, Unit("a", (2,))) == 1
    assert Budget(params=900).saving(ledger, Unit("a", (2,))) == -2

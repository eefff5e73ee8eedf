"""Two copies of one head in a tiny model: who sees that one is free, and that the other is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwise.models import Model, wrap
from headwise.plans import Budget, Step, removals
from headwise.verbs.choosing import Asked, criterion_of
from headwise.verbs.plan import Work
from headwise.verbs.prepared import Source
from tests.measures import tiny

PAIR, BLOCK = (0, 2), "encoder.layer.1.attention.self"
INPUTS = tiny.ids(*(9 + at % 7 for at in range(40)))


@pytest.fixture(scope="module")
def model() -> Model:
    """A BERT whose heads 0 and 2 of layer 1 are one head, twice."""
    module: Any = tiny.bert()
    layer, (one, two), width = module.encoder.layer[1].attention, PAIR, 6
    with torch.no_grad():
        for part in (layer.self.query, layer.self.key, layer.self.value):
            part.weight[two * width : (two + 1) * width] = part.weight[one * width : (one + 1) * width]
            part.bias[two * width : (two + 1) * width] = part.bias[one * width : (one + 1) * width]
        weight = layer.output.dense.weight
        weight[:, two * width : (two + 1) * width] = weight[:, one * width : (one + 1) * width]
    return wrap(module)


def order(model: Model, criterion: str, repair: Any = "least_squares") -> list[Step]:
    asked = Asked(criterion=criterion, repair=repair, sample=10**6)
    work = Work.open(model, Source(inputs=INPUTS), {}, asked, Budget(keep=0.5))
    pool, _ = asked.pool(model, "head")
    return list(removals(criterion_of(criterion, work.tools(pool)), pool))


def places(steps: list[Step]) -> list[int]:
    named = [(step.unit.block, step.unit.heads[0]) for step in steps]
    return [named.index((BLOCK, head)) if (BLOCK, head) in named else len(named) for head in PAIR]


@pytest.mark.parametrize("criterion", ["set-aware", "greedy", "lazy"])
def test_one_goes_for_nearly_nothing_and_the_other_is_held(model: Model, criterion: str) -> None:
    steps = order(model, criterion)
    first, second = sorted(places(steps))
    assert first == 0
    assert abs(steps[0].score) < 0.02 * steps[1].score
    assert second > 1


@pytest.mark.parametrize("criterion", ["michel", "fisher", "weight-norm", "leave-one-out"])
def test_scores_of_single_heads_take_both_or_neither(model: Model, criterion: str) -> None:
    repair = "none" if criterion == "leave-one-out" else "least_squares"
    steps = order(model, criterion, repair)
    first, second = sorted(places(steps))
    assert second == first + 1
    if second < len(steps):
        assert steps[second].score == pytest.approx(steps[first].score, rel=1e-3)


def test_a_ranking_that_knows_the_repair_throws_the_pair_away(model: Model) -> None:
    """Each copy alone is free, so both come first; of the two, the second is dear."""
    assert sorted(places(order(model, "leave-one-out"))) == [0, 1]

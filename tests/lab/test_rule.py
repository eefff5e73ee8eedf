"""Verdicts from rules, and the numbers that they are made of."""

from __future__ import annotations

import math

import pytest

from headwise.errors import InputError
from headwise.lab import Quantity, Rule, Threshold, Verdict

STATED = Threshold("far", "min", ">=", 1.0, "it is far")
CONDITIONED = Threshold("near", "max", "<=", 1.0, "it is near")
RULE = Rule((STATED,), (CONDITIONED,), "the moon is full")


def judge(rule: Rule, **values: tuple[float, ...]) -> Verdict:
    return rule.judge({name: Quantity(name, each) for name, each in values.items()})[0]


@pytest.mark.parametrize(
    ("far", "near", "verdict"),
    [
        ((2.0, 1.0), (0.0, 1.0), Verdict.HOLDS),
        ((2.0, 0.9), (0.0, 1.0), Verdict.CONDITION),
        ((2.0, 1.0), (0.0, 1.1), Verdict.FAILS),
        ((0.0, 0.0), (2.0, 2.0), Verdict.FAILS),
    ],
)
def test_the_three_verdicts(far: tuple[float, ...], near: tuple[float, ...], verdict: Verdict) -> None:
    assert judge(RULE, far=far, near=near) is verdict


def test_without_a_condition_a_broken_threshold_refutes() -> None:
    assert judge(Rule((STATED,)), far=(0.5,)) is Verdict.FAILS


def test_a_value_that_is_no_number_keeps_no_bound() -> None:
    assert judge(Rule((STATED,)), far=(2.0, math.nan)) is Verdict.FAILS
    assert judge(Rule((CONDITIONED,)), near=(math.nan,)) is Verdict.FAILS


def test_mean_smallest_and_largest_are_told_apart() -> None:
    quantity = Quantity("x", (1.0, 2.0, 6.0))
    assert [quantity.over(which) for which in ("mean", "median", "min", "max")] == [3.0, 2.0, 1.0, 6.0]
    assert quantity.spread == pytest.approx(math.sqrt(14 / 3))


def test_checks_say_what_was_compared() -> None:
    _, (stated,), (conditioned,) = RULE.judge({"far": Quantity("far", (3.0, 0.5)), "near": Quantity("near", (0.25,))})
    assert (stated.value, stated.kept) == (0.5, False)
    assert (conditioned.value, conditioned.kept) == (0.25, True)
    assert stated.threshold.text() == "smallest `far` >= 1"


def test_a_rule_that_names_what_was_not_measured_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs the quantity 'far', which was not measured; measured: \['near'\]"):
        judge(Rule((STATED,)), near=(1.0,))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rule(()), "at least one threshold"),
        (lambda: Rule((STATED,), (CONDITIONED,)), "come together"),
        (lambda: Rule((STATED,), (), "the moon is full"), "come together"),
        (lambda: Quantity("x", ()), "'x' has no values"),
    ],
)
def test_half_a_rule_is_refused(build: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()  # type: ignore[operator]

"""The conformance suite: every measure passes it, and every broken one is caught by the check that it breaks."""

from __future__ import annotations

from typing import Any

import pytest

import headwise as hw
from headwise.errors import InputError, MeasureError
from headwise.heads import HeadTable
from headwise.measures import MEASURES, check_measure
from headwise.measures.conformance import CHECKS
from headwise.verbs import importance
from tests.measures.broken import ZOO, Rolls, Silent

#: enough to notice that a measure is broken at all; the whole suite over every measure is slow
QUICK = ("range", "padding", "heads")


@pytest.mark.parametrize("name", MEASURES)
def test_measures_conform(name: str) -> None:
    check_measure(MEASURES[name], only=QUICK, on=["causal"])
    check_measure(MEASURES[name], only=["range"], on=["encoder-decoder"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES)
def test_measures_conform_in_everything(name: str) -> None:
    assert check_measure(MEASURES[name]).passed == tuple(CHECKS)


def gradients(model: hw.Model, inputs: Any, batch_size: int = 8) -> HeadTable:
    return importance(model, inputs=inputs, batch_size=batch_size)


def ablations(model: hw.Model, inputs: Any, batch_size: int = 8) -> HeadTable:
    return importance(model, inputs=inputs, batch_size=batch_size, method=["zero", "mean", "resample"])


@pytest.mark.parametrize("check", CHECKS)
def test_gradients_conform(check: str) -> None:
    """Cases 21 (batching), 25 (passive) and 26 (gate) among them."""
    check_measure(gradients, only=[check], on=["causal", "bidirectional"], close=1e-4)


@pytest.mark.slow
def test_ablations_conform() -> None:
    assert check_measure(ablations, close=5e-4).passed == tuple(CHECKS)


@pytest.mark.parametrize("check", ["padding", "gate"])
def test_ablations_conform_quickly(check: str) -> None:
    check_measure(ablations, only=[check], on=["causal"], close=5e-4)


@pytest.mark.parametrize("name", ZOO)
def test_every_broken_measure_is_caught(name: str) -> None:
    measure, by = ZOO[name]
    only = [check for check in CHECKS if check in by] or ["range"]
    found = check_measure(measure, only=only, on=["causal"], refuse=False)
    assert found.failed & by, str(found)


def test_every_check_can_fail() -> None:
    caught = frozenset().union(*(by for _, by in ZOO.values()))
    assert set(CHECKS) - caught == {"splitting", "gate"}


def sums_of_parts(model: hw.Model, inputs: Any, batch_size: int = 8) -> HeadTable:
    """A number of the whole that claims to be a mean of rows: merging makes it another."""
    from headwise.heads import MeasureInfo, Moments

    plain = hw.scan(model, inputs=inputs, batch_size=batch_size, measures=["entropy"])
    rows = plain.count("entropy")
    info = MeasureInfo("total", "nats", description="Wrong on purpose.")
    values = Moments(rows, plain["entropy"] * rows, [0.0] * len(rows))
    parts = [str(rows.sum())]
    return HeadTable.build(plain.layout, {"total": info}, {("total", "token"): values}, model=model.name, parts=parts)


def behind_the_gate(model: hw.Model, inputs: Any, batch_size: int = 8) -> HeadTable:
    """Case 26: a measurement that runs a copy of the model, which no gate reaches."""
    import copy

    twin = hw.wrap(copy.deepcopy(model.module), name=model.name)
    twin.module.config._attn_implementation = "eager"
    return hw.scan(twin, inputs=inputs, batch_size=batch_size, measures=["entropy"])


def test_splitting_and_gates_are_checked() -> None:
    assert "splitting" in check_measure(sums_of_parts, only=["splitting"], on=["causal"], refuse=False).failed
    assert "gate" in check_measure(behind_the_gate, only=["gate"], on=["causal"], refuse=False).failed


def test_failures_are_all_said() -> None:
    with pytest.raises(MeasureError) as caught:
        check_measure(Rolls(), only=["determinism", "range"])
    assert "broken: 1 of 2 checks passed" in str(caught.value)
    assert "determinism: on a causal model" in str(caught.value)
    found = check_measure(Silent(), only=["range"], refuse=False)
    assert found.failed == {"description"}
    assert found.passed == ("range",)
    assert "it has no description" in str(found)


@pytest.mark.parametrize(
    ("measure", "only", "words"),
    [
        (3, None, "takes a measure or a function, and got a int"),
        (Rolls, None, "got the class Rolls; give an instance"),
        (Rolls(), ["rang"], "there is no check 'rang'; there are determinism, range"),
    ],
)
def test_refusals(measure: Any, only: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_measure(measure, only=only)
    assert words in str(caught.value)

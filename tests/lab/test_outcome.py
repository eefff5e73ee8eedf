"""Outcomes as they are saved."""

from __future__ import annotations

import json
import math

import pytest

from headwise.errors import RunError
from headwise.lab import Check, Outcome, Quantity, Threshold, Verdict


def outcome(value: float = 0.5) -> Outcome:
    check = Check(Threshold("far", "min", ">=", 1.0, "it is far"), value, kept=False)
    return Outcome(
        name="rank",
        seed=7,
        size="full",
        verdict=Verdict.FAILS,
        quantities={"far": Quantity("far", (value, 2.0), "m", "how far")},
        stated=(check,),
        conditioned=(),
        headline="0.5 m",
        finding="It is not far.",
        series={"x": [1, 2], "y": [0.123456789, math.inf]},
        seconds=1.25,
    )


def test_saved_and_read_it_is_the_same() -> None:
    first = outcome()
    saved = json.loads(json.dumps(first.to_dict(), allow_nan=False))
    again = Outcome.from_dict(saved)
    assert again.to_dict() == saved
    assert again.quantities == first.quantities
    assert again.stated == first.stated
    assert again.verdict is Verdict.FAILS


def test_numbers_that_json_has_no_word_for_become_null() -> None:
    saved = outcome(math.nan).to_dict()
    assert saved["stated"][0]["value"] is None
    assert saved["quantities"]["far"]["values"] == [None, 2.0]
    assert saved["series"]["y"] == [0.12346, None]
    assert math.isnan(Outcome.from_dict(saved).stated[0].value)


@pytest.mark.parametrize("field", ["name", "verdict", "headline", "quantities", "stated", "series"])
def test_a_missing_field_is_refused(field: str) -> None:
    saved = outcome().to_dict()
    del saved[field]
    with pytest.raises(RunError, match=rf"cannot be read \(KeyError\('{field}'\)\); run the experiment again"):
        Outcome.from_dict(saved)


@pytest.mark.parametrize(("field", "value"), [("verdict", "perhaps"), ("quantities", [1]), ("stated", 3)])
def test_a_field_of_the_wrong_kind_is_refused(field: str, value: object) -> None:
    with pytest.raises(RunError, match="cannot be read"):
        Outcome.from_dict({**outcome().to_dict(), field: value})

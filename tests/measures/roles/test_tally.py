"""The bootstrap's sums wait for several passages; what comes out is as if each had been drawn at once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headwise.measures.roles.tally import STATISTICS, Draws, Sums, Tally

HEADS = 3


def sums(labels: tuple[str, ...], chance: np.random.Generator, passages: int = 2) -> Sums:
    values = chance.integers(1, 9, (passages, len(labels), len(STATISTICS), HEADS)).astype(np.float64)
    return Sums(labels, values, [Counter() for _ in labels], np.zeros(len(labels), np.int64))


@pytest.mark.parametrize("calls", [1, 5, 40])
def test_waiting_changes_no_interval(calls: int) -> None:
    """Parts that come later, calls without a row of a part, and more passages than wait at once."""
    chance, draws = np.random.default_rng(7), Draws(11, 23)
    tally = Tally(HEADS, 23)
    expected = {label: np.zeros((23, 3, HEADS)) for label in ("", "a", "b")}
    for call in range(calls):
        labels = ("", "a") if call % 3 else ("b", "")
        one, weights = sums(labels, chance), draws.of([2 * call, 2 * call + 1])
        tally.add(one, weights)
        for at, label in enumerate(labels):
            expected[label] += np.einsum("rp,psh->rsh", weights, one.values[:, at, :3])
    for label in tally.labels:
        part = tally.part(label)
        np.testing.assert_array_equal(part.drawn, expected[label])  # whole numbers: exact in float32
        low, high = part.interval("score", 0.9)
        assert (low < high).all()


def test_one_passage_has_no_interval() -> None:
    tally = Tally(HEADS, 23)
    tally.add(sums(("",), np.random.default_rng(3), passages=1), Draws(11, 23).of([0]))
    assert np.isnan(tally.part("").interval("share", 0.95)).all()


def test_the_best_fixed_rule() -> None:
    """Most rows first; of equal ones the nearest offset, and the first key before offset -2."""
    tally = Tally(HEADS, 2)
    found = sums(("",), np.random.default_rng(3))
    found.values[:, :, 0] = 10.0
    rules: Counter[int | str] = Counter({-3: 6, "first key": 6, -2: 6, -1: 4, 5: 2})
    tally.add(Sums(("",), found.values, [rules], found.hidden), Draws(11, 2).of([0, 1]))
    part = tally.part("")
    assert part.fixed() == ("first key", 6 / 20)
    assert part.fixed("first key") == (-2, 6 / 20)


def test_counts_of_fixed_rules_are_not_changed_behind_the_caller() -> None:
    """One object of counts goes to many sites; each site's sums are its own."""
    rules: Counter[int | str] = Counter({-1: 3})
    one = sums(("",), np.random.default_rng(3))
    one = Sums(one.labels, one.values, [rules], one.hidden)
    first, second = Tally(HEADS, 2), Tally(HEADS, 2)
    for tally, times in ((first, 3), (second, 1)):
        for call in range(times):
            tally.add(one, Draws(11, 2).of([call, call + 1]))
    assert (rules[-1], first.part("").rules[-1], second.part("").rules[-1]) == (3, 9, 3)

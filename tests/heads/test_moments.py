"""Moments: the definition, and merging without loss whatever the split and the order."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import InputError
from headwise.heads import Moments


def truth(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and m2 over rows, summed without rounding."""
    mean = np.array([math.fsum(column) / len(column) for column in rows.T])
    m2 = np.array([math.fsum((x - m) ** 2 for x in column) for column, m in zip(rows.T, mean, strict=True)])
    return mean, m2


def test_definition_by_hand() -> None:
    moments = Moments.of([[1.0, 5.0], [2.0, 5.0], [6.0, 5.0]])
    assert moments.count.tolist() == [3, 3]
    assert moments.mean.tolist() == [3.0, 5.0]
    assert moments.m2.tolist() == [14.0, 0.0]
    assert moments.std.tolist() == [math.sqrt(14 / 3), 0.0]


def test_where_leaves_rows_out_per_head() -> None:
    moments = Moments.of([[1.0, np.nan], [3.0, 7.0], [np.inf, 9.0]], [[True, False], [True, True], [False, True]])
    assert moments == Moments.of([[1.0, 7.0], [3.0, 9.0]])


def test_no_rows_is_missing_and_not_zero() -> None:
    moments = Moments([0, 2], [0.0, 1.0], [0.0, 0.5])
    assert np.isnan(moments.mean).tolist() == [True, False]
    assert np.isnan(moments.std).tolist() == [True, False]
    assert np.isnan(moments.m2).tolist() == [True, False]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_merge_is_the_whole_whatever_split_and_order(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    rows = data.draw(st.integers(1, 307))
    offset, spread = data.draw(st.sampled_from([(0.0, 1.0), (3.0, 1.0), (-40.0, 7.0), (1e-9, 1e-9), (1e12, 1e11)]))
    values = offset + spread * random.standard_normal((rows, 3))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=40)))
    parts = np.split(values, cuts)
    pieces = [Moments.of(part) if len(part) else Moments.empty(3) for part in parts]
    random.shuffle(pieces)
    while len(pieces) > 1:  # in a random tree
        at = int(random.integers(len(pieces) - 1))
        pieces[at : at + 2] = [pieces[at].merge(pieces[at + 1])]
    mean, m2 = truth(values)
    assert pieces[0].count.tolist() == [rows] * 3
    np.testing.assert_allclose(pieces[0].mean, mean, rtol=0, atol=1e-12 * np.abs(values).max())
    np.testing.assert_allclose(pieces[0].m2, m2, rtol=1e-12, atol=1e-12 * rows * spread**2 if rows > 1 else 0)


def test_merging_row_by_row_stays_exact() -> None:
    values = 2.5 + np.random.default_rng(5).standard_normal((3001, 2))
    whole = Moments.empty(2)
    for row in values:
        whole = whole.merge(Moments.of(row[None]))
    mean, m2 = truth(values)
    np.testing.assert_allclose(whole.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(whole.m2, m2, rtol=1e-12)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_merge_commutes_to_the_last_bit(seed: int) -> None:
    random = np.random.default_rng(seed)
    a = Moments(random.integers(0, 4, 17), random.standard_normal(17), random.random(17))
    b = Moments(random.integers(0, 4, 17), random.standard_normal(17), random.random(17))
    assert a.merge(b) == b.merge(a)


def test_merging_equal_means_keeps_the_mean_exactly() -> None:
    third = Moments([3], [1 / 3], [0.0])
    merged = third.merge(Moments([7], [1 / 3], [0.0]))
    assert merged.mean[0] == 1 / 3
    assert merged.m2[0] == 0.0


def test_merging_with_nothing_changes_nothing() -> None:
    some = Moments.of([[0.1, 0.2], [0.3, 0.4]])
    assert some.merge(Moments.empty(2)) == some
    assert Moments.empty(2).merge(some) == some
    assert Moments.empty(2).merge(Moments.empty(2)) == Moments.empty(2)


def test_values_that_are_not_finite_stay_visible() -> None:
    odd = Moments.of([[np.inf, np.nan], [1.0, 1.0]])
    assert odd.mean[0] == np.inf
    assert np.isnan(odd.mean[1])
    merged = odd.merge(Moments.of([[1.0, 1.0]]))
    assert merged.count.tolist() == [3, 3]
    assert not np.isfinite(merged.mean).any()


def test_arrays_are_copies_and_read_only() -> None:
    mean = np.array([1.0])
    moments = Moments([1], mean, [0.0])
    mean[0] = 9.0
    assert moments.mean[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        moments.mean[0] = 2.0


def test_survives_copying_and_pickling() -> None:
    moments = Moments.of([[1.0, 2.0], [2.0, 4.0]])
    for other in (copy.copy(moments), copy.deepcopy(moments), pickle.loads(pickle.dumps(moments))):
        assert other == moments
        with pytest.raises(ValueError, match="read-only"):
            other.mean[0] = 2.0
    assert moments != Moments.of([[1.0, 2.0], [2.0, 4.5]])
    assert moments != 3


@pytest.mark.parametrize(
    ("count", "mean", "m2", "words"),
    [
        ([-1], [0.0], [0.0], "between 0 and"),
        ([2**53], [0.0], [0.0], "between 0 and"),
        ([1.5], [0.0], [0.0], "whole numbers"),
        ([np.nan], [0.0], [0.0], "whole numbers"),
        ([True], [0.0], [0.0], "whole numbers"),
        (["a"], [0.0], [0.0], "whole numbers"),
        ([[1]], [0.0], [0.0], "one axis"),
        ([1], [0.0, 1.0], [0.0], r"mean has shape \(2,\) and count \(1,\)"),
        ([1], [0.0], [[0.0]], r"m2 has shape"),
        ([1, 1], [0.0, 0.0], [0.0, -1e-9], "m2 must not be negative.* at position 1"),
    ],
)
def test_refusals(count: list, mean: list, m2: list, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Moments(count, mean, m2)


def test_refusals_of_merge_and_of() -> None:
    with pytest.raises(InputError, match="over 2 heads cannot be merged with moments over 1"):
        Moments.empty(2).merge(Moments.empty(1))
    with pytest.raises(InputError, match="would pass 9007199254740991"):
        Moments([2**53 - 1], [0.0], [0.0]).merge(Moments([1], [0.0], [0.0]))
    with pytest.raises(InputError, match=r"two axes \(rows, heads\)"):
        Moments.of([1.0, 2.0])

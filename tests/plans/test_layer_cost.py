"""The closed form against plain regression, its ridge, its repairs, and what it refuses."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from headwise.errors import InputError, MeasureError
from headwise.plans import LayerCost
from tests.plans import fakes

HEADS, D_V = 5, 3


@pytest.fixture(scope="module")
def z() -> fakes.Array:
    return fakes.moments(0, HEADS, D_V) + 0.7


def weight(width: int = 11) -> fakes.Array:
    return np.random.default_rng(1).normal(size=(HEADS * D_V, width))


def regression(z: fakes.Array, W: fakes.Array, gone: tuple[int, ...], *, intercept: bool = True) -> float:
    """Mean squared error of the best read-out of z W from the kept heads, with an intercept or without."""
    kept = [head * D_V + at for head in range(HEADS) if head not in gone for at in range(D_V)]
    design = np.concatenate([z[:, kept], np.ones((len(z), int(intercept)))], 1)
    target = z @ W
    residual = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return float((residual**2).sum(1).mean())


@pytest.mark.parametrize("gone", [(0,), (4,), (1, 3), (0, 1, 2), (0, 1, 2, 3, 4)])
def test_it_is_the_error_of_the_best_read_out(z: fakes.Array, gone: tuple[int, ...]) -> None:
    expected = regression(z, weight(), gone)
    assert fakes.layer(z, HEADS, ridge=0)(gone) == pytest.approx(expected, rel=1e-8)
    assert fakes.layer(z, HEADS, ridge=1e-9)(gone) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gone", [(0,), (1, 3), (0, 1, 2), (0, 1, 2, 3, 4)])
def test_without_an_intercept_the_means_are_read_out_as_well(z: fakes.Array, gone: tuple[int, ...]) -> None:
    expected = regression(z, weight(), gone, intercept=False)
    assert expected > regression(z, weight(), gone)
    for ridge, rel in ((0, 1e-8), (1e-9, 1e-5)):
        cost = fakes.layer(z, HEADS, ridge=ridge, repair="least_squares_no_bias")
        assert cost(gone) == pytest.approx(expected, rel=rel)


def test_the_other_repairs(z: fakes.Array) -> None:
    W, gone = weight(), [2 * D_V + at for at in range(D_V)]
    lost = z[:, gone] @ W[gone]
    assert fakes.layer(z, HEADS, repair="none")([2]) == pytest.approx((lost**2).sum(1).mean())
    assert fakes.layer(z, HEADS, repair="bias")([2]) == pytest.approx(((lost - lost.mean(0)) ** 2).sum(1).mean())


def test_less_is_lost_the_more_is_repaired_and_the_fewer_go(z: fakes.Array) -> None:
    none, bias, squares = (fakes.layer(z, HEADS, repair=repair) for repair in ("none", "bias", "least_squares"))
    for gone in combinations(range(HEADS), 2):
        assert squares(gone) <= bias(gone) <= none(gone)
        assert squares(gone) >= max(squares([head]) for head in gone)


def test_costs_are_shares_of_the_energy(z: fakes.Array) -> None:
    assert fakes.layer(z, HEADS, energy=50.0)([1]) == pytest.approx(fakes.layer(z, HEADS)([1]) / 50)


def test_of_two_copies_each_is_free_and_both_are_dear() -> None:
    z = fakes.moments(3, HEADS, D_V, copies=(1, 4))
    cost = fakes.layer(z, HEADS)
    others = [cost([head]) for head in (0, 2, 3)]
    assert max(cost([1]), cost([4])) < 2e-3 * min(others)
    assert cost([1, 4]) > 0.5 * min(others)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"heads": 4}, InputError, "do not fit 4 heads"),
        ({"W_O": np.ones((3, 2))}, InputError, r"covariance of shape \(15, 15\) and W_O of shape \(3, 2\)"),
        (
            {"repair": "magic"},
            InputError,
            "repair must be one of none, bias, least_squares, least_squares_no_bias",
        ),
        ({"energy": float("nan")}, MeasureError, "layer 7: the energy holds values that are not finite"),
        ({"energy": 0.0}, MeasureError, "layer 7: the residual stream at its input has the energy 0.0"),
        ({"covariance": np.full((15, 15), np.nan)}, MeasureError, "the covariance holds values that are not finite"),
        ({"mean": np.full(15, np.inf), "repair": "none"}, MeasureError, "the mean holds values that are not finite"),
    ],
)
def test_refusals(changes: dict[str, object], error: type[Exception], words: str) -> None:
    given = {"covariance": np.eye(15), "W_O": np.ones((15, 2)), "heads": 5, "name": "layer 7", **changes}
    with pytest.raises(error, match=words):
        LayerCost(**given)  # type: ignore[arg-type]


def test_a_head_that_is_not_there(z: fakes.Array) -> None:
    with pytest.raises(InputError, match=r"heads must lie in 0 to 4, got \[5\]"):
        fakes.layer(z, HEADS)([5])

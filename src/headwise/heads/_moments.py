"""Count, mean and sum of squared deviations, per head, that merge without loss.

The merging rule is that of Chan, Golub and LeVeque (1979), *Updating formulae and a pairwise
algorithm for computing sample variances*, Stanford STAN-CS-79-773, equation 2.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headwise.errors import InputError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_MOST = 2**53 - 1
"""Counts above this could lose ones in a float64 and in the JSON readers of other languages."""


class Moments:
    """Number of rows, their mean, and the sum of squared deviations from it, over heads.

    Args:
        count: (heads,) whole numbers, at least 0.
        mean: (heads,) float64.
        m2: (heads,) float64, at least 0: the sum over rows of (value - mean)**2.

    Where ``count`` is 0 the mean and m2 are NaN whatever came in: no rows is *missing*, not 0.
    The arrays are copies and cannot be written to.

    Raises:
        InputError: shapes differ, a count is negative or not whole, or m2 is negative.

    >>> a = Moments.of([[1.0], [2.0]])
    >>> b = Moments.of([[6.0]])
    >>> whole = a.merge(b)
    >>> int(whole.count[0]), float(whole.mean[0]), float(whole.m2[0])
    (3, 3.0, 14.0)
    """

    __slots__ = ("count", "m2", "mean")

    count: Counts
    mean: Floats
    m2: Floats

    def __init__(self, count: npt.ArrayLike, mean: npt.ArrayLike, m2: npt.ArrayLike) -> None:
        counts = _counts(count)
        means = _floats("mean", mean, counts)
        squares = _floats("m2", m2, counts)
        empty = counts == 0
        means[empty] = np.nan
        squares[empty] = np.nan
        if np.any(squares < 0):
            where = int(np.flatnonzero(squares < 0)[0])
            raise InputError(f"m2 must not be negative: a sum of squares; it is {squares[where]} at position {where}")
        for array in (counts, means, squares):
            array.setflags(write=False)
        self.count, self.mean, self.m2 = counts, means, squares

    @classmethod
    def empty(cls, heads: int) -> Moments:
        """No rows yet, for so many heads."""
        return cls(np.zeros(heads, np.int64), np.full(heads, np.nan), np.full(heads, np.nan))

    @classmethod
    def of(cls, values: npt.ArrayLike, where: npt.ArrayLike | None = None) -> Moments:
        """The moments of ``values`` (rows, heads); ``where`` (rows, heads) or (rows, 1) says which count."""
        table = np.asarray(values, np.float64)
        if table.ndim != 2:
            raise InputError(f"values must have two axes (rows, heads), not shape {table.shape}")
        keep = np.broadcast_to(True if where is None else np.asarray(where, bool), table.shape)
        count = keep.sum(0)
        with np.errstate(invalid="ignore", over="ignore"):
            safe = np.maximum(count, 1)
            first = np.where(keep, table, 0.0).sum(0) / safe
            mean = first + np.where(keep, table - first, 0.0).sum(0) / safe
            mean = np.where(np.isfinite(first), mean, first)
            m2 = np.square(np.where(keep, table - mean, 0.0)).sum(0)
        return cls(count, mean, m2)

    @property
    def std(self) -> Floats:
        """Population standard deviation over rows, (heads,); NaN where there are no rows."""
        with np.errstate(invalid="ignore"):
            out: Floats = np.sqrt(self.m2 / np.maximum(self.count, 1))
        return out

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of rows together; the order of the two does not matter, to the last bit."""
        if len(self) != len(other):
            raise InputError(f"moments over {len(self)} heads cannot be merged with moments over {len(other)}")
        if np.any(self.count > _MOST - other.count):
            raise InputError(f"the merged number of rows would pass {_MOST}")
        # The part with more rows is the base; of equal parts the one with the smaller mean. Symmetric, and
        # exact where the means are equal.
        first = (self.count > other.count) | ((self.count == other.count) & ~(self.mean > other.mean))
        n_a, n_b = np.where(first, self.count, other.count), np.where(first, other.count, self.count)
        mean_a, mean_b = np.where(first, self.mean, other.mean), np.where(first, other.mean, self.mean)
        total = n_a + n_b
        share = n_b / np.maximum(total, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            delta = mean_b - mean_a
            mean = mean_a + delta * share
            m2 = (self.m2 + other.m2) + delta * (delta * share) * n_a
        alone = n_b == 0
        mean = np.where(alone, mean_a, mean)
        m2 = np.where(alone, np.where(first, self.m2, other.m2), m2)
        return Moments(total, mean, m2)

    def take(self, index: npt.ArrayLike) -> Moments:
        """The moments of the heads at ``index``, in that order."""
        at = np.asarray(index, np.int64)
        return Moments(self.count[at], self.mean[at], self.m2[at])

    def __len__(self) -> int:
        return len(self.count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Moments):
            return NotImplemented
        return (
            np.array_equal(self.count, other.count)
            and np.array_equal(self.mean, other.mean, equal_nan=True)
            and np.array_equal(self.m2, other.m2, equal_nan=True)
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def __getstate__(self) -> tuple[Counts, Floats, Floats]:
        return self.count, self.mean, self.m2

    def __setstate__(self, state: tuple[Counts, Floats, Floats]) -> None:
        Moments.__init__(self, *state)

    def __repr__(self) -> str:
        rows = int(self.count.max()) if len(self) else 0
        return f"Moments({len(self)} heads, at most {rows} rows)"


def _counts(given: Any) -> Counts:
    raw = np.asarray(given)
    if raw.ndim != 1:
        raise InputError(f"count must have one axis (heads), not shape {raw.shape}")
    if raw.dtype == bool or not (np.issubdtype(raw.dtype, np.integer) or np.issubdtype(raw.dtype, np.floating)):
        raise InputError(f"count must be whole numbers, not {raw.dtype}")
    if np.issubdtype(raw.dtype, np.floating) and not np.array_equal(raw, np.floor(raw)):
        raise InputError("count must be whole numbers: a row counts or does not")
    if raw.size and (raw.min() < 0 or raw.max() > _MOST):
        raise InputError(f"count must be between 0 and {_MOST}; it runs from {raw.min()} to {raw.max()}")
    return raw.astype(np.int64)


def _floats(name: str, given: Any, counts: Counts) -> Floats:
    out = np.array(given, np.float64)
    if out.shape != counts.shape:
        raise InputError(f"{name} has shape {out.shape} and count {counts.shape}: both are one value per head")
    return out

"""Mean and covariance of rows that arrive in pieces, exact to the rounding of the rows themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ShapeError

__all__ = ["Scatter"]

#: Rows whose products are summed in their own precision before the sum goes on in float64.
_ROWS = 1024
#: Rows that are multiplied at once: they stay in the cache.
_AT_ONCE = 512
#: Columns of a block of products: those below the diagonal are not computed.
_COLUMNS = 144


class Scatter:
    """Count, mean and scatter (sum of products of deviations) of rows of one width.

    Rows are shifted by a first guess of their mean, so that a large common part costs no digits; products of at most
    1,024 shifted rows are summed in float32 (float64 for float64 rows), everything beyond in float64. Two scatters
    merge by Chan, Golub and LeVeque (1979), equation 2.1.

    Rows may have weights; means and covariances are then weighted ones, and scatters merge by their weight.

    Args:
        width: numbers in a row.
        device: where the sums live.

    Attributes:
        rows: how many rows.
        weight: the sum of their weights; without weights their number.

    Example:
        >>> whole = Scatter(2)
        >>> whole.add(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
        >>> whole.mean.tolist(), whole.covariance.tolist()
        ([2.0, 2.0], [[1.0, 2.0], [2.0, 4.0]])
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.width = width
        self.rows = 0
        self.weight = 0.0
        self._shift = torch.zeros(width, dtype=torch.float64, device=device)
        self._sum = torch.zeros(width, dtype=torch.float64, device=device)
        self._products = torch.zeros(width, width, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, rows: int, mean: Tensor, covariance: Tensor, weight: float | None = None) -> Scatter:
        """The scatter of so many rows with this mean (W,) and population covariance (W, W)."""
        out = cls(mean.shape[0], mean.device)
        out.rows, out._shift = rows, mean.double()
        out.weight = float(rows) if weight is None else weight
        out._products = covariance.double() * out.weight
        return out

    def add(self, rows_NW: Tensor, weights_N: Tensor | None = None) -> None:
        """Take rows (N, width), with weights (N,) of at least 0.

        Raises:
            ShapeError: rows of another width.
        """
        if rows_NW.ndim != 2 or rows_NW.shape[1] != self.width:
            raise ShapeError(f"rows must be (rows, {self.width}), got {tuple(rows_NW.shape)}")
        if not len(rows_NW):
            return
        x = rows_NW.detach()
        x = x if x.dtype == torch.float64 else x.float()
        if not self.rows:
            self._shift = x.mean(0).double()
        shift = self._shift.to(x.dtype)
        if not torch.equal(shift.double(), self._shift):
            self._move(shift.double())
        for start in range(0, len(x), _ROWS):
            some = slice(start, start + _ROWS)
            self._add_products(x[some], shift, None if weights_N is None else weights_N[some, None].to(x.dtype))
        self.rows += len(x)
        self.weight += float(len(x) if weights_N is None else weights_N.double().sum())

    def _add_products(self, x: Tensor, shift: Tensor, weights_N1: Tensor | None) -> None:
        """Sum the products of a few rows in their own precision, and add the sum."""
        products = x.new_zeros(self.width, self.width)
        for start in range(0, len(x), _AT_ONCE):
            shifted = weighed = x[start : start + _AT_ONCE] - shift
            if weights_N1 is not None:
                weighed = shifted * weights_N1[start : start + _AT_ONCE]
            for first in range(0, self.width, _COLUMNS):
                last = min(first + _COLUMNS, self.width)
                products[first:last, first:].addmm_(weighed[:, first:last].T, shifted[:, first:])
            self._sum += weighed.sum(0)
        self._products += products

    def _move(self, shift: Tensor) -> None:
        """Refer the sums to another shift."""
        by = self._shift - shift
        outer = torch.outer(self._sum, by)
        self._products += outer + outer.T + self.weight * torch.outer(by, by)
        self._sum += self.weight * by
        self._shift = shift

    @property
    def mean(self) -> Tensor:
        """(W,) float64; NaN without rows."""
        return self._shift + self._sum / self.weight if self.weight else torch.full_like(self._sum, torch.nan)

    @property
    def covariance(self) -> Tensor:
        """(W, W) float64, centred, divided by the weight of the rows; NaN without rows."""
        if not self.weight:
            return torch.full_like(self._products, torch.nan)
        offset = self._sum / self.weight
        upper = torch.triu(self._products) / self.weight
        return upper + torch.triu(upper, 1).T - torch.outer(offset, offset)

    @property
    def second_moment(self) -> Tensor:
        """(W, W) float64: E[x x^T], not centred; NaN without rows."""
        return self.covariance + torch.outer(self.mean, self.mean)

    def merge(self, other: Scatter) -> Scatter:
        """The scatter of both sets of rows together.

        Raises:
            ShapeError: rows of another width.
        """
        if other.width != self.width:
            raise ShapeError(f"rows of width {self.width} cannot be merged with rows of width {other.width}")
        if not self.weight or not other.weight:
            kept = self if self.weight else other
            whole = (
                Scatter.of(kept.rows, kept.mean, kept.covariance, kept.weight) if kept.weight else Scatter(self.width)
            )
            whole.rows = self.rows + other.rows
            return whole
        total = self.weight + other.weight
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.weight / total)
        between = torch.outer(delta, delta) * (self.weight * other.weight / total)
        products = self.covariance * self.weight + other.covariance * other.weight + between
        return Scatter.of(self.rows + other.rows, mean, products / total, total)

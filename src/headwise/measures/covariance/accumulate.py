"""Mean and covariance of rows that arrive in pieces, exact to the rounding of the rows themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ShapeError

__all__ = ["Scatter"]

#: Rows whose products are summed in their own precision before the sum goes on in float64.
_ROWS = 1024
#: Columns of a block of products: those below the diagonal are not computed.
_COLUMNS = 144


class Scatter:
    """Count, mean and scatter (sum of products of deviations) of rows of one width.

    Rows are shifted by a first guess of their mean, so that a large common part costs no digits; products of at most
    1,024 shifted rows are summed in float32 (float64 for float64 rows), everything beyond in float64. Two scatters
    merge by Chan, Golub and LeVeque (1979), equation 2.1.

    Args:
        width: numbers in a row.
        device: where the sums live.

    Example:
        >>> whole = Scatter(2)
        >>> whole.add(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
        >>> whole.mean.tolist(), whole.covariance.tolist()
        ([2.0, 2.0], [[1.0, 2.0], [2.0, 4.0]])
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.width = width
        self.rows = 0
        self._shift = torch.zeros(width, dtype=torch.float64, device=device)
        self._sum = torch.zeros(width, dtype=torch.float64, device=device)
        self._products = torch.zeros(width, width, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, rows: int, mean: Tensor, covariance: Tensor) -> Scatter:
        """The scatter of so many rows with this mean (W,) and population covariance (W, W)."""
        out = cls(mean.shape[0], mean.device)
        out.rows, out._shift = rows, mean.double()
        out._products = covariance.double() * rows
        return out

    def add(self, rows_NW: Tensor) -> None:
        """Take rows (N, width).

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
            shifted = x[start : start + _ROWS] - shift
            for first in range(0, self.width, _COLUMNS):
                last = min(first + _COLUMNS, self.width)
                self._products[first:last, first:] += shifted[:, first:last].T @ shifted[:, first:]
            self._sum += shifted.sum(0)
        self.rows += len(x)

    def _move(self, shift: Tensor) -> None:
        """Refer the sums to another shift."""
        by = self._shift - shift
        outer = torch.outer(self._sum, by)
        self._products += outer + outer.T + self.rows * torch.outer(by, by)
        self._sum += self.rows * by
        self._shift = shift

    @property
    def mean(self) -> Tensor:
        """(W,) float64; NaN without rows."""
        return self._shift + self._sum / self.rows if self.rows else torch.full_like(self._sum, torch.nan)

    @property
    def covariance(self) -> Tensor:
        """(W, W) float64, centred, divided by the number of rows; NaN without rows."""
        if not self.rows:
            return torch.full_like(self._products, torch.nan)
        offset = self._sum / self.rows
        upper = torch.triu(self._products) / self.rows
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
        total = self.rows + other.rows
        if not self.rows or not other.rows:
            kept = self if self.rows else other
            return Scatter.of(kept.rows, kept.mean, kept.covariance) if kept.rows else Scatter(self.width)
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.rows / total)
        between = torch.outer(delta, delta) * (self.rows * other.rows / total)
        products = self.covariance * self.rows + other.covariance * other.rows + between
        return Scatter.of(total, mean, products / total)

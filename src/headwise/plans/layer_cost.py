"""What it costs to remove heads of one layer, in closed form from the covariance of their outputs.

Let z be the concatenated head outputs of a layer, C = E[z z^T], centred, and W its output projection. If only the heads
K are kept, the best linear read-out of what the others wrote is ``C_KK^-1 C_K:``, and what is lost of the layer's
output in spite of it is the Schur complement ``tr(W^T (C - C_:K C_KK^-1 C_K:) W)``. It depends on which other heads
have gone: of two copies each is free, both together are dear.

With a ridge r the Schur complement of the removed columns R is the inverse of a block of P = (C + r I)^-1:
``(P_RR)^-1 = C_RR + r I - C_RK (C_KK + r I)^-1 C_KR``, so one inverse serves every set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from headwise.errors import InputError, MeasureError

__all__ = ["RIDGE", "TOLERANCE", "Array", "LayerCost", "Repair"]

#: What is done about the loss of a cut.
Repair = Literal["none", "bias", "least_squares", "least_squares_no_bias"]
Array = npt.NDArray[np.float64]

#: Of the mean of C's diagonal.
RIDGE: Final = 1e-3
#: Without a ridge, directions of the kept heads below this share of the largest variance count as absent.
TOLERANCE: Final = 1e-9


class LayerCost:
    """The cost of every set of heads of one layer.

    Args:
        covariance: C (H * d_v, H * d_v), centred.
        W_O: (H * d_v, d_model).
        heads: H.
        energy: what costs are divided by: E||h||^2 of the residual stream at the layer's input makes layers comparable.
        repair: what will be done about the loss: ``"least_squares"``: W_O of the kept heads is refitted, with an
            intercept; ``"least_squares_no_bias"``: without one; ``"bias"``: removed heads are replaced by their mean;
            ``"none"``: by nothing.
        mean: (H * d_v,), needed where nothing takes the means: ``"none"`` and ``"least_squares_no_bias"``.
        ridge: of least squares, a share of the mean variance; 0 takes a pseudo-inverse.
        name: of the layer, for messages.

    Raises:
        InputError: shapes that do not fit.
        MeasureError: a covariance, mean or energy that is not finite, or an energy of 0.

    Example:
        >>> C = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])  # head 2 is a copy of head 0
        >>> cost = LayerCost(C, np.eye(3), 3, ridge=0)
        >>> [round(cost(gone), 6) for gone in ([0], [2], [1], [0, 2])]
        [0.0, 0.0, 1.0, 2.0]
    """

    def __init__(
        self,
        covariance: Any,
        W_O: Any,
        heads: int,
        *,
        energy: float = 1.0,
        repair: Repair = "least_squares",
        mean: Any = None,
        ridge: float = RIDGE,
        name: str = "the layer",
    ) -> None:
        self.covariance: Array = np.asarray(covariance, dtype=np.float64)
        self.W_O: Array = np.asarray(W_O, dtype=np.float64)
        width = len(self.W_O)
        if self.covariance.shape != (width, width) or heads < 1 or width % heads:
            raise InputError(
                f"{name}: a covariance of shape {self.covariance.shape} and W_O of shape {self.W_O.shape} do not fit "
                f"{heads} heads; C must be (H * d_v, H * d_v) and W_O (H * d_v, d_model)"
            )
        if repair not in get_args(Repair):
            raise InputError(f"repair must be one of {', '.join(get_args(Repair))}, and is {repair!r}")
        self.heads, self.d_v, self.energy, self.repair, self.name = heads, width // heads, energy, repair, name
        counted = mean is not None and repair in ("none", "least_squares_no_bias")
        offset = np.asarray(mean, dtype=np.float64) if counted else np.zeros(width)
        for what, value in (("covariance", self.covariance), ("mean", offset), ("energy", energy), ("W_O", self.W_O)):
            if not np.isfinite(value).all():
                raise MeasureError(f"{name}: the {what} holds values that are not finite; take the statistics again")
        if not energy > 0:
            raise MeasureError(f"{name}: the residual stream at its input has the energy {energy}; nothing reaches it")
        self._moment = self.covariance + np.outer(offset, offset)
        self._pull = ridge * float(self._moment.diagonal().mean())
        self._precision: Array | None = None
        self._known: dict[frozenset[int], float] = {frozenset(): 0.0}

    def columns(self, heads: Iterable[int]) -> npt.NDArray[np.int64]:
        """Columns of z that belong to ``heads``.

        Raises:
            InputError: a head that the layer does not have.
        """
        chosen = sorted(set(heads))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < self.heads:
            raise InputError(f"{self.name}: heads must lie in 0 to {self.heads - 1}, got {chosen}")
        return (np.array(chosen, dtype=np.int64)[:, None] * self.d_v + np.arange(self.d_v)).ravel()

    def __call__(self, removed: Iterable[int]) -> float:
        """Expected squared change of the layer's output without ``removed``, over ``energy``; >= 0."""
        gone = frozenset(removed)
        if gone not in self._known:
            out = self.columns(gone)
            W = self.W_O[out]
            self._known[gone] = max(0.0, self._lost(gone, out, W)) / self.energy
        return self._known[gone]

    def _lost(self, gone: frozenset[int], out: npt.NDArray[np.int64], W: Array) -> float:
        if self.repair in ("none", "bias"):
            return float((self._moment[np.ix_(out, out)] @ W * W).sum())
        if self._pull > 0:
            block = self._inverse()[np.ix_(out, out)]
            return float((np.linalg.solve(block, W) * W).sum()) - self._pull * float((W * W).sum())
        kept = self.columns(set(range(self.heads)) - gone)
        C = self._moment
        inverse = np.linalg.pinv(C[np.ix_(kept, kept)], rcond=TOLERANCE, hermitian=True)
        lost = C[np.ix_(out, out)] - C[np.ix_(out, kept)] @ inverse @ C[np.ix_(kept, out)]
        return float((lost @ W * W).sum())

    def _inverse(self) -> Array:
        if self._precision is None:
            pulled = self._moment + self._pull * np.eye(len(self.covariance))
            self._precision = np.asarray(np.linalg.inv(pulled), dtype=np.float64)
        return self._precision

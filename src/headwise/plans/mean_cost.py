"""What it costs to replace heads of one layer by running means, in closed form.

Let r_g be the mean of the values of key-value head g that a query may see. A head that is replaced by it leaves
``(z_h - r_g) W_h`` of the layer's output unsaid. With least squares the heads that are left *and the r_g of all that
were replaced* predict it: the cost is the Schur complement of their joint covariance, as in
:class:`~headwise.plans.LayerCost`, and never above what it would be with nothing in the heads' place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwise.errors import InputError
from headwise.plans.layer_cost import RIDGE, TOLERANCE, Array, LayerCost, Repair

__all__ = ["RunningMeanCost"]


class RunningMeanCost(LayerCost):
    """The cost of every set of heads of one layer, replaced by the running means of their key-value heads.

    Args:
        covariance: C of the head outputs and, after them, of the running mean of every key-value head
            ((H + G) * d_v, (H + G) * d_v), centred.
        W_O: (H * d_v, d_model).
        kv_map: for each query head the key-value head that it reads.
        energy, repair, ridge, name: as for :class:`~headwise.plans.LayerCost`.
        mean: ((H + G) * d_v,), needed where nothing takes the means.

    Example:
        >>> C = np.array([[1.0, 0.0, 0.9], [0.0, 1.0, 0.0], [0.9, 0.0, 1.0]])  # head 0 is nearly its running mean
        >>> cost = RunningMeanCost(C, np.eye(2), (0, 0), repair="bias")
        >>> round(cost([0]), 6), round(cost([1]), 6)
        (0.2, 2.0)
    """

    def __init__(
        self,
        covariance: Any,
        W_O: Any,
        kv_map: Sequence[int],
        *,
        energy: float = 1.0,
        repair: Repair = "least_squares",
        mean: Any = None,
        ridge: float = RIDGE,
        name: str = "the layer",
    ) -> None:
        weight = np.asarray(W_O, dtype=np.float64)
        self.kv_map, self.query_heads = tuple(kv_map), len(kv_map)
        groups = len(set(kv_map))
        rows = len(weight) // max(1, self.query_heads) * groups
        joint = np.vstack([weight, np.zeros((rows, weight.shape[1]))])
        count = self.query_heads + groups
        super().__init__(covariance, joint, count, energy=energy, repair=repair, mean=mean, ridge=ridge, name=name)

    def __call__(self, removed: Iterable[int]) -> float:
        """Expected squared change of the layer's output with ``removed`` replaced, over ``energy``; >= 0.

        Raises:
            InputError: a head that the layer does not have.
        """
        gone = set(removed)
        if gone and not 0 <= min(gone) <= max(gone) < self.query_heads:
            raise InputError(f"{self.name}: heads must lie in 0 to {self.query_heads - 1}, got {sorted(gone)}")
        return super().__call__(gone)

    def _lost(self, gone: frozenset[int], out: npt.NDArray[np.int64], W: Array) -> float:
        used = sorted({self.kv_map[head] for head in gone})
        means = self.columns(self.query_heads + kv for kv in used)
        instead = -np.vstack(
            [sum(self.W_O[self.columns([head])] for head in sorted(gone) if self.kv_map[head] == kv) for kv in used]
        )
        if self.repair in ("none", "bias") or self._pull == 0:
            both, A = np.concatenate([out, means]), np.vstack([W, instead])
            return float((self._unsaid(gone, means)[np.ix_(both, both)] @ A * A).sum())
        return self._penalised(out, W, means, instead)

    def _unsaid(self, gone: frozenset[int], means: npt.NDArray[np.int64]) -> Array:
        """What is not predicted of all columns: all of it without least squares."""
        if self.repair in ("none", "bias"):
            return self._moment
        C = self._moment
        kept = np.concatenate([self.columns(set(range(self.query_heads)) - gone), means])
        inverse = np.linalg.pinv(C[np.ix_(kept, kept)], rcond=TOLERANCE, hermitian=True)
        return np.asarray(C - C[:, kept] @ inverse @ C[kept], dtype=np.float64)

    def _penalised(self, out: npt.NDArray[np.int64], W: Array, means: npt.NDArray[np.int64], instead: Array) -> float:
        """The least of the change and of the ridge's penalty on the change of the weights, from one inverse.

        With P = (C + r I)^-1, R what is not kept, a_R its weights and a_K those of the running means:
        ``|a_R - Y|^2 in (P_RR)^-1 - r |a_R|^2 + r |a_K|^2 - r^2 a_K^T P_KK a_K``, Y = r P_RK a_K.
        """
        P, pull = self._inverse(), self._pull
        idle = self.columns(set(range(self.query_heads, self.heads))).tolist()
        idle = np.array(sorted(set(idle) - set(means.tolist())), dtype=np.int64)
        rest = np.concatenate([out, idle])
        toward = pull * P[np.ix_(rest, means)] @ instead
        a = np.vstack([W, np.zeros((len(idle), W.shape[1]))]) - toward
        lost = float((np.linalg.solve(P[np.ix_(rest, rest)], a) * a).sum()) - pull * float((W * W).sum())
        lost += pull * float((instead * instead).sum())
        return lost - pull * pull * float((P[np.ix_(means, means)] @ instead * instead).sum())

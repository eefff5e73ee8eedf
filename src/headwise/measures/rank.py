"""Ranks of what a head can do: of W_Q W_K^T and W_V W_O from the weights, of its scores on data.

All singular values come from the factors in float64: a product of two stored matrices is never formed in the precision
in which they are stored, whose rounding would fill every null direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import torch
from torch import Tensor

from headwise.measures.measure import HeadValues, Look, PooledMeasure, Sums, WeightMeasure
from headwise.measures.spectra import singular_values
from headwise.measures.weights import HeadWeights, Product, find_spectra
from headwise.trace import TOKEN

__all__ = ["SCORE_RANKS", "WEIGHT_RANKS", "RankKind", "ScoreRank", "ScoreSums", "WeightRank", "rank_of"]

#: Rows that are held in float64 at once.
_ROWS: Final = 256

RankKind = Literal["numerical", "effective", "stable"]

_ROY: Final = "Roy and Vetterli 2007, The Effective Rank: A Measure of Effective Dimensionality"
_RUDELSON: Final = "Rudelson and Vershynin 2007, Sampling from Large Matrices"
_BHOJANAPALLI: Final = "Bhojanapalli et al. 2020, Low-Rank Bottleneck in Multi-head Attention Models"


def rank_of(values_HD: Tensor, kind: RankKind, tolerance: float) -> Tensor:
    """The rank of matrices with these singular values, by one of three definitions; 0 for a zero matrix.

    Args:
        values_HD: singular values (heads, values), at least 0.
        kind: ``"numerical"``: how many are above ``tolerance`` times the largest. ``"effective"``: the exponential of
            the entropy of the values divided by their sum. ``"stable"``: the sum of squares over the largest square.
        tolerance: for the numerical rank, relative to the largest.

    Example:
        >>> values = torch.tensor([[2.0, 2.0, 0.0]])
        >>> [float(rank_of(values, kind, 1e-6)) for kind in ("numerical", "effective", "stable")]
        [2.0, 2.0, 2.0]
    """
    values = values_HD.double()
    largest = values.amax(-1, keepdim=True)
    if kind == "numerical":
        return (values > tolerance * largest).sum(-1).double()
    if kind == "stable":
        return torch.where(largest > 0, values / largest, 0.0).square().sum(-1)
    total = values.sum(-1, keepdim=True)
    share = torch.where(total > 0, values / total, 0.0)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0.0)


def tolerance_for(resolution: float) -> float:
    """The default tolerance of a numerical rank: 4 machine epsilons of the dtype that the values were stored in."""
    return 4 * resolution


@dataclass(frozen=True, kw_only=True)
class WeightRank(WeightMeasure):
    """The rank of a head's W_Q W_K^T or W_V W_O (biases, rotary positions and norms before them left out).

    Attributes:
        product: ``"qk"`` or ``"ov"``.
        kind: which definition; see :func:`rank_of`.
        tolerance: for the numerical rank, relative to the largest singular value; None: 4 machine epsilons of the dtype
            of the weights (4.8e-7 for float32, 0.031 for bfloat16).
    """

    unit: str = "1"
    low: float | None = 0.0
    product: Product
    kind: RankKind
    tolerance: float | None = None

    def prepare(self, weights: Sequence[HeadWeights]) -> None:
        """The spectra of all blocks together."""
        find_spectra(weights, [self.product])

    def __call__(self, weights: HeadWeights) -> HeadValues:
        """(H,) ranks, at most d_k (for ``"ov"`` d_v)."""
        values = weights.qk_spectrum if self.product == "qk" else weights.ov_spectrum
        if isinstance(values, str):
            return values
        tolerance = tolerance_for(weights.resolution) if self.tolerance is None else self.tolerance
        return rank_of(values, self.kind, tolerance)


@dataclass(frozen=True)
class Scatter:
    """Second moments of queries and keys: (H, D_k, D_k) sums over rows in float64, and the machine epsilon of q."""

    queries: Tensor
    keys: Tensor
    resolution: float

    @cached_property
    def spectrum(self) -> Tensor:
        """Singular values of Q K^T over all rows of the data, (H, D_k), descending."""
        return singular_values([self.square()])[0]

    def square(self) -> Tensor:
        """(H, D_k, D_k) matrices whose eigenvalues are the squares of the singular values of Q K^T."""
        root_HDR, failed = torch.linalg.cholesky_ex(self.queries)
        if bool(failed.any()):  # queries that do not span the head's width
            values, vectors = torch.linalg.eigh(self.queries)
            root_HDR = vectors * values.clamp(min=0).sqrt()[:, None, :]
        square: Tensor = root_HDR.transpose(1, 2) @ self.keys @ root_HDR
        return square


@dataclass(frozen=True)
class ScoreSums(Sums[Scatter]):
    """Second moments of the queries and keys as they enter the scores, after rotary positions and norms."""

    def of(self, look: Look) -> Scatter | str:
        """The sums over one call's token rows, and over all its real keys."""
        problem = look.problem
        kv_map = problem.kv_map or look.call.block.kv_map
        padding = problem.visible.key_padding
        queries = _second_moments(problem.q, look.kinds == TOKEN)
        keys = _second_moments(problem.k, None if padding is None else padding[:, : problem.k.shape[2]])[list(kv_map)]
        return Scatter(queries.cpu(), keys.cpu(), torch.finfo(problem.q.dtype).eps)

    def join(self, left: Scatter, right: Scatter) -> Scatter:
        """Added."""
        return Scatter(left.queries + right.queries, left.keys + right.keys, max(left.resolution, right.resolution))


def _second_moments(rows_BHQD: Tensor, counted_BQ: Tensor | None) -> Tensor:
    """Sums of x x^T over the rows that count, (H, D, D) in float64; only a few rows are held in float64 at once."""
    whole = counted_BQ is None or bool(counted_BQ.all())
    total = torch.zeros(rows_BHQD.shape[1], *2 * (rows_BHQD.shape[3],), dtype=torch.float64, device=rows_BHQD.device)
    step = max(1, _ROWS // rows_BHQD.shape[0])
    for start in range(0, rows_BHQD.shape[2], step):
        part = rows_BHQD[:, :, start : start + step].detach()
        if not whole and counted_BQ is not None:
            part = torch.where(counted_BQ[:, None, start : start + step, None].to(part.device), part, 0.0)
        part_HND = part.transpose(0, 1).flatten(1, 2).double()
        total.baddbmm_(part_HND.transpose(1, 2), part_HND)
    return total


@dataclass(frozen=True, kw_only=True)
class ScoreRank(PooledMeasure):
    """The rank of Q K^T, all queries of the data by all its keys, before scale, soft cap, bias and mask.

    Attributes:
        kind: which definition; see :func:`rank_of`.
        tolerance: for the numerical rank, relative to the largest singular value; None: 4 machine epsilons of the dtype
            of q, and at least 1e-7, which is what second moments in float64 resolve.
    """

    unit: str = "1"
    low: float | None = 0.0
    sums: ScoreSums = ScoreSums()
    kind: RankKind
    tolerance: float | None = None

    def prepare(self, states: Sequence[Scatter]) -> None:
        """The spectra of all sites together."""
        new = [state for state in states if "spectrum" not in vars(state)]
        for state, values in zip(new, singular_values([state.square() for state in new]), strict=True):
            vars(state)["spectrum"] = values

    def __call__(self, state: Scatter) -> HeadValues:
        """(H,) ranks, at most d_k; NaN where there was no row."""
        tolerance = max(tolerance_for(state.resolution), 1e-7) if self.tolerance is None else self.tolerance
        ranks = rank_of(state.spectrum, self.kind, tolerance)
        return torch.where(state.queries.diagonal(dim1=1, dim2=2).sum(-1) > 0, ranks, torch.nan)


_KINDS: Final[dict[str, tuple[RankKind, str, str]]] = {
    "rank": ("numerical", "Numerical rank of {}: singular values above 4 machine epsilons of the dtype{}.", ""),
    "effective_rank": (
        "effective",
        "Effective rank of {}: exp of the entropy of the normalised singular values.",
        _ROY,
    ),
    "stable_rank": ("stable", "Stable rank of {}: squared Frobenius norm over squared spectral norm.", _RUDELSON),
}
_PRODUCTS: Final = {"qk": "W_Q W_K^T, from the factors in float64", "ov": "W_V W_O, from the factors in float64"}

WEIGHT_RANKS: Final[tuple[WeightRank, ...]] = tuple(
    WeightRank(
        name=f"{product}_{name}",
        product=product,
        kind=kind,
        description=text.format(_PRODUCTS[product], ", times the largest" if kind == "numerical" else ""),
        source=source,
    )
    for product in ("qk", "ov")
    for name, (kind, text, source) in _KINDS.items()
)

SCORE_RANKS: Final[tuple[ScoreRank, ...]] = tuple(
    ScoreRank(
        name=f"score_{name}",
        kind=kind,
        description=text.format(
            "Q K^T over all queries and keys of the data (at most d_k)",
            ", times the largest" if kind == "numerical" else "",
        ),
        source=source or _BHOJANAPALLI,
    )
    for name, (kind, text, source) in _KINDS.items()
)

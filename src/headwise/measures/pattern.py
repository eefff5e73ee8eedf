"""What a head looks at, and how much it writes: one number per query row, never n x n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headwise.heads import MeasureInfo
from headwise.kernels import Problem, Wanted, visible_at
from headwise.layout import Site
from headwise.measures.measure import Look, RowMeasure, RowValues
from headwise.trace import row_offset

__all__ = [
    "PATTERN",
    "PATTERN_MEASURES",
    "Distance",
    "Entropy",
    "MaxWeight",
    "NormalizedEntropy",
    "ResultNorm",
    "WeightOn",
    "ZNorm",
]

_CLARK: Final = "Clark et al. 2019, What Does BERT Look At?, section 3"
_POSITIONS_DIFFER: Final = "cross-attention: query and key positions belong to different sequences"


@dataclass(frozen=True, kw_only=True)
class Entropy(RowMeasure):
    """Shannon entropy of each row, nats."""

    name: str = "entropy"
    unit: str = "nats"
    low: float | None = 0.0
    description: str = "Entropy of a row of the pattern over its visible keys; renormalised where a sink takes mass."
    source: str = "Clark et al. 2019, section 3.3"

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) nats."""
        return look.rows.entropy


@dataclass(frozen=True, kw_only=True)
class NormalizedEntropy(RowMeasure):
    """Entropy over that of a uniform row."""

    name: str = "normalized_entropy"
    unit: str = "share"
    low: float | None = 0.0
    high: float | None = 1.0
    description: str = "Entropy divided by log(number of visible keys); 1 is uniform. Rows with one key are left out."
    source: str = "Vig and Belinkov 2019, Analyzing the Structure of Attention, section 4"

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) shares; rows that see one key have none."""
        rows = look.rows
        log_visible = rows.visible.clamp(min=2).to(rows.entropy.dtype).log()
        return rows.entropy / log_visible, rows.visible > 1


@dataclass(frozen=True, kw_only=True)
class MaxWeight(RowMeasure):
    """The largest weight of each row."""

    name: str = "max_weight"
    unit: str = "weight"
    low: float | None = 0.0
    high: float | None = 1.0
    description: str = "Largest weight of a row."
    source: str = "Voita et al. 2019, Analyzing Multi-Head Self-Attention, section 4 (confidence)"

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) weights."""
        return look.rows.max_weight


@dataclass(frozen=True, kw_only=True)
class WeightOn(RowMeasure):
    """The weight on one key per query: at a fixed offset, or the first real key of the sequence.

    Attributes:
        offset: position of the key minus that of the query; None for the first real key.
    """

    unit: str = "weight"
    low: float | None = 0.0
    high: float | None = 1.0
    offset: int | None = None

    def applies(self, site: Site) -> str | None:
        """Offsets mean nothing where queries and keys are positions of different sequences."""
        return _POSITIONS_DIFFER if self.offset is not None and site.key.kind == "cross" else None

    def wants(self, site: Site, problem: Problem) -> Wanted:  # noqa: ARG002
        """The weight on the named keys."""
        target = first_key(problem) if self.offset is None else at_offset(problem, self.offset)
        return Wanted(rows=True, pairs=target[None])

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) weights; rows that may not see the key have none."""
        assert look.pairs is not None
        assert look.targets is not None
        return look.pairs[0], visible_at(look.problem, look.targets)[0]


@dataclass(frozen=True, kw_only=True)
class Distance(RowMeasure):
    """Mean attended distance of each row."""

    name: str = "distance"
    unit: str = "tokens"
    low: float | None = 0.0
    description: str = "Mean attended distance of a row: the sum over keys of weight times |query - key position|."
    source: str = "Vig and Belinkov 2019, section 4 (equation 3)"

    def applies(self, site: Site) -> str | None:
        """Not for cross-attention."""
        return _POSITIONS_DIFFER if site.key.kind == "cross" else None

    def wants(self, site: Site, problem: Problem) -> Wanted:  # noqa: ARG002
        """The distance."""
        return Wanted(rows=True, distance=True)

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) tokens."""
        assert look.rows.distance is not None
        return look.rows.distance


@dataclass(frozen=True, kw_only=True)
class ZNorm(RowMeasure):
    """Size of what a head puts out."""

    name: str = "z_norm"
    unit: str = "L2 norm"
    low: float | None = 0.0
    description: str = "Euclidean norm of the head's output z = pattern V, of width d_v."
    source: str = "Kobayashi et al. 2020, Attention is Not Only a Weight, section 2"

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) norms."""
        norms: Tensor = look.call.z.float().norm(dim=-1)
        return norms


@dataclass(frozen=True, kw_only=True)
class ResultNorm(RowMeasure):
    """Size of what a head writes into the residual stream, without building the term.

    ``|z W_O|`` equals ``|z L|`` where ``W_O = L Q`` with orthonormal rows in Q, so one d_v x d_v product per row
    replaces one of d_v x d_model (9 times less work in SmolLM2).
    """

    name: str = "result_norm"
    unit: str = "L2 norm"
    low: float | None = 0.0
    description: str = "Euclidean norm of z W_O of the head: its term in the residual stream, of width d_model."
    source: str = "Kobayashi et al. 2020, section 2.2 (equation 3)"

    def __call__(self, look: Look) -> RowValues:
        """(B, H, Q) norms, or why the output projection is not known."""
        factor = look.weights.output_factor
        if isinstance(factor, str):
            return factor
        z_BHQD = look.call.z.float()
        norms: Tensor = torch.einsum("bhqd,hdr->bhqr", z_BHQD, factor.to(z_BHQD.device)).norm(dim=-1)
        return norms


def first_key(problem: Problem) -> Tensor:
    """The position of the first real key of each sequence, for every query: (B or 1, Q); -1 where all is padding."""
    keys, queries, device = problem.k.shape[2], problem.q.shape[2], problem.q.device
    padding = problem.visible.key_padding
    if padding is None:
        first = torch.zeros(1, dtype=torch.int64, device=device)
    else:
        real = padding[:, :keys].to(device)
        first = torch.where(real.any(-1), real.int().argmax(-1), -1)
    return first[:, None].expand(-1, queries)


def at_offset(problem: Problem, offset: int) -> Tensor:
    """The key ``offset`` positions after each query: (1, Q); -1 outside the sequence."""
    at = torch.arange(problem.q.shape[2], device=problem.q.device) + row_offset(problem) + offset
    return torch.where((at >= 0) & (at < problem.k.shape[2]), at, -1)[None]


def _weight_on(name: str, where: str, offset: int | None, source: str = _CLARK) -> WeightOn:
    return WeightOn(
        name=name, offset=offset, description=f"Weight on {where}, over rows that can see it.", source=source
    )


#: The measures that a scan takes by default.
PATTERN: Final[tuple[RowMeasure, ...]] = (
    Entropy(),
    NormalizedEntropy(),
    MaxWeight(),
    _weight_on("previous_weight", "the key one position before the query", -1),
    _weight_on("next_weight", "the key one position after the query", 1),
    _weight_on("own_weight", "the query's own position", 0),
    _weight_on(
        "first_weight",
        "the first real key of the sequence",
        None,
        "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, section 3",
    ),
    Distance(),
    ZNorm(),
    ResultNorm(),
)

PATTERN_MEASURES: Final[dict[str, MeasureInfo]] = {measure.name: measure.info for measure in PATTERN}

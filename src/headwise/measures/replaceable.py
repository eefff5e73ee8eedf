"""How much of a head's output is a constant, or a running mean of the values: what pruning can replace.

Shares are of the energy E|z|^2 of the head's output, so that the two are of one scale and the second is never below the
first: a constant alone, and a constant plus a scalar times the mean of the visible values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import mean_of_visible, visible_counts
from headwise.measures.measure import HeadValues, Look, PooledMeasure, Sums
from headwise.trace import TOKEN

__all__ = ["REPLACEABLE", "ConstantShare", "OutputSums", "RunningMeanShare"]


class Output(NamedTuple):
    """Moments of a head's output z and of the mean r of the values that it may see, over rows, in float64.

    ``rows`` (H,) how many; means (H, D_v); ``zz``, ``rr`` and ``zr`` (H,): sums of squares and products of deviations.
    """

    rows: Tensor
    z_mean: Tensor
    r_mean: Tensor
    zz: Tensor
    rr: Tensor
    zr: Tensor


@dataclass(frozen=True)
class OutputSums(Sums[Output]):
    """Moments of z and of the mean visible value, over token rows."""

    def of(self, look: Look) -> Output | str:
        """The moments of one call."""
        problem = look.problem
        counted = (look.kinds == TOKEN)[:, None, :] & (visible_counts(problem) > 0)
        counted_BHQ1 = counted.expand(look.call.z.shape[:3])[..., None].double()
        z_BHQD = look.call.z.detach().double()
        r_BHQD = mean_of_visible(problem).detach()
        count = counted_BHQ1.sum((0, 2))
        z_mean, r_mean = ((x * counted_BHQ1).sum((0, 2)) / count.clamp(min=1) for x in (z_BHQD, r_BHQD))
        z, r = ((x - mean[None, :, None]) * counted_BHQ1 for x, mean in ((z_BHQD, z_mean), (r_BHQD, r_mean)))
        zz, rr, zr = ((a * b).sum((0, 2, 3)) for a, b in ((z, z), (r, r), (z, r)))
        return Output(*(part.cpu() for part in (count[:, 0], z_mean, r_mean, zz, rr, zr)))

    def join(self, left: Output, right: Output) -> Output:
        """Chan, Golub and LeVeque 1979, equation 2.1."""
        rows = left.rows + right.rows
        share = right.rows / rows.clamp(min=1)
        z, r = right.z_mean - left.z_mean, right.r_mean - left.r_mean
        weight = left.rows * share
        return Output(
            rows,
            left.z_mean + z * share[:, None],
            left.r_mean + r * share[:, None],
            left.zz + right.zz + (z * z).sum(-1) * weight,
            left.rr + right.rr + (r * r).sum(-1) * weight,
            left.zr + right.zr + (z * r).sum(-1) * weight,
        )


@dataclass(frozen=True, kw_only=True)
class ConstantShare(PooledMeasure):
    """What one constant vector replaces."""

    name: str = "constant_share"
    unit: str = "share"
    low: float | None = 0.0
    high: float | None = 1.0
    description: str = (
        "Share of the energy E|z|^2 of the head's output that its mean over token rows carries: |E z|^2 / E|z|^2."
    )
    source: str = "the constant of mean ablation: Wang et al. 2023, Interpretability in the Wild"
    sums: OutputSums = OutputSums()

    def __call__(self, state: Output) -> HeadValues:
        """(H,) shares; NaN for a head that put out zeros."""
        constant, energy = _energies(state)
        return (constant / energy).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class RunningMeanShare(PooledMeasure):
    """What a constant and the plain mean of the visible values replace together."""

    name: str = "running_mean_share"
    unit: str = "share"
    low: float | None = 0.0
    high: float | None = 1.0
    description: str = (
        "Share of E|z|^2 carried by a constant plus the best scalar times the mean of the values that the row may see "
        "(a running mean in causal models); at least constant_share."
    )
    source: str = "least squares; Zhang et al. 2018, Accelerating Neural Transformer via an Average Attention Network"
    sums: OutputSums = OutputSums()

    def __call__(self, state: Output) -> HeadValues:
        """(H,) shares; NaN for a head that put out zeros."""
        constant, energy = _energies(state)
        explained = torch.where(state.rr > 0, state.zr.square() / state.rr, 0.0)
        return ((constant + explained) / energy).clamp(0, 1)


def _energies(state: Output) -> tuple[Tensor, Tensor]:
    """The energy of the mean and that of all rows; the latter is NaN where there is none."""
    constant = state.rows * state.z_mean.square().sum(-1)
    energy = constant + state.zz
    return constant, torch.where(energy > 0, energy, torch.nan)


REPLACEABLE: Final = (ConstantShare(), RunningMeanShare())

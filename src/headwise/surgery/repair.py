"""What is left learns to do without what went: a new output projection and intercept from the covariance of the heads.

Let z (h d_v) be a layer's head outputs side by side, m their mean and C their covariance, W their output projection, K
what is kept. Least squares predicts all of z W from z_K: with a ridge towards the weights that are there,

    W' = (C_KK + r I)^-1 (C_K: W + r W_K),    b' = b + m W - m_K W',    r = ridge * mean of the diagonal of C.

The bias alone replaces what went by its mean: W' = W_K, b' = b + m_R W_R. Without an intercept, M = C + m m^T, which is
not centred, takes the place of C in W', and b' = b.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, get_args

import torch
from torch import Tensor, nn

from headwise.errors import InputError, MeasureError
from headwise.layout import Block, HeadLayout, SiteKey
from headwise.plans import RIDGE, Repair
from headwise.surgery.averaging import Carriers
from headwise.surgery.keeping import Kept, head_rows

__all__ = [
    "INTERCEPTS",
    "METHODS",
    "REFITS",
    "RIDGE",
    "Moments",
    "Repaired",
    "SiteMoments",
    "check_constants",
    "check_repair",
    "columns_of",
    "constants",
    "merged",
    "moments_of",
    "repair",
    "solve",
]

METHODS: Final[tuple[str, ...]] = get_args(Repair)
#: Those that give the output projection new weights.
REFITS: Final = ("least_squares", "least_squares_no_bias")
#: Those that add to its bias, and give it one where it has none.
INTERCEPTS: Final = ("bias", "least_squares")


def check_repair(repair: Any, ridge: Any) -> None:
    """Refuse what is no repair.

    Raises:
        InputError: an unknown method, or a ridge below 0 or not finite.
    """
    if repair not in METHODS:
        raise InputError(f"repair must be one of {', '.join(METHODS)}, and is {repair!r}")
    if not isinstance(ridge, int | float) or isinstance(ridge, bool) or not 0 <= ridge < float("inf"):
        raise InputError(f"ridge must be a number, 0 or above, and is {ridge!r}")


def check_constants(repair: str) -> None:
    """Refuse a repair that has no place for the mean of heads that are replaced by a constant.

    Raises:
        InputError: it adds no intercept, and is not ``"none"``, with which the mean is added by itself.
    """
    if repair not in (*INTERCEPTS, "none"):
        raise InputError(
            f"heads that are replaced by a constant leave it in a bias, and repair={repair!r} adds none; take "
            "repair='least_squares', 'bias' or 'none', or a plan with the replacement 'nothing'"
        )


class SiteMoments(Protocol):
    """What repair needs to know of one site: mean (h d_v,) and covariance (h d_v, h d_v) of its head outputs."""

    heads: int
    d_v: int
    means: int

    @property
    def mean(self) -> Tensor:
        """Means."""

    @property
    def covariance(self) -> Tensor:
        """C, centred."""

    @property
    def joint_mean(self) -> Tensor:
        """Means of the head outputs and, after them, of the running means of ``means`` key-value heads."""

    @property
    def joint_covariance(self) -> Tensor:
        """Their covariance."""

    @property
    def z(self) -> Rows:
        """What counts the rows."""


class Rows(Protocol):
    """Anything that knows over how many rows it was taken."""

    rows: int


@dataclass(frozen=True)
class Moments:
    """Mean, covariance and number of rows of one block's head outputs, over all its sites."""

    mean: Tensor
    covariance: Tensor
    rows: int


@dataclass(frozen=True)
class Repaired:
    """What a repair did to one output projection.

    Attributes:
        module: the projection.
        lost: expected squared change of the layer's output without repair, over its variance.
        left: the same after the repair.
        rows: how many rows the statistics were taken over, and how many columns they decide about.
    """

    module: str
    lost: float
    left: float
    rows: int
    columns: int


def moments_of(
    layout: HeadLayout, block: Block, statistics: Mapping[SiteKey, SiteMoments], *, means: bool = False
) -> Moments:
    """The moments of a block over all its sites: a layer that is called twelve times is repaired for all twelve.

    With ``means`` those of the running mean of every key-value head come after those of the heads.

    Raises:
        InputError: the statistics have no such site, or other heads, or no running means where they are wanted.
        MeasureError: they hold no rows, or values that are not finite.
    """
    parts = []
    for site in layout.sites:
        if site.block != block.module:
            continue
        one = statistics[site.key]
        if (one.heads, one.d_v) != (block.query_heads, block.d_v):
            raise InputError(
                f"{site.key}: the statistics are of {one.heads} heads of width {one.d_v}, and the model has "
                f"{block.query_heads} of width {block.d_v}; take statistics of this model"
            )
        if one.z.rows < 1:
            raise MeasureError(f"{site.key}: the statistics hold no rows; give more text")
        if means and one.means != block.kv_heads:
            raise InputError(
                f"{site.key}: the statistics hold no running means, and heads are to be replaced by them; take them "
                "with running_means=True (--running-means), or give text"
            )
        mean, covariance = (one.joint_mean, one.joint_covariance) if means else (one.mean, one.covariance)
        parts.append(Moments(mean.double(), covariance.double(), one.z.rows))
    rows = sum(part.rows for part in parts)
    mean = sum((part.mean * (part.rows / rows) for part in parts), torch.zeros_like(parts[0].mean))
    covariance = torch.zeros_like(parts[0].covariance)
    for part in parts:
        off = part.mean - mean
        covariance += (part.covariance + torch.outer(off, off)) * (part.rows / rows)
    if not bool(torch.isfinite(covariance).all() and torch.isfinite(mean).all()):
        raise MeasureError(f"{block.module}: the statistics hold values that are not finite; take them again")
    return Moments(mean, covariance, rows)


def solve(
    moments: Moments,
    weight: Tensor,
    columns: list[int],
    method: str,
    ridge: float = RIDGE,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New weights (k, E) of the kept ``columns`` of z, and what is added to the bias (E,).

    Args:
        moments: of all columns (h d_v), and perhaps of others after them (running means), which ``columns`` may name.
        weight: W (h d_v, E) before.
        columns: which are kept.
        method: one of :data:`METHODS`.
        ridge: pull towards the weights that are there, as a part of the mean variance of a column.
        start: the weights that are there (k, E), where they are not those of ``weight``.

    Raises:
        MeasureError: without a ridge, a covariance that has no inverse.

    Example:
        >>> twins = Moments(torch.zeros(2), torch.ones(2, 2), 100)  # two columns that are always equal
        >>> new, added = solve(twins, torch.tensor([[1.0], [1.0]]), [0], "least_squares", ridge=1e-9)
        >>> round(float(new), 6), float(added)
        (2.0, 0.0)
    """
    kept = weight[columns].double() if start is None else start.double()
    if method == "none":
        return kept, torch.zeros_like(weight[0], dtype=torch.float64)
    weight = _joint(weight.double(), moments)
    mean = moments.mean.to(weight)
    if method in REFITS and columns:
        second = moments.covariance.to(weight)
        if method not in INTERCEPTS:
            second = second + torch.outer(mean, mean)
        pull = ridge * second.diagonal().mean()
        left = second[columns][:, columns] + pull * torch.eye(len(columns), dtype=weight.dtype, device=weight.device)
        if bool(second.any()):  # heads that never vary leave nothing to learn
            kept = _solved(left, second[columns] @ weight + pull * kept)
    if method not in INTERCEPTS:
        return kept, torch.zeros_like(weight[0])
    return kept, mean @ weight - mean[columns] @ kept


def _joint(weight: Tensor, moments: Moments) -> Tensor:
    """``weight`` with zeros for the columns that only the moments have: running means are read by nobody before."""
    return nn.functional.pad(weight, (0, 0, 0, len(moments.mean) - len(weight)))


def _solved(left: Tensor, right: Tensor) -> Tensor:
    """``left^-1 right``.

    Raises:
        MeasureError: ``left`` has no inverse.
    """
    solved: Tensor
    solved, failed = torch.linalg.solve_ex(left, right)
    if bool(failed):
        raise MeasureError(
            "the covariance of the heads that stay has no inverse, and ridge is 0 or too small to give it one; give a "
            "larger ridge (1e-3), or more text"
        )
    return solved


def loss(moments: Moments, weight: Tensor, columns: list[int], new: Tensor, added: Tensor) -> float:
    """Expected squared change of the layer's output, over the output's variance; 0 where the output never varies."""
    before = _joint(weight.double(), moments)
    change = before.clone()
    change[columns] -= new
    covariance = moments.covariance.to(change.device)
    constant = moments.mean.to(change.device) @ change - added
    changed = float((change * (covariance @ change)).sum() + constant.square().sum())
    whole = float((before * (covariance @ before)).sum())
    return max(0.0, changed) / whole if whole > 0 else 0.0


def columns_of(block: Block, heads: Iterable[int], carriers: Carriers) -> list[int]:
    """For what is left of a block which columns of the heads' outputs and running means feed W_O.

    Args:
        block: the block before the cut.
        heads: those that are left.
        carriers: those of them that put out the running mean of their key-value head.

    Example:
        >>> block = Block("attn", query_heads=3, kv_heads=2, d_k=1, d_v=1, kv_map=(0, 1, 1))
        >>> columns_of(block, [0, 1], {1: (1, 2)})
        [0, 4]
    """
    places = [block.query_heads + block.kv_map[head] if head in carriers else head for head in heads]
    return head_rows(places, block.d_v)


def merged(block: Block, heads: Iterable[int], carriers: Carriers, whole: Tensor) -> Tensor:
    """W_O of what is left (k, E), float64: that of a carrier is the sum over the heads that it stands for."""
    parts = whole.double().view(block.query_heads, block.d_v, -1)
    left = [parts[list(carriers.get(head, (head,)))].sum(0) for head in heads]
    return torch.cat(left) if left else parts.new_zeros(0, whole.shape[1])


def repair(
    root: nn.Module,
    block: Block,
    kept: Kept,
    whole: Tensor,
    moments: Moments,
    method: str,
    ridge: float,
    carriers: Carriers | None = None,
) -> Repaired:
    """Give the output projection of a cut block its new weights and intercept.

    Args:
        root: the model, cut.
        block: the block before the cut.
        kept: what is left of it.
        whole: W_O before the cut (h d_v, E).
        moments: of the head outputs before the cut, and of the running means where there are carriers.
        method, ridge: see :func:`solve`.
        carriers: heads that put out the running mean of their key-value head, and those that they stand for.
    """
    assert block.o is not None
    means = carriers or {}
    columns, start = columns_of(block, kept.heads, means), merged(block, kept.heads, means, whole)
    new, added = solve(moments, whole, columns, method, ridge, start)
    nothing = torch.zeros_like(added)
    lost = loss(moments, whole, columns, start, nothing)
    left = loss(moments, whole, columns, new, added)
    _put(root.get_submodule(block.o.parameter), new, added, transposed=block.o.transposed)
    return Repaired(block.o.parameter, lost, left, moments.rows, len(columns))


def constants(root: nn.Module, block: Block, heads: Iterable[int], whole: Tensor, moments: Moments) -> None:
    """Add the mean output of ``heads``, which went, to the bias of the output projection."""
    assert block.o is not None
    columns = head_rows(tuple(heads), block.d_v)
    added = moments.mean.to(whole.device)[columns] @ whole.double()[columns]
    _put(root.get_submodule(block.o.parameter), None, added, transposed=block.o.transposed)


def _put(owner: nn.Module, new: Tensor | None, added: Tensor, *, transposed: bool) -> None:
    layer: Any = owner
    weight = layer.weight
    if not bool(torch.isfinite(added).all()) or (new is not None and not bool(torch.isfinite(new).all())):
        raise MeasureError("the repair gave values that are not finite; take the statistics again, on more text")
    with torch.no_grad():
        if new is not None:
            weight.copy_((new if transposed else new.T).to(weight.dtype))
        if layer.bias is not None:
            layer.bias.copy_((layer.bias.double() + added).to(weight.dtype))
        elif bool(added.any()):
            layer.bias = nn.Parameter(added.to(weight.dtype), requires_grad=weight.requires_grad)

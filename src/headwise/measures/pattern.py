"""What a head looks at, and how much it writes: measured from row statistics, never n x n.

The observer asks the kernels for each call's row statistics and for the weight on a few chosen
keys per query, turns them into one number per row, and folds the rows of real tokens (and, apart,
of special tokens) into moments per head.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.data import Batch
from headwise.heads import RowClass
from headwise.kernels import Problem, Rows, Wanted, visible_at
from headwise.layout import Site
from headwise.measures.definitions import PATTERN_MEASURES
from headwise.measures.moments import SiteMoments
from headwise.measures.output import ResultNorm
from headwise.models import AttentionCall
from headwise.trace import SPECIAL, TOKEN, row_kinds, row_offset

__all__ = ["PatternObserver"]

_SELF_TARGETS: Final = ("previous_weight", "next_weight", "own_weight", "first_weight")
_CROSS_TARGETS: Final = ("first_weight",)
_POSITIONS_DIFFER: Final = "cross-attention: query and key positions belong to different sequences"
_KINDS: Final[tuple[tuple[RowClass, int], ...]] = (("token", TOKEN), ("special", SPECIAL))
_NEVER_SEEN: Final = "no row may see this key"


class PatternObserver:
    """Collects every measure of :data:`~headwise.measures.PATTERN_MEASURES` for every head.

    Use it with :func:`headwise.trace.run`, or through :func:`headwise.scan`.
    """

    def __init__(self) -> None:
        self.sites: dict[Site, SiteMoments] = {}
        self.absent: dict[str, dict[Site, str]] = {name: {} for name in PATTERN_MEASURES}
        self._norm = ResultNorm()

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted:  # noqa: ARG002
        """Row statistics of every call; distance and neighbours where positions are comparable."""
        return Wanted(rows=True, distance=site.key.kind == "self", pairs=_targets(site, problem))

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Fold one call's rows into the moments of its heads."""
        rows = call.answer.rows
        if rows is None:
            raise AssertionError("the kernels returned no row statistics although they were asked for")
        kinds = row_kinds(call.site, call.problem, batch)
        values = dict(_row_values(call.problem, rows, call.site))
        values["z_norm"] = (call.z.float().norm(dim=-1), None)
        result = self._norm.of(call)
        if isinstance(result, str):
            self.absent["result_norm"][call.site] = result
        else:
            values["result_norm"] = (result, None)
        if call.site.key.kind == "cross":
            for name in ("distance", "previous_weight", "next_weight", "own_weight"):
                self.absent[name][call.site] = _POSITIONS_DIFFER
        moments = self.sites.setdefault(call.site, SiteMoments(call.problem.q.shape[1], tuple(PATTERN_MEASURES)))
        sees = rows.visible.expand(call.z.shape[:3]) > 0
        for row_class, kind in _KINDS:
            counted = sees & (kinds == kind)[:, None, :]
            moments.add(row_class, values, counted)

    def finish(self) -> None:
        """Give a reason for every measure that no row of a site had a value for."""
        for site, moments in self.sites.items():
            for name in PATTERN_MEASURES:
                if site not in self.absent[name] and not moments.any_rows(name):
                    self.absent[name][site] = _NEVER_SEEN


def _targets(site: Site, problem: Problem) -> Tensor:
    """Key positions (P, B or 1, Q) that the named weights of a site are about; -1 for none."""
    keys, device = problem.k.shape[2], problem.q.device
    padding = problem.visible.key_padding
    if padding is None:
        first = torch.zeros(1, dtype=torch.int64, device=device)
    else:
        real = padding[:, :keys].to(device)
        first = torch.where(real.any(-1), real.int().argmax(-1), -1)
    own = torch.arange(problem.q.shape[2], device=device) + row_offset(problem)
    first_BQ = first[:, None].expand(-1, own.shape[0])
    if site.key.kind == "cross":
        return first_BQ[None]
    around = [torch.where((at >= 0) & (at < keys), at, -1).expand_as(first_BQ) for at in (own - 1, own + 1, own)]
    return torch.stack([*around, first_BQ])


def _row_values(problem: Problem, rows: Rows, site: Site) -> list[tuple[str, tuple[Tensor, Tensor | None]]]:
    """Each measure's value per row (B, H, Q), with the rows that have one (None: all)."""
    several = rows.visible > 1
    log_visible = rows.visible.clamp(min=2).to(rows.entropy.dtype).log()
    values: list[tuple[str, tuple[Tensor, Tensor | None]]] = [
        ("entropy", (rows.entropy, None)),
        ("normalized_entropy", (rows.entropy / log_visible, several)),
        ("max_weight", (rows.max_weight, None)),
    ]
    if rows.distance is not None:
        values.append(("distance", (rows.distance, None)))
    if rows.pairs is not None:
        targets = _targets(site, problem)
        seen = visible_at(problem, targets)
        names = _CROSS_TARGETS if site.key.kind == "cross" else _SELF_TARGETS
        values.extend((name, (rows.pairs[at], seen[at])) for at, name in enumerate(names))
    return values

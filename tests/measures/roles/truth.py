"""The truth for roles: full float64 patterns from transformers' own eager attention, and plain loops over rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import headwise as hw


@dataclass
class Row:
    """Weights of one row over units, and the units that count as hit; all heads."""

    score: Tensor  # (H,)
    hit: Tensor  # (H,)


@dataclass
class Truth:
    rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict)

    def score(self, role: str, site: str) -> list[float]:
        return torch.stack([row.score for row in self.rows[role, site]]).mean(0).tolist()

    def share(self, role: str, site: str) -> list[float]:
        return torch.stack([row.hit.double() for row in self.rows[role, site]]).mean(0).tolist()


def patterns(model: hw.Model, ids: list[int]) -> dict[str, Tensor]:
    """(H, N, N) float64 per site for one passage alone."""
    module = copy.deepcopy(model.module).double().eval()
    module.set_attn_implementation("eager")
    with torch.no_grad():
        found = module(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    return {str(site.key): weights[0] for site, weights in zip(model.layout.sites, found, strict=True)}


def truth_of(
    model: hw.Model, passages: list[list[int]], rows: Callable[[int, list[int]], dict[str, list[tuple]]]
) -> Truth:
    """``rows(passage, ids)`` gives for each role tuples (queries, targets, units, candidates, renormalised)."""
    truth = Truth()
    causal = {str(site.key): site.causal for site in model.layout.sites}
    for index, ids in enumerate(passages):
        named = rows(index, ids)
        for site, weights in patterns(model, ids).items():
            for role, listed in named.items():
                for one in listed:
                    row = _row(weights, causal[site], *one)
                    if row is not None:
                        truth.rows.setdefault((role, site), []).append(row)
    return truth


def _row(weights: Tensor, causal: bool, queries, targets, units, candidates, renormalised) -> Row | None:
    def seen(unit: int) -> bool:
        return not causal or any(key <= query for key in units[unit] for query in queries)

    competing = [unit for unit in candidates if seen(unit)]
    there = [unit for unit in targets if unit in competing]
    if len(competing) < 2 or not there:
        return None
    on = torch.stack(
        [weights[:, list(queries)][:, :, list(units[unit])].sum(-1).mean(-1) for unit in competing], dim=-1
    )
    best = on.argmax(-1)
    place = [competing.index(unit) for unit in there]
    score = on[:, place].sum(-1)
    if renormalised:
        score = score / on.sum(-1)
    return Row(score, sum((best == one).long() for one in place) > 0)

"""The truth that scans are judged by: the same model in float64, eager, with its own weights returned.

Nothing of headwise computes anything here: rows come from what transformers returns, and z from
what enters the model's own output projection.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.heads import HeadTable
from headwise.layout import HeadLayout, SiteKey

#: entropy in absolute nats; everything else relative 1e-4 or absolute 1e-5
ENTROPY = 1e-4
RELATIVE, ABSOLUTE = 1e-4, 1e-5


@dataclass
class Truth:
    """Per site and measure all values of the rows that count, one list a head."""

    values: dict[tuple[SiteKey, str], list[list[float]]] = field(default_factory=dict)

    def add(self, key: SiteKey, measure: str, value_BHQ: Tensor, counted_BHQ: Tensor) -> None:
        per_head = self.values.setdefault((key, measure), [[] for _ in range(value_BHQ.shape[1])])
        counted = counted_BHQ.expand_as(value_BHQ)
        for head, found in enumerate(per_head):
            found.extend(value_BHQ[:, head][counted[:, head]].tolist())


def truth_of(
    module: nn.Module, layout: HeadLayout, batches: Iterable[tuple[Mapping[str, Tensor], dict[str, Tensor]]]
) -> Truth:
    """Run ``module`` in float64 and eager over batches of (inputs, rows that count by stack)."""
    model = copy.deepcopy(module).double().eval()
    model.set_attn_implementation("eager")
    truth = Truth()
    for inputs, counted in batches:
        cast = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        captured: dict[str, list[Tensor]] = {}
        hooks = [_capture(model, block.o_path, captured) for block in layout.blocks.values() if block.o_path]
        try:
            with torch.no_grad():
                output = model(**cast, output_attentions=True)
        finally:
            for hook in hooks:
                hook.remove()
        patterns = _patterns(output, layout)
        for site in layout.sites:
            rows = counted[site.key.stack] if site.key.stack in counted else counted["input"]
            pattern = patterns[site.key]
            _add_pattern(truth, site.key, pattern, rows.bool(), site.key.kind == "self")
            block = layout.blocks[site.block]
            if block.o_path:
                _add_norms(truth, site.key, captured[block.o_path][site.key.call], model, block, rows.bool(), pattern)
    return truth


def _capture(model: nn.Module, path: str, into: dict[str, list[Tensor]]) -> Any:
    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        into.setdefault(path, []).append(args[0].detach())

    return model.get_submodule(path).register_forward_pre_hook(hook)


def _patterns(output: Any, layout: HeadLayout) -> dict[SiteKey, Tensor]:
    """Match what the model returned with the layout's sites, by stack, kind and order."""
    named = {
        ("encoder", "self"): ("encoder_attentions", "attentions"),
        ("decoder", "self"): ("decoder_attentions", "attentions"),
        ("decoder", "cross"): ("cross_attentions",),
        ("vision", "self"): ("attentions",),
        ("audio", "self"): ("attentions",),
    }
    found: dict[SiteKey, Tensor] = {}
    for group in dict.fromkeys((site.key.stack, site.key.kind) for site in layout.sites):
        sites = [site for site in layout.sites if (site.key.stack, site.key.kind) == group]
        returned = next(got for name in named[group] if (got := getattr(output, name, None)) is not None)
        assert len(returned) == len(sites), (group, len(returned), len(sites))
        found.update({site.key: pattern for site, pattern in zip(sites, returned, strict=True)})
    return found


def _add_pattern(truth: Truth, key: SiteKey, pattern: Tensor, rows_BQ: Tensor, positions: bool) -> None:
    batch, _, queries, keys = pattern.shape
    seen = _seen(pattern)
    visible = seen.sum(-1)
    counted = rows_BQ[:, None, :] & (visible > 0)
    mass = pattern.sum(-1, keepdim=True)
    own = pattern / mass
    entropy = -(own * torch.where(own > 0, own, 1.0).log()).sum(-1)
    truth.add(key, "entropy", entropy, counted)
    truth.add(key, "normalized_entropy", entropy / visible.clamp(min=2).log(), counted & (visible > 1))
    truth.add(key, "max_weight", pattern.amax(-1), counted)
    any_seen = seen.any(1).any(1)
    first = any_seen.int().argmax(-1)[:, None].expand(batch, queries)
    targets = {"first_weight": first}
    if positions:
        at = torch.arange(queries)[None].expand(batch, queries) + keys - queries
        gap = (at[:, :, None] - torch.arange(keys)).abs()
        truth.add(key, "distance", (own * gap[:, None]).sum(-1), counted)
        targets |= {"previous_weight": at - 1, "next_weight": at + 1, "own_weight": at}
    for name, target in targets.items():
        inside = (target >= 0) & (target < keys)
        index = target.clamp(0, keys - 1)[:, None, :, None].expand(*pattern.shape[:3], 1)
        weight, sees = pattern.gather(-1, index)[..., 0], seen.gather(-1, index)[..., 0]
        truth.add(key, name, weight, counted & sees & inside[:, None])


def _seen(pattern: Tensor) -> Tensor:
    """Keys that a row may see: those with weight in any head, since a sharp head's weights underflow in float32."""
    return (pattern > 0).any(1, keepdim=True).expand_as(pattern)


def _add_norms(
    truth: Truth, key: SiteKey, z_BQE: Tensor, model: nn.Module, block: Any, rows: Tensor, pattern: Tensor
) -> None:
    heads, width = block.query_heads, block.d_v
    z = z_BQE.reshape(pattern.shape[0], pattern.shape[2], heads, width).transpose(1, 2)
    holder = model.get_submodule(block.o_path)
    weight = holder.weight if type(holder).__name__ == "Conv1D" else holder.weight.T
    result = torch.einsum("bhqd,hde->bhqe", z, weight.reshape(heads, width, -1))
    counted = rows[:, None, :] & _seen(pattern).any(-1)
    truth.add(key, "z_norm", z.norm(dim=-1), counted)
    truth.add(key, "result_norm", result.norm(dim=-1), counted)


def disagreements(table: HeadTable, truth: Truth) -> list[str]:
    """Every number of ``table`` (token rows) that is not the truth's, with both."""
    wrong = []
    for name in table.measures:
        mean, std, count = table.mean(name), table.std(name), table.count(name)
        for at, head in enumerate(table.heads):
            expected = truth.values.get((head.site, name))
            if expected is None or not expected[head.head]:
                if count[at]:
                    wrong.append(f"{name} {head}: {count[at]} rows, expected none")
                continue
            rows = np.asarray(expected[head.head])
            limit = ENTROPY if name == "entropy" else max(ABSOLUTE, RELATIVE * abs(rows.mean()))
            if count[at] != len(rows):
                wrong.append(f"{name} {head}: {count[at]} rows, expected {len(rows)}")
            elif not abs(mean[at] - rows.mean()) <= limit:
                wrong.append(f"{name} {head}: mean {mean[at]:.8g}, expected {rows.mean():.8g}")
            elif not abs(std[at] - rows.std()) <= max(limit, RELATIVE * rows.std()):
                wrong.append(f"{name} {head}: std {std[at]:.8g}, expected {rows.std():.8g}")
    return wrong

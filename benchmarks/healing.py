"""What healing gives: SmolLM2 without 40 % of its query heads, repaired, then trained towards its original.

    python -m benchmarks.healing FOLDER [--steps 200] [--window 128] [--share 0.4] [--rate 1e-4] [--held 12]

Calibrated on 16 windows of 512 tokens of the novels and healed on as many windows as there are steps; the perplexities
are those of the ends of the novels and of the handbook, which neither saw. Checkpoints are kept in FOLDER, so that the
same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import nn

import headwise as hw
from benchmarks.pruning import CONSOLE, MODELS, TEXTS, windows
from headwise.surgery import Healing, heal


def perplexity(module: nn.Module, text: list[dict[str, list[int]]]) -> float:
    """Of next tokens, by the model's own loss."""
    total = 0.0
    with torch.no_grad():
        for one in text:
            ids = torch.tensor([one["input_ids"]])
            total += float(module(input_ids=ids, labels=ids).loss)
    return math.exp(total / len(text))


def main() -> None:
    """Prune, measure, heal, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument(
        "--held", type=int, default=12, help="windows of 512 tokens to measure on, of the end of each text"
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    model = hw.load(MODELS / "smollm2", dtype="float32")
    held = {name: windows(model, file, 512, asked.held, end=True) for name, file in TEXTS.items()}
    seen = windows(model, TEXTS["novels"], 512, 16)
    plan = hw.plan(model, inputs=seen, keep=1 - asked.share, batch_size=1)
    small = hw.prune(model, plan, inputs=seen, batch_size=1)
    rows = {"original": {name: perplexity(model.module, text) for name, text in held.items()}}
    rows["repaired"] = {name: perplexity(small.module, text) for name, text in held.items()}
    tell(rows, "repaired")
    began = time.monotonic()
    read = windows(model, TEXTS["novels"], asked.window, asked.steps)
    batches = [{"input_ids": torch.tensor([one["input_ids"]])} for one in read]
    how = Healing(asked.steps, rate=asked.rate, folder=asked.folder, every=20)
    said = heal(small.module, model.module, batches, how, data=TEXTS["novels"])
    rows["healed"] = {name: perplexity(small.module, text) for name, text in held.items()}
    tell(rows, "healed")
    CONSOLE.print(f"{said}; {time.monotonic() - began:.0f} s", highlight=False)
    if asked.json is not None:
        asked.json.write_text(json.dumps({**rows, "heal": said}), encoding="utf-8")


def tell(rows: dict[str, dict[str, float]], which: str) -> None:
    """Perplexities and their rise over the original's."""
    for name, value in rows[which].items():
        base = rows["original"][name]
        CONSOLE.print(f"{which}, {name}: {base:.2f} -> {value:.2f} ({value / base - 1:+.2%})", highlight=False)


if __name__ == "__main__":
    main()

"""Every model type of the installed transformers, measured and compared with its own eager attention in float64.

    python tests/models/conformance.py [--json FILE] [TYPE ...]

Prints one line per type and the counts: exact, refused (and why), not built (and why), WRONG.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo
from transformers import CONFIG_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.utils import logging

from headwise.errors import HeadwiseError
from headwise.kernels import Wanted
from headwise.models import discover, observe
from headwise.models.discovery import MODEL_FAILURES
from headwise.models.examples import candidates, padded
from headwise.models.probe import run_model


class Rows:
    """Collects entropy, largest weight and visible keys of every call, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor, Tensor, Tensor]] = []

    def want(self, site: Any, problem: Any) -> Wanted:
        return Wanted(rows=True)

    def see(self, call: Any) -> None:
        rows = call.answer.rows
        largest = rows.max_weight if rows.sink is None else rows.max_weight / (1 - rows.sink)
        self.calls.append((str(call.site.key), rows.entropy, largest, rows.visible))


@contextmanager
def eager_weights(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the weights that the model's own eager functions return, in order."""
    kept: list[Tensor] = []
    undo: list[tuple[dict[str, Any], str, Any]] = []
    spaces = {
        id(sys.modules[type(part).__module__]): sys.modules[type(part).__module__].__dict__ for part in model.modules()
    }

    def recording(function: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            output, weights = function(*args, **kwargs)
            kept.append(weights)
            return output, weights

        return recorded

    for space in spaces.values():
        for name, value in list(space.items()):
            if "eager_attention_forward" in name and callable(value):
                undo.append((space, name, value))
                space[name] = recording(value)
    try:
        yield kept
    finally:
        for space, name, value in undo:
            space[name] = value


def entropy_of(weights: Tensor) -> tuple[Tensor, Tensor]:
    total = weights.sum(-1, keepdim=True).clamp(min=1e-300)
    share = weights / total
    return -torch.special.xlogy(share, share).sum(-1), weights.amax(-1)


def set_eager(model: nn.Module) -> None:
    from headwise.models.restore import configs_of

    for config in configs_of(model):
        config._attn_implementation_internal = "eager"


def first_that_runs(model: nn.Module) -> dict[str, Any]:
    for inputs in candidates(model):
        try:
            with torch.no_grad():
                run_model(model, inputs)
        except MODEL_FAILURES:
            continue
        return inputs
    raise AssertionError


def left_padded(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The same with two positions of padding before the first row; None where the model takes none."""
    shifted = padded(model, inputs)
    if shifted is None:
        return None
    shifted["attention_mask"] = shifted["attention_mask"].flip(1)
    try:
        with torch.no_grad():
            run_model(model, shifted)
    except MODEL_FAILURES:
        return None
    return shifted


def compare(model: nn.Module, inputs: dict[str, Any]) -> tuple[str, float]:
    """What is wrong, or how far the rows are from eager attention in float64."""
    rows = Rows()
    with torch.no_grad(), observe(model, rows):
        run_model(model, inputs)
    truth = copy.deepcopy(model).double()
    set_eager(truth)
    doubled = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = lambda **given: eager_mask(**{**given, "dtype": torch.float32})
    try:
        with torch.no_grad(), eager_weights(truth) as kept:
            try:
                run_model(truth, doubled)
            except RuntimeError as failure:
                if "ouble" not in str(failure) and "overflow" not in str(failure):
                    raise
                kept.clear()
            if not all(weights is None or bool(torch.isfinite(weights).all()) for weights in kept):
                kept.clear()
            if (
                not kept
            ):  # kernels without float64, or masks of its own whose float64 minimum is -inf in its float32 softmax
                run_model(truth.float(), inputs)
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    if len(kept) != len(rows.calls):
        return f"{len(rows.calls)} calls seen, {len(kept)} eager calls", 0.0
    worst = 0.0
    for (name, entropy, largest, visible), weights in zip(rows.calls, kept, strict=True):
        if weights is None:
            return f"{name}: no eager weights", 0.0
        expected, _ = entropy_of(weights)
        share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        peak = share.amax(-1)  # a family that applies its sinks to the output returns weights without them
        seeing = (visible > 0).expand(entropy.shape)
        if expected.shape != entropy.shape:
            return f"{name}: shapes {tuple(expected.shape)} {tuple(entropy.shape)}", 0.0
        for mine, theirs in ((entropy, expected), (largest, peak)):
            off = ((mine.double() - theirs).abs() - 1e-4 * theirs.abs())[seeing]
            worst = max(worst, off.max().item() if off.numel() else 0.0)
            if not bool(torch.isfinite(off).all()):
                return f"{name}: not finite", 0.0
    return "", worst


def judge(model_type: str) -> tuple[str, str]:
    try:
        with torch.random.fork_rng():
            model = zoo.build(model_type)
    except Exception as failure:  # noqa: BLE001
        return "not built", f"{type(failure).__name__}: {str(failure)[:150]}"
    try:
        layout = discover(model)
        inputs = first_that_runs(model)
    except HeadwiseError as refusal:
        return ("no example" if "does not run on" in str(refusal) or "example=" in str(refusal) else "refused"), str(
            refusal
        )[:300]
    worst = 0.0
    for given in (inputs, left_padded(model, inputs)):
        if given is None:
            continue
        problem, off = compare(model, given)
        if problem and "implementations" in dict(layout.facts):
            return "as set", f"eager differs from the default in transformers itself: {problem}"
        if problem:
            return "WRONG", problem
        worst = max(worst, off)
    if not worst <= 1e-4:
        if "implementations" in dict(layout.facts):
            return "as set", f"eager differs from the default in transformers itself, by {worst:.2g}"
        return "WRONG", f"off by {worst:.2g}"
    notes = f"{len(layout.sites)} sites, {dict(layout.facts)['masks'][:90]}"
    if any(block.o is None for block in layout.blocks.values()):
        notes += "; W_O: " + next(dict(b.unknown)["o"] for b in layout.blocks.values() if b.o is None)[:80]
    if layout.uncovered:
        notes += f"; {len(layout.uncovered)} uncovered"
    return "exact", notes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results = {}
    for model_type in arguments.types or sorted(CONFIG_MAPPING):
        if zoo.safe_class(model_type) is None:
            continue

        def late(*_: Any) -> None:
            raise TimeoutError("more than 40 s")

        signal.signal(signal.SIGALRM, late)
        signal.alarm(40)
        try:
            verdict = judge(model_type)
        except Exception as failure:
            verdict = "FAILED", f"{type(failure).__name__}: {str(failure)[:300]}"
            if len(arguments.types) == 1:
                raise
        finally:
            signal.alarm(0)
        results[model_type] = verdict
        print(f"{model_type:32} {verdict[0]:10} {verdict[1]}", flush=True)
    print(collections.Counter(kind for kind, _ in results.values()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

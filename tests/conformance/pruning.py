"""One model type, pruned in five ways: compared with gated, saved, loaded in another process, generated from.

Weights are random in every parameter, so that heads differ also where a constructor makes them alike. A plan is *exact*
where the pruned model equals the original under ``hw.gate``, end to end; it may be *refused*, by name; anything else is
WRONG. Folders are read by a second process that never saw the original.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import zoo
from judging import patiently
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from headwise.errors import HeadwiseError
from headwise.layout import HeadId, HeadLayout
from headwise.models import discover, gate
from headwise.models.discovery import MODEL_FAILURES
from headwise.models.examples import candidates
from headwise.models.probe import run_model, tensors_of
from headwise.models.restore import unchanged
from headwise.surgery import prune

__all__ = ["PLANS", "Pruned", "apart", "judge_pruning", "outputs"]

#: What end-to-end float noise may be, as a part of the largest output of a small model in float32.
NOISE = 2e-4
TOKENS = 5
PATIENCE = 300
#: The plans, in the order of the page.
PLANS = ("head", "group", "uneven", "uniform", "layer")
#: BigBird puts another attention in the place of its own on short inputs; this is the one that can be cut.
FIELDS = {name: {"attention_type": "original_full"} for name in ("big_bird", "bigbird_pegasus")}

Plan = dict[str, list[int]]


@dataclass
class Pruned:
    """What came out for one type.

    Attributes:
        model_type: its name in transformers.
        verdict: ``"exact"`` (every plan, saved and loaded), ``"partly"`` (some plans; the others are refused),
            ``"refused"``, ``"not measured"`` (no heads were found, see the table of measures), ``"WRONG"``,
            ``"FAILED"``.
        reason: why, where it is not exact.
        plans: for each plan ``"exact"`` or ``"refused: why"``.
        saved: for each exact plan ``"own"``, or ``"stock"`` where plain transformers loads it and gives the same.
        generate: ``"exact: with which caches"``, ``"-"`` where the type does not generate, or why not.
    """

    model_type: str
    verdict: str = ""
    reason: str = ""
    plans: dict[str, str] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)
    generate: str = ""


def randomised(model: Any) -> Any:
    """``model`` with noise on every parameter."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=draw) * 0.05)
    return model


def plans_of(layout: HeadLayout) -> dict[str, Plan]:
    """One head, one group, an uneven choice, the same of every layer, a whole layer."""
    blocks = layout.blocks
    several = {path: block for path, block in blocks.items() if block.query_heads > 1}
    found: dict[str, Plan] = {}
    if several:
        path, block = next(iter(several.items()))
        last, other = list(several.items())[-1]
        found["head"] = {path: [1]}
        if block.kv_heads > 1:
            found["group"] = {
                path: [head for head in range(block.query_heads) if block.kv_map[head] == block.kv_heads - 1]
            }
        uneven: Plan = {path: [0], last: list(range(1, other.query_heads))}
        found["uneven"] = uneven if path != last else {path: [0, *range(2, block.query_heads)][: block.query_heads - 1]}
    if several and len({(block.query_heads, block.kv_heads) for block in blocks.values()}) == 1:
        groups = {path: block.kv_heads - 1 for path, block in several.items() if block.kv_heads > 1}
        found["uniform"] = {
            path: [head for head in range(blocks[path].query_heads) if blocks[path].kv_map[head] == group]
            for path, group in groups.items()
        } or {path: [1] for path in several}
    path, block = list(blocks.items())[-1]
    found["layer"] = {path: list(range(block.query_heads))}
    return found


def outputs(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Outputs in eval mode without gradients."""
    with unchanged(model):
        return tensors_of(run_model(model, inputs))


def gated(model: nn.Module, layout: HeadLayout, plan: Plan) -> Any:
    """The gate that the plan amounts to."""
    return gate(model, [HeadId(site.key, head) for site in layout.sites for head in plan.get(site.block, ())])


def apart(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest difference, over the largest value."""
    worst, largest = 0.0, 1e-9
    if len(left) != len(right):
        return float("inf")
    for one, two in zip(left, right, strict=True):
        if one.shape != two.shape:
            return float("inf")
        if one.is_floating_point() and one.numel():
            finite = torch.isfinite(one)
            if not torch.equal(finite, torch.isfinite(two)):
                return float("inf")
            worst = max(worst, float((one - two)[finite].abs().max()) if bool(finite.any()) else 0.0)
            largest = max(largest, float(one[finite].abs().max()) if bool(finite.any()) else 0.0)
    return worst / largest


class _Reader:
    """The second process; started when it is needed, and again after it was ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, **told: Any) -> tuple[str, str]:
        if self.process is None or self.process.poll() is not None:
            script = Path(__file__).parent / "pruning_reader.py"
            self.process = subprocess.Popen(
                [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(told), file=self.process.stdin, flush=True)
        ours, plain = json.loads(self.process.stdout.readline())
        return ours, plain

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()
            self.process = None


_READER = _Reader()
atexit.register(_READER.end)


def _judge(model_type: str) -> Pruned:
    found = Pruned(model_type)
    try:
        with torch.random.fork_rng():
            model = randomised(zoo.build(model_type, FIELDS.get(model_type)))
    except TimeoutError:
        raise
    except Exception as failure:  # noqa: BLE001
        found.verdict, found.reason = "not measured", f"not built small: {type(failure).__name__}"
        return found
    try:
        layout = discover(model)
    except HeadwiseError as refusal:
        found.verdict, found.reason = "not measured", " ".join(str(refusal).split())[:120]
        return found
    inputs = _first_that_runs(model)
    before = outputs(model, inputs)
    for name, plan in plans_of(layout).items():
        found.plans[name] = _pruned(model, layout, inputs, plan, name, found)
    found.generate = generates(model_type)
    if apart(before, outputs(model, inputs)) != 0:
        found.plans["head"] = "WRONG: the original changed"
    return found


def _first_that_runs(model: nn.Module) -> dict[str, Any]:
    for inputs in candidates(model):
        try:
            outputs(model, inputs)
        except MODEL_FAILURES:
            continue
        return inputs
    raise AssertionError("heads were found on an input that the model does not take")


def _pruned(
    model: nn.Module, layout: HeadLayout, inputs: Mapping[str, Any], plan: Plan, name: str, found: Pruned
) -> str:
    """What became of one plan."""
    try:
        small = prune(model, plan, repair="none")
    except HeadwiseError as refusal:
        return f"refused: {' '.join(str(refusal).split())[:300]}"
    with gated(model, layout, plan):
        expected = outputs(model, inputs)
    result = outputs(small.module, inputs)
    off = apart(expected, result)
    if not off <= NOISE:
        return f"WRONG: off by {off:.2g}"
    sizes = [sum(value.numel() for value in one.parameters()) for one in (small.module, model)]
    if not sizes[0] < sizes[1]:
        return "WRONG: nothing is smaller"
    again = discover(small.module, inputs)
    for path, heads in plan.items():
        left = layout.blocks[path].query_heads - len(heads)
        if again.blocks[path].query_heads != left:
            return f"WRONG: {path} is found with {again.blocks[path].query_heads} heads, not {left}"
    found.saved[name] = _saved(small, inputs, result)
    return "exact"


def _saved(small: Any, inputs: Mapping[str, Any], expected: list[Tensor]) -> str:
    """What became of saving, loading elsewhere, and plain transformers."""
    with tempfile.TemporaryDirectory() as folder:
        place, case = Path(folder) / "small", Path(folder) / "case.pt"
        try:
            small.save(place)
        except HeadwiseError as refusal:
            return f"refused: {str(refusal)[:200]}"
        stock = (place / "model.safetensors").exists()
        torch.save({"inputs": dict(inputs), "expected": expected}, case)
        kind = type(small.module)
        ours, plain = _READER.ask(place=str(place), case=str(case), home=kind.__module__, name=kind.__name__)
    if ours != "equal":
        return f"WRONG: loaded {ours}"
    if stock and plain != "equal":
        return f"WRONG: saved as a transformers checkpoint, and plain transformers gives {plain}"
    if not stock and not plain.startswith("refused"):
        return f"WRONG: plain transformers {plain}"
    return "stock" if stock else "own"


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}


def generates(model_type: str) -> str:
    """Whether the language model of a type, pruned unevenly, generates what it generates with the heads gated."""
    kind = CONFIG_MAPPING[model_type]
    mappings = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    mapping = next((one for one in mappings if kind in one), None)
    if mapping is None:
        return "-"
    try:
        found = mapping[kind]
        chosen = found[0] if isinstance(found, tuple) else found
        model = randomised(zoo.build(model_type, FIELDS.get(model_type), kind=chosen))
        if not model.can_generate():
            return "-"
        layout = discover(model)
        asked: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        if model.config.is_encoder_decoder:
            asked["decoder_start_token_id"] = 3
        ids = torch.tensor([[5, 7, 11, 13]])
        plan = plans_of(layout).get("uneven") or plans_of(layout)["layer"]
        with gated(model, layout, plan):
            model.generate(ids, **asked)
    except TimeoutError:
        raise
    except Exception as failure:  # noqa: BLE001
        return f"not by itself: {type(failure).__name__}: {str(failure)[:80]}"
    try:
        small: Any = prune(model, plan, repair="none").module
    except HeadwiseError as refusal:
        return f"refused: {str(refusal)[:120]}"
    done = []
    for name, options in CACHES.items():
        try:  # a model that sees what is to come gives other tokens with every cache, so each has its own truth
            with gated(model, layout, plan):
                truth = model.generate(ids, **asked, **options).tolist()
        except TimeoutError:
            raise
        except Exception:  # noqa: BLE001
            continue  # not a cache of this type
        if small.generate(ids, **asked, **options).tolist() != truth:
            return f"WRONG: other tokens with {name}"
        done.append(name)
    return "exact: " + ", ".join(done)


def verdict_of(found: Pruned) -> tuple[str, str]:
    """The verdict that the cells amount to, and the reason."""
    cells = [*found.plans.values(), *found.saved.values(), found.generate]
    wrong = [cell for cell in cells if cell.startswith("WRONG")]
    if wrong:
        return "WRONG", wrong[0]
    refused = [cell.removeprefix("refused: ") for cell in found.plans.values() if cell != "exact"]
    refused += [cell.removeprefix("refused: ") for cell in found.saved.values() if cell not in ("own", "stock")]
    if not refused:
        return "exact", ""
    return ("partly" if "exact" in found.plans.values() else "refused"), refused[0]


def judge_pruning(model_type: str) -> Pruned:
    """Build, prune in five ways, compare, save, load elsewhere, generate."""
    logging.disable_progress_bar()
    try:
        with patiently():
            found = _judge(model_type)
        if not found.verdict:
            found.verdict, found.reason = verdict_of(found)
        return found
    except Exception as failure:  # noqa: BLE001
        _READER.end()
        return Pruned(model_type, "FAILED", f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}")

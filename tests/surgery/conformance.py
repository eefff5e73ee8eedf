"""Every model type of the installed transformers, pruned in five ways, compared with gated, saved, loaded, generated.

    python tests/surgery/conformance.py [--json FILE] [TYPE ...]

Weights are random in every parameter, so that heads differ also where a constructor makes them alike. A plan is *exact*
where the pruned model equals the original under ``hw.gate``, end to end; it may be *refused*, by name; anything else is
WRONG. Folders are read by a second process that never saw the original.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
import zoo
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from headwise.errors import HeadwiseError
from headwise.layout import HeadId, HeadLayout
from headwise.models import discover, gate, load, wrap
from headwise.models.discovery import MODEL_FAILURES
from headwise.models.examples import candidates
from headwise.models.probe import run_model, tensors_of
from headwise.models.restore import unchanged
from headwise.surgery import prune

#: What end-to-end float noise may be, as a part of the largest output of a small model in float32.
NOISE = 2e-4
TOKENS = 5

Plan = dict[str, list[int]]


def randomised(model: nn.Module) -> nn.Module:
    """``model`` with noise on every parameter."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=draw) * 0.05)
    return model


def plans(layout: HeadLayout) -> dict[str, Plan]:
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


def judge(model_type: str, reader: Any) -> dict[str, str]:
    """What became of each plan, of saving and loading, of plain transformers, and of generation."""
    try:
        with torch.random.fork_rng():
            model = randomised(zoo.build(model_type))
    except Exception as failure:  # noqa: BLE001
        return {"built": f"no: {type(failure).__name__}: {str(failure)[:100]}"}
    try:
        layout = discover(model)
    except HeadwiseError as refusal:
        return {"built": f"not measured: {str(refusal)[:100]}"}
    found: dict[str, str] = {}
    inputs = first_that_runs(model)
    before = outputs(model, inputs)
    for name, plan in plans(layout).items():
        found[name] = pruned(model, layout, inputs, plan, name, found, reader)
    if apart(before, outputs(model, inputs)) != 0:
        found["original"] = "WRONG: it changed"
    found["generate"] = generates(model_type)
    return found


def first_that_runs(model: nn.Module) -> dict[str, Any]:
    """The first of the made inputs that the model takes."""
    for inputs in candidates(model):
        try:
            outputs(model, inputs)
        except MODEL_FAILURES:
            continue
        return inputs
    raise AssertionError


def pruned(
    model: nn.Module,
    layout: HeadLayout,
    inputs: Mapping[str, Any],
    plan: Plan,
    name: str,
    found: dict[str, str],
    reader: Any,
) -> str:
    """What became of one plan."""
    try:
        small = prune(model, plan, repair="none")
    except HeadwiseError as refusal:
        return f"refused: {str(refusal)[:300]}"
    with gated(model, layout, plan):
        expected = outputs(model, inputs)
    result = outputs(small.module, inputs)
    off = apart(expected, result)
    if not off <= NOISE:
        return f"WRONG: off by {off:.2g}"
    sizes = (
        sum(value.numel() for value in small.module.parameters()),
        sum(value.numel() for value in model.parameters()),
    )
    if not sizes[0] < sizes[1]:
        return "WRONG: nothing is smaller"
    again = discover(small.module, inputs)
    for path, heads in plan.items():
        left = layout.blocks[path].query_heads - len(heads)
        if again.blocks[path].query_heads != left:
            return f"WRONG: {path} is found with {again.blocks[path].query_heads} heads, not {left}"
    found[f"save {name}"] = saved(small, inputs, result, reader)
    return "exact"


def saved(small: Any, inputs: Mapping[str, Any], expected: list[Tensor], reader: Any) -> str:
    """What became of saving, loading elsewhere, and plain transformers."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "small"
        try:
            small.save(place)
        except HeadwiseError as refusal:
            return f"refused: {str(refusal)[:200]}"
        stock = (place / "model.safetensors").exists()
        torch.save({"inputs": dict(inputs), "expected": expected}, Path(folder) / "case.pt")
        reader.send(
            (str(place), str(Path(folder) / "case.pt"), type(small.module).__module__, type(small.module).__name__)
        )
        ours, plain = reader.recv()
    if ours != "equal":
        return f"WRONG: loaded {ours}"
    if stock and plain != "equal":
        return f"WRONG: saved as a transformers checkpoint, and plain transformers gives {plain}"
    if not stock and not plain.startswith("refused"):
        return f"WRONG: plain transformers {plain}"
    return "stock" if stock else "own"


def read(pipe: Any) -> None:
    """The second process: loads what it is told of and compares."""
    from importlib import import_module

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while (told := pipe.recv()) is not None:
        place, case, home, name = told
        stored = torch.load(case, weights_only=False)
        try:
            ours = compared(load(place).module, stored)
        except Exception as failure:  # noqa: BLE001
            ours = f"{type(failure).__name__}: {str(failure)[:200]}"
        try:
            plain = compared(getattr(import_module(home), name).from_pretrained(place).eval(), stored)
        except Exception as failure:  # noqa: BLE001
            plain = f"refused: {type(failure).__name__}: {str(failure)[:100]}"
        pipe.send((ours, plain))


def compared(model: nn.Module, stored: Mapping[str, Any]) -> str:
    """Whether a model gives bit for bit what is stored."""
    found = outputs(model, stored["inputs"])
    same = len(found) == len(stored["expected"]) and all(map(torch.equal, found, stored["expected"]))
    return "equal" if same else f"off by {apart(stored['expected'], found):.2g}"


def generates(model_type: str) -> str:
    """Whether the language model of a type, pruned unevenly, generates what it generates with the heads gated."""
    kind = CONFIG_MAPPING[model_type]
    mappings = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    mapping = next((one for one in mappings if kind in one), None)
    if mapping is None:
        return "-"
    try:
        found = mapping[kind]
        model: Any = randomised(zoo.build(model_type, kind=found[0] if isinstance(found, tuple) else found))
        if not model.can_generate():
            return "-"
        layout = discover(model)
        asked: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        if model.config.is_encoder_decoder:
            asked["decoder_start_token_id"] = 3
        ids = torch.tensor([[5, 7, 11, 13]])
        plan = plans(layout).get("uneven") or plans(layout)["layer"]
        with gated(model, layout, plan):
            truth = model.generate(ids, **asked).tolist()
    except Exception as failure:  # noqa: BLE001
        return f"not by itself: {type(failure).__name__}: {str(failure)[:80]}"
    try:
        small: Any = prune(wrap(model), plan, repair="none").module
    except HeadwiseError as refusal:
        return f"refused: {str(refusal)[:120]}"
    done = []
    for name, options in CACHES.items():
        try:
            model.generate(ids, **asked, **options)
        except Exception:  # noqa: BLE001
            continue  # not a cache of this type
        if small.generate(ids, **asked, **options).tolist() != truth:
            return f"WRONG: other tokens with {name}"
        done.append(name)
    return "exact: " + ", ".join(done)


CACHES: dict[str, dict[str, Any]] = {
    "a dynamic cache": {},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    reader, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=read, args=(other,), daemon=True)
    process.start()
    results = {}
    for model_type in arguments.types or sorted(CONFIG_MAPPING):
        if zoo.safe_class(model_type) is None:
            continue

        def late(*_: Any) -> None:
            raise TimeoutError("more than 120 s")

        signal.signal(signal.SIGALRM, late)
        signal.alarm(120)
        try:
            verdict = judge(model_type, reader)
        except Exception as failure:
            verdict = {"built": f"FAILED: {type(failure).__name__}: {str(failure)[:300]}"}
            if len(arguments.types) == 1:
                raise
            if isinstance(failure, TimeoutError):
                process.terminate()
                reader, other = multiprocessing.get_context("spawn").Pipe()
                process = multiprocessing.get_context("spawn").Process(target=read, args=(other,), daemon=True)
                process.start()
        finally:
            signal.alarm(0)
        results[model_type] = verdict
        print(f"{model_type:32} {json.dumps(verdict)}", flush=True)
    reader.send(None)
    print(summary(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


def summary(results: Mapping[str, Mapping[str, str]]) -> str:
    """Counts per column, and the number of types of which every plan is exact."""
    columns: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for verdict in results.values():
        for column, text in verdict.items():
            columns[column][text.split(":")[0]] += 1
    lines = [f"{column:14} {dict(counts)}" for column, counts in columns.items()]
    whole = [name for name, one in results.items() if one.get("head") == "exact" and one.get("layer") == "exact"]
    return "\n".join([*lines, f"a head and a layer exact: {len(whole)} types"])


if __name__ == "__main__":
    main()

"""A sample of transformers' model types, pruned in five ways; all of them in tests/conformance/test_types.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pruning
from pruning import Pruned, judge_pruning, verdict_of
from pruning_page import cells, section

#: A sample, of every kind: fused and separate projections, groups, sinks, relative positions, shared layers, windows,
#: cross, biases that all layers share, code that does not run without heads or takes its width from its input; gates,
#: latents, shards, packed images. The run over all types (test_types.py) is slow.
SAMPLE = [
    *("bert", "albert", "deberta-v2", "tapas", "big_bird", "swinv2", "vit"),
    *("gpt2", "gpt_bigcode", "llama", "qwen3", "gpt_oss", "falcon", "phi3"),
    *("t5", "bart", "whisper", "colpali", "gemma4_text", "mpnet", "blip"),
    *("qwen3_5_text", "deepseek_v3", "codegen", "qwen2_5_vl_vision"),
]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_is_pruned_exactly(model_type: str) -> None:
    found = judge_pruning(model_type)
    assert found.verdict == "exact", found
    assert found.saved.keys() == found.plans.keys()
    assert found.generate.startswith(("exact", "-")), found.generate


def test_a_uniform_cut_of_some_types_is_a_stock_checkpoint() -> None:
    assert judge_pruning("qwen3").saved["uniform"] == "stock"


def test_a_wrong_cut_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A surgery that cuts the wrong head and proves nothing is judged wrong."""
    cut = pruning.prune

    def wrong(model: Any, plan: Any, **options: Any) -> Any:
        moved = {path: [(head + 1) % 4 for head in heads] if len(heads) == 1 else heads for path, heads in plan.items()}
        return cut(model, moved, **options)

    monkeypatch.setattr(pruning, "prune", wrong)
    found = judge_pruning("bert")
    assert found.verdict == "WRONG"
    assert found.plans["head"].startswith("WRONG: off by")
    assert found.plans["layer"] == "exact"


def test_the_page_tells_what_came_out() -> None:
    whole = Pruned(
        "one", "exact", "", {"head": "exact", "layer": "exact"}, {"head": "own", "layer": "stock"}, "exact: x"
    )
    part = Pruned("two", "partly", "W|hy", {"head": "exact", "layer": "refused: W|hy"}, {"head": "own"}, "-")
    none = Pruned("three", "not measured", "no heads")
    assert verdict_of(part) == ("partly", "W|hy")
    assert verdict_of(Pruned("x", plans={"head": "exact"}, saved={"head": "WRONG: plain"})) == ("WRONG", "WRONG: plain")
    assert cells(whole) == ("hl", "stock", "=")
    assert cells(part) == ("h", "own", "")
    assert cells(none) == cells(None) == ("", "", "")
    page = "\n".join(section([whole, part, none]))
    assert "| every plan exact | 1 |" in page
    assert "| `two` | h | W\\|hy |" in page
    assert "`three`" not in page

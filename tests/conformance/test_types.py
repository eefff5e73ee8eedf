"""A sample of transformers' model types in every run, all of them in the long one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT / "tools"))

from judging import judge, types  # noqa: E402
from page import page_of  # noqa: E402

#: Thirty types: every seam, every stack and kind, every way in which scores are made.
SAMPLE = [
    *("bert", "roberta", "distilbert", "albert", "modernbert", "deberta-v2", "xlnet", "mpnet"),
    *("gpt2", "gpt_neox", "gpt_bigcode", "llama", "mistral", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "diffllama"),
    *("falcon", "bloom", "mpt", "t5", "bart", "whisper"),
    *("vit", "swin", "siglip", "sam_vision_model", "dinov2", "wavlm"),
]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_is_measured_exactly(model_type: str) -> None:
    verdict = judge(model_type)
    assert verdict.verdict == "exact", verdict
    assert verdict.gate == "equal" or model_type in ("diffllama", "xlnet")


def test_the_sample_is_thirty_types_that_exist() -> None:
    assert len(set(SAMPLE)) == 30
    assert set(SAMPLE) <= set(types())


def test_a_wrong_measurement_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the soft cap, Gemma 2's rows are wrong; heads are found before, so that only the comparison can tell."""
    import zoo

    from headwise.models import discover, problems

    build = zoo.build

    def built(model_type: str) -> object:
        model = build(model_type, {"attn_logit_softcapping": 0.1})
        with torch.no_grad():
            for layer in model.layers:
                layer.self_attn.q_proj.weight.mul_(1000)
        discover(model)
        monkeypatch.setattr(problems, "_softcap", lambda call: None)
        return model

    monkeypatch.setattr(zoo, "build", built)
    assert judge("gemma2").verdict == "WRONG"


def test_a_weight_that_float32_rounds_to_zero_is_that_of_a_visible_key() -> None:
    """CPM-Ant's smallest weights are 1e-85: its softmax in float64 sees every key, its softmax in float32 does not."""
    assert judge("cpmant").verdict == "exact"


@pytest.mark.slow
def test_every_type_and_the_page_that_says_so() -> None:
    """At least 250 types exactly, none wrongly; docs/models.md is what came out."""
    from conformance import PAGE, run, run_pruning

    verdicts = run(types(), processes=2)
    counts = Counter(verdict.verdict for verdict in verdicts)
    assert counts["WRONG"] == counts["FAILED"] == 0, [v for v in verdicts if v.verdict in ("WRONG", "FAILED")]
    assert counts["exact"] >= 250
    pruned = run_pruning(types(), processes=2)
    counts = Counter(one.verdict for one in pruned)
    assert counts["WRONG"] == counts["FAILED"] == 0, [one for one in pruned if one.verdict in ("WRONG", "FAILED")]
    assert counts["exact"] >= 150
    assert PAGE.read_text() == page_of(verdicts, pruned)


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """What is in the file that is kept is not judged again."""
    import json
    from dataclasses import asdict

    from conformance import run
    from judging import Verdict

    keep = tmp_path / "kept.jsonl"
    known = [Verdict("bert", "exact", sites="encoder self 2"), Verdict("gpt2", "refused", "a reason")]
    keep.write_text("".join(json.dumps(asdict(one)) + "\n" for one in known))
    assert run(["gpt2", "bert"], 1, keep) == known

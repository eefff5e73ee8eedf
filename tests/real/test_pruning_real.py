"""What is left of real models when the default has chosen, against random orders; see docs/how-to/prune.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.data import batches
from headwise.measures.importance import LOSSES
from headwise.plans import HeadPlan, Unit
from headwise.surgery.repair import moments_of
from headwise.verbs.choosing import Quality
from tests.real.conftest import FETCHED, ROOT, find
from tests.real.reactions import reactions
from tests.real.speech import spoken

pytestmark = pytest.mark.real

HANDBOOK = ROOT.parent / "shared" / "data" / "handbook_en.txt"


def units(plan: HeadPlan) -> list[Unit]:
    return [Unit(cut.block, (cut.head,)) for cut in plan.cuts]


def rises(model: hw.Model, seen: list, held: list, found: object, plans: list[HeadPlan], loss: str) -> list[float]:
    """Of the loss on ``held``, after each plan and least squares."""
    layout = model.layout
    moments = {path: moments_of(layout, block, found) for path, block in layout.blocks.items()}  # type: ignore[arg-type]
    quality = Quality(
        model, list(batches(model, held, batch_size=8)), LOSSES[loss], moments=moments, repair="least_squares"
    )
    return [quality.rise(units(plan)) for plan in plans]


def test_rxnmapper_loses_head_5_last() -> None:
    """The one block's head that maps atoms."""
    place = find("rxnmapper")
    gold = reactions(FETCHED / "rxnmapper" / "tests" / "test_mapper.py", place / "vocab.txt")
    model = hw.load(place, allow_pickle=True)
    plan = hw.plan(model, inputs=[{"input_ids": one.ids} for one in gold], keep=1 / 8)
    assert sorted(cut.head for cut in plan.cuts) == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.slow
def test_whisper_decoder_without_a_fifth_of_its_heads(tmp_path: Path) -> None:
    """Teacher-forced loss of four sentences; the other four were chosen and repaired by."""
    if not (shutil.which("espeak-ng") and shutil.which("sox")):
        pytest.skip("espeak-ng or sox is not installed, so no sentence can be spoken")
    from transformers import WhisperFeatureExtractor

    place = find("whisper")
    model = hw.load(place)
    inputs = []
    for one in spoken(tmp_path, WhisperFeatureExtractor.from_pretrained(place)):
        begin = model.tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|notimestamps|>"])
        ids = [*begin, *model.tokenizer(f" {one.text}", add_special_tokens=False)["input_ids"]]
        inputs.append({"input_features": one.features, "decoder_input_ids": torch.tensor([ids])})
    seen, held = inputs[::2], inputs[1::2]
    found = hw.statistics(model, inputs=seen, relative=True)
    plans = [
        hw.plan(model, keep=1 - 5 / 72, criterion=name, seed=seed, only=["decoder/self"], statistics=found)
        for name, seed in (("set-aware", 0), ("random", 0), ("random", 1), ("random", 2))
    ]
    ours, *random = rises(model, seen, held, found, plans, "target")
    assert ours < sum(random) / 3


@pytest.mark.slow
def test_grammar_tagger_without_two_fifths_of_its_heads() -> None:
    """Divergence from its own tags on sentences that were not chosen by."""
    if not HANDBOOK.is_file():
        pytest.skip(f"the text {HANDBOOK} is not here")
    text = " ".join(HANDBOOK.read_text(encoding="utf-8").split())
    sentences = [one for one in re.split(r"(?<=[.!?]) ", text) if 40 < len(one) < 150][:120]
    model = hw.load(find("grammar"))
    seen, held = sentences[:80], sentences[80:]
    found = hw.statistics(model, seen, relative=True, batch_size=16)
    plans = [
        hw.plan(model, keep=0.6, criterion=name, seed=seed, statistics=found)
        for name, seed in (("set-aware", 0), ("random", 0), ("random", 1), ("random", 2))
    ]
    ours, *random = rises(model, seen, held, found, plans, "fidelity_kl")
    assert ours < min(random)

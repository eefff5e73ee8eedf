"""Every number of a scan of a real model is that of the same model in float64 with eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.data import batches
from headwise.trace import TOKEN
from tests.real.conftest import find
from tests.truth import disagreements, truth_of

pytestmark = pytest.mark.real


def compare(model: hw.Model, source: Any, **options: Any) -> None:
    """Scan ``source`` and hold every number against the truth."""
    named = {"inputs": source} if isinstance(source, list) and isinstance(source[0], dict) else {"texts": source}
    table = hw.scan(model, **named, **options)
    made = []
    for batch in batches(model, source, **options):
        rows = {"input": torch.ones(1, 1, dtype=torch.bool)}
        if batch.input_rows is not None:
            rows["input"] = batch.input_rows == TOKEN
        if batch.decoder_rows is not None:
            rows["decoder"] = batch.decoder_rows == TOKEN
        made.append((batch.inputs, rows))
    wrong = disagreements(table, truth_of(model.module, model.layout, made))
    assert not wrong, f"{len(wrong)} of {len(table) * len(table.measures)} numbers: {wrong[:12]}"


def test_minilm(text: list[str]) -> None:
    model = hw.load(find("minilm"))
    compare(model, text[:12], batch_size=5, max_length=128)


@pytest.mark.slow
def test_smollm2(text: list[str]) -> None:
    model = hw.load(find("smollm2"))
    compare(model, text[:4], batch_size=2, max_length=128)


@pytest.mark.slow
def test_flan_t5(text: list[str]) -> None:
    model = hw.load(find("flan_t5"))
    compare(model, [(one[:300], one[:200]) for one in text[:5]], batch_size=3)


@pytest.mark.slow
def test_grammar_distilbert(text: list[str]) -> None:
    model = hw.load(find("grammar"))
    compare(model, text[:6], batch_size=4, max_length=96)


@pytest.mark.slow
def test_whisper() -> None:
    model = hw.load(find("whisper"))
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, model.config.num_mel_bins, 3000, generator=generator)
    tokens = torch.tensor([[50257, 50362, 770, 318, 257], [50257, 50362, 262, 1332, 13]])
    compare(model, [{"input_features": features, "decoder_input_ids": tokens}])


@pytest.mark.slow
def test_rxnmapper() -> None:
    model = hw.load(find("rxnmapper"), allow_pickle=True)
    reactions = ["CC(=O)O.OCC>>CC(=O)OCC", "c1ccccc1Br.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1", "CCO>>CC=O"]
    source = reactions if model.tokenizer is not None else [{"input_ids": torch.arange(20, 41)[None]}]
    compare(model, source, batch_size=2)


def test_sapiens() -> None:
    model = hw.load(find("sapiens"))
    ids = torch.randint(4, 24, (3, 41), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, 29:], mask[1, 29:] = 1, 0
    compare(model, [{"input_ids": ids, "attention_mask": mask}])


@pytest.mark.parametrize("name", ["glassllm", "stories"])
def test_small_llamas(name: str) -> None:
    model = hw.load(find(name))
    ids = torch.randint(4, 400, (3, 53), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[2, 31:], mask[2, 31:] = 0, 0
    compare(model, [{"input_ids": ids, "attention_mask": mask}])


def test_rows_are_counted_by_kind(text: list[str]) -> None:
    """[CLS] and [SEP] rows stand apart; padding rows are nowhere."""
    model = hw.load(find("minilm"))
    table = hw.scan(model, text[:7], batch_size=3, max_length=64)
    assert set(table.count("entropy", "special").tolist()) == {14}
    expected = sum(
        min(64, len(model.tokenizer(one, truncation=True, max_length=64)["input_ids"])) - 2 for one in text[:7]
    )
    assert set(table.count("entropy").tolist()) == {expected}


def test_run_folder_comes_back(tmp_path: Path, text: list[str]) -> None:
    from headwise.artifacts import read_run
    from headwise.heads import HeadTable

    table = hw.scan(find("minilm"), text[:3], output=tmp_path / "run")
    again = HeadTable.from_document(read_run(tmp_path / "run").heads)
    assert again == table

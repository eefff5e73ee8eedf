"""Roles that are known from elsewhere, found in real trained models. docs/how-to/roles.md has the tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.measures.roles import RoleTable, given_pairs, monotonic
from tests.real.conftest import FETCHED, ROOT, find
from tests.real.reactions import reactions
from tests.real.speech import spoken

pytestmark = pytest.mark.real

TREEBANK = ROOT.parent / "shared" / "data" / "en_ewt-ud-dev.conllu"
AUSTEN = ROOT.parent / "shared" / "data" / "austen.txt"


def shares(table: RoleTable, role: str) -> dict[tuple[int, int], float]:
    """Share by layer and head."""
    return {(one.layer, one.head.head): one.share for one in table[role]}


def assigned(table: RoleTable, role: str) -> set[tuple[int, int]]:
    return {(one.layer, one.head.head) for one in table.assigned(role)}


def test_rxnmapper_maps_atoms_with_head_5() -> None:
    """Measured: head 5 has 0.81 to 0.87 in layers 2 to 11, head 2 up to 0.48, no other more than 0.10."""
    place = find("rxnmapper")
    gold = reactions(FETCHED / "rxnmapper" / "tests" / "test_mapper.py", place / "vocab.txt")
    role = given_pairs("atom_mapping", [one.pairs for one in gold], candidates=[one.candidates for one in gold])
    table = hw.roles(hw.load(place, allow_pickle=True), inputs=[{"input_ids": one.ids} for one in gold], roles=role)
    found, has = shares(table, "atom_mapping"), assigned(table, "atom_mapping")
    assert table["atom_mapping"][0].rows == 99
    assert {(layer, 5) for layer in range(2, 12)} <= has
    assert all(0.80 < found[layer, 5] < 0.88 for layer in range(2, 12))
    for layer in range(2, 12):
        second = max((share, head) for (at, head), share in found.items() if at == layer and head != 5)
        assert second[0] <= 0.49
        assert second[1] == 2 or second[0] <= 0.11
    assert {head for _, head in has} <= {5, 2}


def test_whisper_heads_that_align(tmp_path: Path) -> None:
    """At least 7 of the 8 heads that Whisper's generation config lists, on spoken sentences."""
    if not (shutil.which("espeak-ng") and shutil.which("sox")):
        pytest.skip("espeak-ng or sox is not installed, so no sentence can be spoken")
    from transformers import WhisperFeatureExtractor

    place = find("whisper")
    model = hw.load(place)
    said = spoken(tmp_path, WhisperFeatureExtractor.from_pretrained(place))
    listed = {tuple(one) for one in json.loads((place / "generation_config.json").read_text())["alignment_heads"]}
    inputs = []
    for one in said:
        ids = model.tokenizer(one.text, add_special_tokens=False)["input_ids"]
        begin = [model.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("startoftranscript", "notimestamps")]
        inputs.append({"input_features": one.features, "decoder_input_ids": torch.tensor([[*begin, *ids]])})
    role = monotonic(spans=[(0, one.frames) for one in said])
    table = hw.roles(model, inputs=inputs, roles=role)
    has = assigned(table, "monotonic")
    assert len(listed) == 8
    assert len(has & listed) >= 7, table.summary()


@pytest.mark.slow
def test_grammar_model_has_heads_for_relations() -> None:
    """On 600 sentences of EWT: heads of objects, determiners and case markers beat every fixed offset."""
    if not TREEBANK.is_file():
        pytest.skip(f"the treebank is not here: {TREEBANK}")
    table = hw.roles(find("grammar"), conllu=TREEBANK, roles=["head", "dependent"], limit=600, batch_size=16)
    for role in ("head:obj", "head:det", "head:case", "dependent:obj"):
        one = table.best(role)
        assert one.assigned, str(one)
        assert one.share_low > one.fixed_share + 0.1, str(one)
    whole = table.best("head")
    assert whole.share_low > whole.fixed_share


@pytest.mark.slow
def test_smollm2_previous_sink_and_induction() -> None:
    """Previous-token, sink and induction heads; that of induction in prose is confirmed on random tokens."""
    if not AUSTEN.is_file():
        pytest.skip(f"the text is not here: {AUSTEN}")
    place = find("smollm2")
    table = hw.roles(
        place, AUSTEN, window=256, limit=24, batch_size=2, roles=["previous", "first", "induction", "duplicate"]
    )
    assert table.best("previous").share > 0.9
    assert len(assigned(table, "first")) > 20
    induction, repeated = assigned(table, "induction"), assigned(table, "induction_repeated")
    assert induction
    assert induction <= repeated
    assert len(repeated) > 10
    assert table.best("induction_repeated").share > 0.9

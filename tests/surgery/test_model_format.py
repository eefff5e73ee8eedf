"""The format of a saved model: the bytes of headwise.json pinned, every hostile change of it refused."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headwise import artifacts
from headwise.errors import HeadwiseError, ModelError
from headwise.models import Model, load
from headwise.models.loading.saved import cuts_of
from headwise.models.surgery_record import LayerProof
from headwise.surgery import prune
from tests.surgery.test_placeholder import xglm

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "format.md"


def golden_model() -> Model:
    """A Llama whose weights are made of whole numbers, cut unevenly; numbers that a machine decides are set."""
    config = LlamaConfig(
        vocab_size=5, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=2, max_position_embeddings=9, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_((torch.arange(value.numel()) % 7 - 3).view_as(value) / 8)
    small = prune(model, {"model.layers.0": [1]}, repair="none")
    assert small.surgery is not None
    layer = LayerProof("model.layers.0.self_attn", "model.layers.0.self_attn.o_proj", 0, 6.25e-08, 0.5)
    proof = replace(
        small.surgery.proof, layers=(layer,), end_to_end=1.25e-07, largest=2.5, noise=3.125e-08, identical=False
    )
    return replace(small, surgery=replace(small.surgery, proof=proof))


def test_bytes_are_pinned_and_documented(tmp_path: Path) -> None:
    raw = (golden_model().save(tmp_path / "small") / "headwise.json").read_text(encoding="ascii")
    assert raw == (HERE / "golden" / "headwise.json").read_text(encoding="ascii")
    assert f"```json\n{raw}```" in DOCS.read_text()


def test_the_golden_document_is_valid() -> None:
    document = json.loads((HERE / "golden" / "headwise.json").read_text())
    schema = artifacts.schema(artifacts.MODEL_FORMAT)
    jsonschema.Draft202012Validator.check_schema(schema)
    artifacts.check_document(document, artifacts.MODEL_FORMAT)
    documented = DOCS.read_text()
    for name in (*document, *document["cuts"][0], *document["surgery"]):
        assert f"`{name}`" in documented, name


def test_a_later_minor_version_is_read_and_its_keys_ignored(tmp_path: Path) -> None:
    folder = golden_model().save(tmp_path / "small")
    document = json.loads((folder / "headwise.json").read_text())
    document |= {"version": "1.7", "more": {"a": 1}}
    (folder / "headwise.json").write_text(json.dumps(document))
    assert load(folder).surgery == load(golden_model().save(tmp_path / "other")).surgery


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of every value in a document."""
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [one for key, child in children for one in leaves(child, (*path, key))]


HOSTILE = (None, -1, 2**60, 1e400, "", "../../etc/passwd", [], {}, [[]], True, "model.layers.0.mlp", "__class__")


def test_every_place_changed_to_every_hostile_value(tmp_path: Path) -> None:
    """A changed document is refused by name, or the model is the one that was saved; nothing else ever happens."""
    folder = golden_model().save(tmp_path / "small")
    document = json.loads((folder / "headwise.json").read_text())
    ids = torch.tensor([[1, 2, 3]])
    whole: Any = load(folder).module
    truth = whole(input_ids=ids).logits
    draw = random.Random(0)
    refused = 0
    for path in leaves(document):
        for value in draw.sample(HOSTILE, 3):
            changed = copy.deepcopy(document)
            owner = changed
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = value
            (folder / "headwise.json").write_text(json.dumps(changed).replace("Infinity", "1e999"))
            try:
                found: Any = load(folder).module
            except HeadwiseError:
                refused += 1
                continue
            assert torch.equal(found(input_ids=ids).logits, truth), (path, value)
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": [2, 0, 3]}, "are not numbers below 4 in order"),
        ({"heads": [0, 2, 9]}, "are not numbers below 4 in order"),
        ({"kv_map": [0, 1]}, "2 entries for 3 heads"),
        ({"kv_map": [0, 1, 2]}, "leads to heads beyond 2"),
        ({"fused": 9}, "fused is 9"),
        ({"attributes": {"_parameters": 3}}, "it sets '_parameters'"),
        ({"attributes": {"training": 1}}, "it sets 'training'"),
        ({"config": {"architectures": 3}}, "it sets 'architectures'"),
        ({"narrow": ["nothing"]}, "it narrows 'nothing'"),
        ({"placeholder": {"q_proj": 2}}, "'q_proj' is no layer of a LlamaAttention without heads"),
        ({"heads": [], "kv_map": None, "placeholder": {"nothing": 2}}, "'nothing' is no layer of a LlamaAttention"),
    ],
)
def test_cuts_that_contradict_themselves(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = golden_model().save(tmp_path / "small")
    document = json.loads((folder / "headwise.json").read_text())
    document["surgery"] = None
    document["cuts"][0] |= change
    (folder / "headwise.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": [0, 2]}, "say different heads"),
        ({"kv_heads": 3}, "say different kv_heads"),
        ({"kv_map": [0, 0, 1]}, "say different kv_map"),
        ({"kv_map": None}, "say different kv_map"),
        ({"module": "model.layers.0.mlp"}, r"the surgery cut model.layers.0.self_attn, which is not among the cuts"),
    ],
)
def test_cuts_that_the_surgery_tells_otherwise(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """An exchanged kv_map would load and give other numbers."""
    folder = golden_model().save(tmp_path / "small")
    document = json.loads((folder / "headwise.json").read_text())
    document["cuts"][0] |= change
    if change.get("heads"):
        document["cuts"][0]["kv_map"] = document["cuts"][0]["kv_map"][:2]
    with pytest.raises(ModelError, match=words):
        list(cuts_of(document))


def test_a_module_that_is_cut_twice(tmp_path: Path) -> None:
    folder = golden_model().save(tmp_path / "small")
    document = json.loads((folder / "headwise.json").read_text())
    document["cuts"] *= 2
    (folder / "headwise.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="is among the cuts twice"):
        load(folder)


def test_a_placeholder_is_no_wider_than_a_head(tmp_path: Path) -> None:
    """Nobody is made to allocate what a file says."""
    folder = prune(xglm(), {"model.layers.0": [0, 1, 2, 3]}, repair="none").save(tmp_path / "small")
    document = json.loads((folder / "headwise.json").read_text())
    document["cuts"][0]["placeholder"]["q_proj"] = 10**12
    (folder / "headwise.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="without heads that could put out 1000000000000 zeros"):
        load(folder)


@pytest.mark.parametrize("shape", [(5, 9), (4, 8), (4, 7), (5, 8, 1), (40,)])
def test_weights_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = golden_model().save(tmp_path / "small")
    stored = load_file(folder / "headwise.safetensors")
    stored["model.embed_tokens.weight"] = torch.zeros(shape)
    save_file(stored, folder / "headwise.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is not \(5, 8\), as in a layer not cut"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "headwise.model"}', "\x00" * 9, '{"a": 1, "a": 2}'])
def test_documents_that_are_none(text: str, tmp_path: Path) -> None:
    folder = golden_model().save(tmp_path / "small")
    (folder / "headwise.json").write_text(text)
    with pytest.raises(ModelError):
        load(folder)

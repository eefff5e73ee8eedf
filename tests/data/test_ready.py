"""Ready inputs: ids and tensors that go to the model as they are, after they were looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from stand_ins import StandIn

from headwise.data import Batch, InputRules, batches, read_inputs
from headwise.errors import DataError, InputError

Lines = Callable[..., Path]
SEQ2SEQ = InputRules(vocabulary=29, encoder_decoder=True, decoder_start=0, decoder_vocabulary=29)


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    def written(*rows: Any) -> Path:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return written


def model(**rules: Any) -> StandIn:
    return StandIn(None, InputRules(**({"vocabulary": 29} | rules)))


def refusal(source: Any, kind: type[Exception] = DataError, to: StandIn | None = None, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        list(batches(to or model(), read_inputs(source) if isinstance(source, Path) else source, **options))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_lines_of_ids(lines: Lines) -> None:
    path = lines({"input_ids": [1, 2, 3], "note": "left alone"}, {"input_ids": [4]})
    data = batches(model(), read_inputs(path))
    (batch,) = data
    assert batch.inputs["input_ids"].tolist() == [[4, 0, 0], [1, 2, 3]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.input_rows is not None
    assert batch.input_rows.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert data.facts.files[0]["format"] == "inputs jsonl"
    assert (data.facts.tokens, data.facts.special_tokens) == (4, 0)


def test_masked_positions_are_padding(lines: Lines) -> None:
    path = lines({"input_ids": [0, 0, 3, 4], "attention_mask": [0, 0, 1, 1]})
    (batch,) = batches(model(), read_inputs(path))
    assert batch.input_rows is not None
    assert batch.input_rows.tolist() == [[0, 0, 1, 1]]
    assert batch.tokens == 2


def test_labels_are_padded_with_minus_100(lines: Lines) -> None:
    path = lines({"input_ids": [1, 2], "labels": [2, -100]}, {"input_ids": [3], "labels": [4]})
    (batch,) = batches(model(), read_inputs(path))
    assert batch.inputs["labels"].tolist() == [[4, -100], [2, -100]]


def test_encoder_decoder_lines(lines: Lines) -> None:
    path = lines(
        {"input_ids": [1, 2, 3], "decoder_input_ids": [0, 5]}, {"input_ids": [4], "decoder_input_ids": [0, 6, 7]}
    )
    (batch,) = batches(StandIn(None, SEQ2SEQ), read_inputs(path))
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 6, 7], [0, 5, 0]]
    assert batch.decoder_rows is not None
    assert batch.decoder_rows.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_decoder_input_from_labels(lines: Lines) -> None:
    path = lines({"input_ids": [1], "labels": [5, 6, -100, -100]})
    (batch,) = batches(StandIn(None, SEQ2SEQ), read_inputs(path))
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 5, 6, 0]]
    assert batch.decoder_rows is not None
    assert batch.decoder_rows.tolist() == [[2, 1, 1, 0]]
    assert batch.inputs["decoder_attention_mask"].tolist() == [[1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"text": "one"}, "line 2 has no input_ids; it has 'text'; text is given as texts"),
        ({"input_ids": "one"}, "input_ids is the str 'one', and a list of whole numbers is needed"),
        ({"input_ids": [1, 2.5]}, "holds the float '2.5' at position 1"),
        ({"input_ids": [1, "x"]}, "holds the str 'x' at position 1"),
        ({"input_ids": [[1, 2]]}, "is a list of lists"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, 29]}, "holds id 29 at position 1, and the model's vocabulary has ids 0 to 28"),
        ({"input_ids": [1, -1]}, "holds the negative id -1 at position 1"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 entries and input_ids 2"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries and input_ids 2"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "attention_mask hides every position"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "attention_mask holds 2 at position 1; 1 marks a real token"),
        ({"input_ids": [1, 1 << 70]}, "which no tensor can hold"),
    ],
)
def test_lines_that_are_none(lines: Lines, row: dict[str, Any], rule: str) -> None:
    said = refusal(lines({"input_ids": [1, 2]}, row))
    assert "line 2" in said
    assert rule in said


@pytest.mark.parametrize("name", ["use_cache", "past_key_values", "output_attentions"])
def test_settings_are_no_inputs(name: str) -> None:
    said = refusal([{"input_ids": torch.ones(1, 3, dtype=torch.int64), name: torch.ones(1)}])
    assert f"{name!r} says how the model runs, and headwise sets it itself; leave it out" in said


def test_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, %s]}' % ("9" * 5000))
    assert "line 1 holds a number with too many digits" in refusal(path)


def test_names_that_the_model_does_not_take(lines: Lines) -> None:
    rules = {"accepts": frozenset({"input_ids", "attention_mask"})}
    said = refusal(lines({"input_ids": [1], "token_type_ids": [0]}), to=model(**rules))
    assert "takes no input named 'token_type_ids'; it takes attention_mask, input_ids" in said


def test_examples_must_have_the_same_names(lines: Lines) -> None:
    assert "all examples need the same names" in refusal(lines({"input_ids": [1], "labels": [1]}, {"input_ids": [1]}))
    assert "all examples need the same names" in refusal(lines({"input_ids": [1]}, {"input_ids": [1], "labels": [1]}))


def test_too_long(lines: Lines) -> None:
    path = lines({"input_ids": [1, 2, 3]})
    assert "a.jsonl line 1: has 3 tokens, and the model has positions for 2" in refusal(path, to=model(positions=2))
    data = batches(model(positions=2), read_inputs(path), max_length=2)
    (batch,) = data
    assert batch.inputs["input_ids"].tolist() == [[1, 2]]
    assert (data.facts.truncated_passages, data.facts.truncated_tokens) == (1, 1)


def test_encoder_decoder_needs_decoder_input(lines: Lines) -> None:
    said = refusal(lines({"input_ids": [1]}), to=StandIn(None, SEQ2SEQ))
    assert "needs decoder_input_ids or labels" in said


@pytest.fixture
def features(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_file({"input_features": torch.rand(5, 3, 7), "decoder_input_ids": torch.arange(10).reshape(5, 2)}, path)
    return path


def test_tensors(features: Path) -> None:
    rules = InputRules(
        main_input="input_features", encoder_decoder=True, decoder_vocabulary=29, float_dtype=torch.bfloat16
    )
    data = batches(StandIn(None, rules), read_inputs(features), batch_size=2)
    found = list(data)
    assert [batch.passages for batch in found] == [(0, 1), (2, 3), (4,)]
    assert found[0].inputs["input_features"].shape == (2, 3, 7)
    assert found[0].inputs["input_features"].dtype == torch.bfloat16
    assert found[0].input_rows is None
    assert found[0].decoder_rows is not None
    assert found[0].decoder_rows.tolist() == [[1, 1], [1, 1]]
    assert data.facts.files[0]["format"] == "inputs safetensors"
    limited = list(batches(StandIn(None, rules), read_inputs(features, limit=3), batch_size=2))
    assert [batch.passages for batch in limited] == [(0, 1), (2,)]


def test_images_have_no_rows(tmp_path: Path) -> None:
    save_file({"pixel_values": torch.rand(3, 3, 8, 8)}, tmp_path / "a.safetensors")
    (batch,) = batches(StandIn(None, InputRules(main_input="pixel_values")), read_inputs(tmp_path / "a.safetensors"))
    assert batch.input_rows is None
    assert batch.decoder_rows is None
    assert batch.tokens == 0


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        ({}, "holds no tensors"),
        (
            {"input_ids": torch.ones(3, 2, dtype=torch.int64), "labels": torch.ones(2, 2)},
            "disagree about the number of examples (input_ids 3, labels 2)",
        ),
        ({"input_ids": torch.tensor(3)}, "tensor 'input_ids' has no axes"),
        ({"input_ids": torch.ones(0, 2, dtype=torch.int64)}, "hold 0 examples"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.int64)}, "input_ids has length 0"),
        ({"input_ids": torch.ones(2, 3)}, "must be whole numbers of shape (examples, length), and is torch.float32"),
        ({"input_ids": torch.ones(2, 3, 4, dtype=torch.int64)}, "of shape (2, 3, 4)"),
        ({"input_ids": torch.full((2, 3), 29)}, "holds id 29 at row 0, position 0"),
        ({"input_ids": torch.tensor([[1, 2], [3, -2]])}, "holds the negative id -2 at row 1, position 1"),
        (
            {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 4)},
            "must have the shape of input_ids, (2, 3), and has (2, 4)",
        ),
        (
            {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])},
            "hides every position of row 1",
        ),
    ],
)
def test_tensors_that_are_none(tmp_path: Path, tensors: dict[str, torch.Tensor], rule: str) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    assert rule in refusal(tmp_path / "a.safetensors")


@pytest.mark.parametrize("value", [-1.0, 2.0, 0.5, float("-inf"), float("nan")])
def test_additive_masks_are_no_padding_masks(value: float) -> None:
    """Case 3: 1 is a real token; a mask that is added to scores would be read the wrong way round."""
    source = [{"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.tensor([[1.0, 1.0, value]])}]
    assert "holds values other than 0 and 1" in refusal(source)


@pytest.mark.parametrize("mask", [torch.tensor([[1.0, 0.0]]), torch.tensor([[True, False]]), [[1, 0]]])
def test_masks_of_any_dtype(mask: Any) -> None:
    (batch,) = batches(model(), [{"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": mask}])
    assert batch.inputs["attention_mask"].tolist() == [[1, 0]]
    assert batch.inputs["attention_mask"].dtype == torch.int64


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_must_be_finite(value: float) -> None:
    source = [{"input_values": torch.tensor([[1.0, value]])}]
    assert "input_values holds values that are not finite" in refusal(source, to=model(main_input="input_values"))


def test_damaged_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"input_ids": torch.ones(3, 2, dtype=torch.int64)}, path)
    path.write_bytes(path.read_bytes()[:-3])
    assert "is not a readable safetensors file" in refusal(path)


def test_text_given_as_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert "text is given as texts (--text)" in refusal(tmp_path / "a.txt")
    (tmp_path / "a.npz").write_text("one")
    assert "are read from .jsonl or .safetensors, and this is .npz" in refusal(tmp_path / "a.npz")
    assert "there is no such file" in refusal(tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="limit must be"):
        read_inputs(tmp_path / "a.txt", limit=0)


def test_mappings_in_memory() -> None:
    source = [{"input_ids": torch.tensor([[1, 2], [3, 4]])}, {"input_ids": [[5, 6]], "attention_mask": [[0, 1]]}]
    first, second = batches(model(), source)
    assert first.passages == (0, 1)
    assert second.passages == (2,)
    assert second.input_rows is not None
    assert second.input_rows.tolist() == [[0, 1]]
    assert second.inputs["input_ids"].dtype == torch.int64


def test_one_mapping_is_a_list_of_one() -> None:
    (batch,) = batches(model(), {"input_ids": torch.tensor([[1, 2]])})
    assert batch.passages == (0,)


def test_flat_ids_are_one_example() -> None:
    source = [{"input_ids": [1, 2, 3]}, {"input_ids": torch.tensor([4])}, {"input_ids": np.array([5, 6])}]
    (batch,) = batches(model(), source)
    assert batch.passages == (1, 2, 0)
    assert batch.inputs["input_ids"].tolist() == [[4, 0, 0], [5, 6, 0], [1, 2, 3]]


def test_batches_pass_through_and_generators_work() -> None:
    ready = Batch({"input_ids": torch.tensor([[1]])}, (0,), torch.ones(1, 1, dtype=torch.int8), None, 1)
    data = batches(model(), (one for one in [ready, {"input_ids": torch.tensor([[2]])}]))
    found = list(data)
    assert found[0] is ready
    assert data.facts.passages == 2
    with pytest.raises(InputError, match="read only once"):
        list(data)


def test_a_loader_can_be_gone_through_twice() -> None:
    class Loader:
        def __iter__(self) -> Any:
            yield {"input_ids": torch.tensor([[1, 2]])}

    data = batches(model(), Loader())
    assert len(list(data)) == len(list(data)) == 1


def test_limit_cuts_ready_batches() -> None:
    source = [{"input_ids": torch.ones(4, 2, dtype=torch.int64)} for _ in range(3)]
    assert [len(batch.passages) for batch in batches(model(), source, limit=6)] == [4, 2]


def test_transformers_batch_encoding() -> None:
    from transformers import BatchEncoding

    (batch,) = batches(model(), [BatchEncoding({"input_ids": torch.tensor([[1, 2]])})])
    assert batch.passages == (0,)


@pytest.mark.parametrize(
    ("item", "rule"),
    [
        (3, "inputs[1] is a int; give a mapping"),
        ({}, "inputs[1] is empty"),
        ({"input_ids": [[1, 2], [3]]}, "inputs[1]: input_ids is ragged (rows of 1 and of 2)"),
        ({"input_ids": object()}, "that is no tensor"),
        ({"text": "one"}, "text is given as strings"),
        ({"input_ids": [1], "pixel_values": torch.ones(1, 3)}, "with which 'pixel_values' cannot go"),
    ],
)
def test_things_that_are_no_inputs(item: Any, rule: str) -> None:
    assert rule in refusal([{"input_ids": torch.tensor([[1]])}, item], InputError)


def test_max_length_does_not_cut_ready_batches() -> None:
    assert "cut them yourself" in refusal([{"input_ids": torch.tensor([[1, 2]])}], InputError, max_length=1)


def test_embeddings_instead_of_ids() -> None:
    source = [{"inputs_embeds": torch.rand(2, 3, 5), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}]
    (batch,) = batches(model(), source)
    assert batch.input_rows is not None
    assert batch.input_rows.tolist() == [[1, 1, 1], [1, 0, 0]]

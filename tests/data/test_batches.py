"""Batches from text: padding, row kinds, limits, windows, counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import StandIn, letters
from tiny_models import word_tokenizer
from tokenizers import Tokenizer

from headwise.data import Batch, InputRules, as_passages, batches, read_passages
from headwise.errors import DataError, InputError

RULES = InputRules(vocabulary=29)


def framed(**options: Any) -> StandIn:
    """A model with a tokenizer that adds [CLS] and [SEP]."""
    return StandIn(word_tokenizer(**options), RULES)


def refusal(model: StandIn, source: Any, kind: type[Exception] = DataError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        list(batches(model, source, **options))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows(batch: Batch) -> list[list[int]]:
    assert batch.input_rows is not None
    return batch.input_rows.tolist()


def test_one_batch() -> None:
    (batch,) = batches(framed(), ["the cat sat", "dog"])
    assert batch.passages == (1, 0)
    assert batch.inputs["input_ids"].tolist() == [[2, 9, 3, 0, 0], [2, 4, 5, 6, 3]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert rows(batch) == [[2, 1, 2, 0, 0], [2, 1, 1, 1, 2]]
    assert batch.tokens == 4
    assert batch.input_rows is not None
    assert batch.input_rows.dtype == torch.int8


def test_the_tokenizer_is_not_changed() -> None:
    tokenizer = word_tokenizer(pad=False, side="left")
    (batch,) = batches(StandIn(tokenizer, RULES), ["the cat sat", "dog"])
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert tokenizer.pad_token is None
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("side", ["left", "tokenizer"])
def test_left_padding(side: str) -> None:
    model = framed(side="left")
    (batch,) = batches(model, ["the cat sat", "dog"], padding_side=side)
    assert batch.inputs["input_ids"].tolist() == [[0, 0, 2, 9, 3], [2, 4, 5, 6, 3]]
    assert batch.inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1] * 5]
    assert batch.inputs["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]], "cumsum(mask) - 1, case 14"
    assert rows(batch) == [[0, 0, 2, 1, 2], [2, 1, 1, 1, 2]]


def test_left_padding_is_refused_where_positions_would_be_wrong() -> None:
    rules = InputRules(accepts=frozenset({"input_ids", "attention_mask"}))
    assert "would give short passages wrong positions" in refusal(
        StandIn(letters, rules), ["a"], InputError, padding_side="left"
    )
    for kind in ("mask", "none"):
        fine = InputRules(accepts=frozenset({"input_ids", "attention_mask"}), positions_from=kind)
        (batch,) = batches(StandIn(letters, fine), ["abc", "d"], padding_side="left")
        assert "position_ids" not in batch.inputs
    assert "padding_side must be" in refusal(StandIn(), ["a"], InputError, padding_side="up")


def test_padding_id_of_the_model() -> None:
    (batch,) = batches(StandIn(letters, InputRules(padding_id=7)), ["abc", "d"])
    assert batch.inputs["input_ids"].tolist() == [[4, 7, 7], [1, 2, 3]]


def test_without_attention_mask_batches_hold_one_length() -> None:
    rules = InputRules(accepts=frozenset({"input_ids"}))
    found = list(batches(StandIn(letters, rules), ["abc", "d", "efg", "hi", "jk"], batch_size=3))
    assert [set(batch.inputs) for batch in found] == [{"input_ids"}] * 3
    assert [batch.inputs["input_ids"].shape for batch in found] == [(1, 1), (2, 2), (2, 3)]


def test_similar_lengths_share_a_batch_and_order_is_stable() -> None:
    texts = ["a" * size for size in (5, 1, 4, 1, 5, 2)]
    found = [batch.passages for batch in batches(StandIn(), texts, batch_size=2)]
    assert found == [(1, 3), (5, 2), (0, 4)]


def test_every_passage_once_whatever_the_batch_size() -> None:
    texts = ["a" * (1 + index * 7 % 13) for index in range(211)]
    for size in (1, 2, 3, 64, 500):
        seen = [passage for batch in batches(StandIn(), texts, batch_size=size) for passage in batch.passages]
        assert sorted(seen) == list(range(211))


def test_buckets_bound_what_is_held() -> None:
    taken: list[int] = []

    def many() -> Any:
        for index in range(10_000):
            taken.append(index)
            yield "a"

    next(iter(batches(StandIn(), many(), batch_size=2)))
    assert len(taken) <= 2 * 64 + 1


def test_token_types_are_padded() -> None:
    class Typed:
        model_input_names = ("input_ids", "token_type_ids")

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            ids = letters(text)
            return {"input_ids": ids, "token_type_ids": [1] * len(ids), "special_tokens_mask": [0] * len(ids)}

    (batch,) = batches(StandIn(Typed(), RULES), ["abc", "d"])
    assert batch.inputs["token_type_ids"].tolist() == [[1, 0, 0], [1, 1, 1]]
    without = InputRules(accepts=frozenset({"input_ids", "attention_mask"}))
    (batch,) = batches(StandIn(Typed(), without), ["abc", "d"])
    assert set(batch.inputs) == {"input_ids", "attention_mask"}


def test_rust_tokenizer() -> None:
    tokenizer = Tokenizer.from_str(word_tokenizer().backend_tokenizer.to_str())
    (batch,) = batches(StandIn(tokenizer, RULES), ["the cat"])
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 5, 3]]
    assert rows(batch) == [[2, 1, 1, 2]]


def test_rust_tokenizer_that_cuts_and_pads_is_not_obeyed_and_not_changed() -> None:
    tokenizer = Tokenizer.from_str(word_tokenizer().backend_tokenizer.to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    (batch,) = batches(StandIn(tokenizer, RULES), ["the cat sat on"])
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 5, 6, 7, 3]]
    assert tokenizer.truncation["max_length"] == 3
    assert tokenizer.padding["length"] == 8


def test_function_that_gives_a_mapping() -> None:
    (batch,) = batches(StandIn(lambda text: {"input_ids": letters(text)}), ["ab"])
    assert batch.inputs["input_ids"].tolist() == [[1, 2]]


@pytest.mark.parametrize("given", [lambda text: [[1]], lambda text: "12", lambda text: [1.5], lambda text: 3])
def test_function_that_gives_no_ids(given: Any) -> None:
    assert "it must give a flat list of whole numbers" in refusal(StandIn(given), ["a"], InputError)


def test_thing_that_is_no_tokenizer() -> None:
    assert "tokenizer is a int" in refusal(StandIn(3), ["a"], InputError)


def test_text_for_a_model_without_tokenizer() -> None:
    said = refusal(StandIn(None, tokenizer_note="there are no tokenizer files in x"), ["a"])
    assert "this model has no tokenizer (there are no tokenizer files in x)" in said
    assert 'a line such as {"input_ids": [3, 1, 4]} per passage, named .jsonl' in said


@pytest.mark.parametrize("window", [None, 3])
def test_half_a_character_is_refused_by_its_place(window: int | None) -> None:
    """A lone surrogate: no tokenizer takes it, and tokenizers say so in words of their own."""
    said = refusal(StandIn(), as_passages(["fine", "a \ud800 b"], window=window))
    assert "passage 1 (counted from 0)" in said
    assert "holds the lone surrogate \\ud800 at character 3, which is half of a character" in said


def test_sizes_beyond_machine_words_are_no_limits() -> None:
    (batch,) = batches(StandIn(), ["ab", "cd"], batch_size=10**30, limit=10**30, max_length=10**30)
    assert batch.tokens == 4


def test_text_for_a_model_of_sound() -> None:
    said = refusal(StandIn(letters, InputRules(main_input="input_features")), ["a"])
    assert "this model takes input_features; give ready inputs" in said


def test_ids_outside_the_vocabulary() -> None:
    said = refusal(StandIn(letters, InputRules(vocabulary=5)), ["abc", "abz"])
    assert "passage 1 (counted from 0): the tokenizer's output holds id 26 at position 2" in said
    assert "ids 0 to 4" in said


def test_longer_than_learned_positions(tmp_path: Path) -> None:
    model = StandIn(letters, InputRules(positions=3))
    (tmp_path / "a.txt").write_text("abc\nabcd\n")
    said = refusal(model, read_passages(tmp_path / "a.txt"))
    assert "a.txt line 2: has 4 tokens, and the model has positions for 3" in said
    assert "--max-length 3" in said
    assert "--window 3" in said
    assert len(list(batches(model, ["abc", "abcd"], max_length=3))) == 1


def test_longer_than_a_rotary_model_was_trained_for() -> None:
    data = batches(StandIn(letters, InputRules(trained_length=3)), ["abc", "abcd", "abcde"])
    assert len(list(data)) == 1
    assert data.facts.over_trained_length == 2
    assert data.facts.notes == [
        "some passages are longer than the 3 tokens that the model was trained for; they are measured all the same"
    ]


def test_truncation_keeps_the_frame_and_counts() -> None:
    data = batches(framed(), ["the cat sat on mat", "dog", "the cat"], max_length=4)
    (batch,) = data
    assert batch.inputs["input_ids"].tolist() == [[2, 9, 3, 0], [2, 4, 5, 3], [2, 4, 5, 3]]
    assert (data.facts.truncated_passages, data.facts.truncated_tokens) == (1, 3)
    assert data.facts.longest == 4


def test_truncation_agrees_with_transformers() -> None:
    for side in ("right", "left"):
        tokenizer = word_tokenizer()
        tokenizer.truncation_side = side
        theirs = tokenizer("the cat sat on mat", truncation=True, max_length=5)["input_ids"]
        (batch,) = batches(StandIn(tokenizer, RULES), ["the cat sat on mat"], max_length=5)
        assert batch.inputs["input_ids"].tolist() == [theirs]


def test_truncation_to_nothing() -> None:
    said = refusal(framed(), ["the cat"], InputError, max_length=2)
    assert "max_length=2 leaves no room for text: the tokenizer adds 2 special tokens; give at least 3" in said


def test_windows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat\nsat on the\n\nmat the dog\n")
    data = batches(framed(), read_passages(tmp_path / "a.txt", window=5))
    (batch,) = data
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 9, 3, 0], [2, 4, 5, 6, 3], [2, 7, 4, 8, 3]]
    assert batch.passages == (2, 0, 1)
    assert data.facts.window == 5
    assert data.facts.files[0]["format"] == "txt (file)"
    assert data.facts.passages == 3


def test_windows_do_not_depend_on_the_pieces_a_file_is_read_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("the\ncat\nsat\non\nmat\ndog\n" * 20)

    def ids() -> list[list[int]]:
        source = read_passages(tmp_path / "a.txt", window=7)
        return [row for batch in batches(framed(), source) for row in batch.inputs["input_ids"].tolist()]

    whole = ids()
    monkeypatch.setattr("headwise.data.plain.PIECE", 17)
    assert ids() == whole
    assert len(whole) == 24


def test_windows_do_not_cross_documents() -> None:
    source = as_passages(["abcde", "  ", "fg"], window=3)
    data = batches(StandIn(), source)
    found = {
        index: row[row != 0].tolist()
        for batch in data
        for index, row in zip(batch.passages, batch.inputs["input_ids"], strict=True)
    }
    assert found == {0: [1, 2, 3], 1: [4, 5], 2: [6, 7]}
    assert data.facts.skipped_passages == 1


def test_windows_and_limit() -> None:
    data = batches(StandIn(), as_passages(["abcdefghij"], window=3, limit=2))
    assert [row for batch in data for row in batch.inputs["input_ids"].tolist()] == [[1, 2, 3], [4, 5, 6]]


def test_window_without_room() -> None:
    said = refusal(framed(), as_passages(["the cat"], window=2), InputError)
    assert "window=2 leaves no room for text" in said


def test_limit() -> None:
    for source in (["a", "b", "c"], as_passages(["a", "b", "c"], limit=2)):
        data = batches(StandIn(), source, limit=2)
        assert sum(len(batch.passages) for batch in data) == 2


def test_empty_passages_are_skipped_and_counted() -> None:
    data = batches(StandIn(), ["", "abc", " \n", "123", "d"])
    (batch,) = data
    assert batch.passages == (4, 1), "numbers are those of the source"
    assert data.facts.skipped_passages == 3
    assert data.facts.passages == 2


def test_nothing_but_the_frame_is_no_passage() -> None:
    data = batches(framed(), ["the", "\u200b "])
    assert sum(len(batch.passages) for batch in data) + data.facts.skipped_passages == 2


def test_only_white_space(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n\n\t\n")
    said = refusal(StandIn(), read_passages(tmp_path / "a.txt"))
    assert f"{tmp_path / 'a.txt'}: no passage holds a token of text" in said
    assert "no passage holds a token of text" in refusal(StandIn(), ["", " "])
    assert "no passage holds a token of text" in refusal(StandIn(), as_passages([" "], window=3))


@pytest.mark.parametrize("source", [[], (), iter(())])
def test_no_source(source: Any) -> None:
    assert "is empty; give at least one passage" in refusal(StandIn(), source)


def test_a_sentence_alone_is_refused() -> None:
    assert "give a list of strings ([text] for one sentence)" in refusal(StandIn(), "one sentence", InputError)


@pytest.mark.parametrize("name", ["batch_size", "max_length", "limit"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_counts_must_be_whole_and_positive(name: str, value: Any) -> None:
    said = refusal(StandIn(), ["a"], InputError, **{name: value})
    assert f"{name} must be a whole number of at least 1, and is {value!r}" in said


def test_facts() -> None:
    data = batches(framed(), ["the cat sat", "dog", ""], batch_size=8)
    assert list(data)
    assert data.facts.to_dict() == {
        "files": [],
        "passages": 2,
        "tokens": 4,
        "special_tokens": 4,
        "padding": 2,
        "truncated_passages": 0,
        "truncated_tokens": 0,
        "skipped_passages": 1,
        "over_trained_length": 0,
        "longest": 5,
        "batches": 1,
        "padding_side": "right",
        "window": None,
        "decoder": None,
        "notes": [],
    }
    before = data.facts
    assert list(data)
    assert data.facts is not before
    assert data.facts == before


def test_facts_name_the_file(tmp_path: Path) -> None:
    from hashlib import sha256

    (tmp_path / "a.txt").write_text("abc\n")
    data = batches(StandIn(), read_passages(tmp_path / "a.txt"))
    list(data)
    assert data.facts.files == [
        {"path": str(tmp_path / "a.txt"), "format": "txt (line)", "sha256": sha256(b"abc\n").hexdigest()}
    ]
    assert data.facts.notes == ["a.txt: read as one passage a line"]


SEQ2SEQ = InputRules(vocabulary=29, encoder_decoder=True, decoder_start=0, decoder_vocabulary=29)


def test_decoder_reads_the_passage_shifted_right() -> None:
    data = batches(StandIn(word_tokenizer(), SEQ2SEQ), ["the cat", "dog"])
    (batch,) = data
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 2, 9, 0], [0, 2, 4, 5]]
    assert batch.inputs["decoder_attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.decoder_rows is not None
    assert batch.decoder_rows.tolist() == [[2, 2, 1, 0], [2, 2, 1, 1]]
    assert batch.tokens == 3 + 3
    assert data.facts.decoder == "the passage itself, shifted right behind the decoder's start token"


def test_decoder_reads_the_target() -> None:
    data = batches(StandIn(letters, SEQ2SEQ), [("ab", "cde"), ("fgh", "i")])
    (batch,) = data
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 0], [6, 7, 8]]
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 3, 4], [0, 0, 0]]
    assert batch.decoder_rows is not None
    assert batch.decoder_rows.tolist() == [[2, 1, 1], [2, 0, 0]]
    assert data.facts.decoder is not None
    assert "the target text" in data.facts.decoder


def test_target_for_a_model_without_decoder() -> None:
    said = refusal(StandIn(), [("ab", "cd")], InputError)
    assert "has no decoder" in said


def test_decoder_without_start_token() -> None:
    rules = InputRules(encoder_decoder=True)
    assert "the decoder's first token is not known" in refusal(StandIn(letters, rules), ["ab"])


def test_decoder_limits() -> None:
    rules = InputRules(encoder_decoder=True, decoder_start=0, decoder_positions=2, decoder_vocabulary=9)
    assert "has 3 decoder tokens, and the model has positions for 2" in refusal(StandIn(letters, rules), ["abc"])
    assert "the decoder's input holds id 24" in refusal(StandIn(letters, rules), [("ab", "xy")])

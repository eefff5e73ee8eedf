"""Files of text: what is read as what, and one sentence for each thing that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from headwise.data import Passages, as_passages, read_inputs, read_passages
from headwise.errors import DataError, InputError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, held: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(held.encode() if isinstance(held, str) else held)
        return path

    return written


def texts(source: Passages) -> list[str]:
    return [passage.text for passage in source]


def refusal(path: Any, kind: type[Exception] = DataError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        list(read_passages(path, **options))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_passage_a_line(write: Write) -> None:
    source = read_passages(write("a.txt", "one\ntwo two\r\nthree\n\n"))
    assert texts(source) == ["one", "two two", "three"]
    assert [passage.where for passage in source] == ["a.txt line 1", "a.txt line 2", "a.txt line 3"]
    assert source.notes == ("a.txt: read as one passage a line",)
    assert source.files[0]["format"] == "txt (line)"
    assert len(source.files[0]["sha256"]) == 64


def test_paragraphs(write: Write) -> None:
    path = write("a.txt", "\n\na first\nparagraph\n \nand the\nsecond\none\n\n")
    source = read_passages(path)
    assert texts(source) == ["a first\nparagraph", "and the\nsecond\none"]
    assert [passage.where for passage in source] == ["a.txt line 3", "a.txt line 6"]
    assert texts(read_passages(path, split="line")) == ["a first", "paragraph", "and the", "second", "one"]
    assert texts(read_passages(path, split="file")) == ["\n\na first\nparagraph\n \nand the\nsecond\none\n"]


def test_a_stray_blank_line_does_not_make_paragraphs(write: Write) -> None:
    lines = [f"sentence {index}" for index in range(60)]
    path = write("a.txt", "\n".join([*lines[:37], "", *lines[37:]]))
    assert texts(read_passages(path)) == lines
    assert len(texts(read_passages(path, split="paragraph"))) == 2


@pytest.mark.parametrize("held", ["\ufeffone\ntwo", "one\rtwo", "one\r\ntwo\r\n", "one\ntwo\n\n\n"])
def test_line_ends_and_byte_order_mark(write: Write, held: str) -> None:
    assert texts(read_passages(write("a.txt", held))) == ["one", "two"]


def test_unusual_line_separators_stay_inside(write: Write) -> None:
    """Only LF, CR and CRLF end a line: a form feed or U+2028 does not."""
    assert texts(read_passages(write("a.txt", "one\x0ctwo\u2028three\n"))) == ["one\x0ctwo\u2028three"]


@pytest.mark.parametrize(("suffix", "packer"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_compressed(write: Write, suffix: str, packer: Callable[[bytes], bytes]) -> None:
    assert texts(read_passages(write(f"a.txt{suffix}", packer(b"one\ntwo")))) == ["one", "two"]
    assert texts(read_passages(write(f"a.jsonl{suffix}", packer(b'{"text": "one"}')))) == ["one"]
    assert texts(read_passages(write(f"a.csv{suffix}", packer(b"text,n\none,1")))) == ["one"]
    cut = packer(b"one\ntwo" * 1000)
    said = refusal(write(f"b.txt{suffix}", cut[: len(cut) // 2]))
    assert "cannot be unpacked" in said
    assert "cannot be unpacked" in refusal(write(f"c.txt{suffix}", b"not compressed at all"))


def test_any_other_suffix_is_text(write: Write) -> None:
    assert texts(read_passages(write("README", "one"))) == ["one"]
    assert texts(read_passages(write("a.md", "one"))) == ["one"]


def test_jsonl(write: Write) -> None:
    path = write("a.jsonl", '{"text": "one", "to": "eins", "n": 1}\n\n{"text": "two", "to": "zwei"}\n')
    assert texts(read_passages(path)) == ["one", "two"]
    assert texts(read_passages(path, field="to")) == ["eins", "zwei"]
    source = read_passages(path, target_field="to")
    assert [(passage.text, passage.target) for passage in source] == [("one", "eins"), ("two", "zwei")]
    assert [passage.where for passage in source] == ["a.jsonl line 1", "a.jsonl line 3"]


def test_csv(write: Write) -> None:
    path = write("a.csv", 'text,to\n"one, and\nmore",eins\n"",zwei\nNA,drei\n')
    assert texts(read_passages(path)) == ["one, and\nmore", "", "NA"]
    assert [passage.target for passage in read_passages(path, target_field="to")] == ["eins", "zwei", "drei"]
    assert texts(read_passages(write("a.tsv", "text\tn\none, two\t3\n"))) == ["one, two"]
    assert texts(read_passages(write("b.csv", "sentence\none\n"))) == ["one"], "the only column needs no name"


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pd.DataFrame({"text": ["one", None, "three"], "to": ["eins", "zwei", "drei"], "n": [1, 2, 3]}).to_parquet(path)
    assert texts(read_passages(path)) == ["one", "", "three"]
    assert [passage.target for passage in read_passages(path, target_field="to")] == ["eins", "zwei", "drei"]
    assert "column 'n' is of type int64, not text" in refusal(path, field="n")
    assert "has no column 'words'; it has 'text', 'to', 'n'" in refusal(path, field="words")
    pd.DataFrame({"text": pd.Categorical(["one", "two", "one"])}).to_parquet(path)
    assert texts(read_passages(path)) == ["one", "two", "one"]


def test_large_tables_are_read_in_pieces(tmp_path: Path) -> None:
    words = [f"word {index}" for index in range(9001)]
    pd.DataFrame({"text": words}).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame({"text": words}).to_csv(tmp_path / "a.csv", index=False)
    assert texts(read_passages(tmp_path / "a.parquet")) == words
    assert texts(read_passages(tmp_path / "a.csv")) == words
    last = list(read_passages(tmp_path / "a.csv"))[-1]
    assert last.where == "a.csv row 9001"


def test_several_files(write: Write) -> None:
    first, second = write("a.txt", "one\ntwo"), write("b.jsonl", '{"text": "three"}')
    source = read_passages([first, second])
    assert texts(source) == ["one", "two", "three"]
    assert [file["format"] for file in source.files] == ["txt (line)", "jsonl"]


def test_limit_and_going_through_again(write: Write) -> None:
    source = read_passages(write("a.txt", "one\ntwo\nthree"), limit=2)
    assert texts(source) == texts(source) == ["one", "two"]


def test_format_overrides_the_suffix(write: Write) -> None:
    assert texts(read_passages(write("a.data", '{"text": "one"}'), format="jsonl")) == ["one"]
    assert texts(read_passages(write("b.json", '{"text": "one"}'), format="txt")) == ['{"text": "one"}']


def test_missing_file(tmp_path: Path, write: Write) -> None:
    assert "there is no such file" in refusal(tmp_path / "a.txt")
    write("a.jsonl", "{}")
    assert "beside it there is a.jsonl" in refusal(tmp_path / "a.txt")
    assert "its folder" in refusal(tmp_path / "no" / "a.txt")


def test_folder(tmp_path: Path, write: Write) -> None:
    write("a.txt", "one")
    assert "is a folder, and one file is needed; name a file in it, such as a.txt" in refusal(tmp_path)


def test_unreadable_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.txt", "one")

    def refused(self: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    assert "cannot be read (Permission denied)" in refusal(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_empty_file(write: Write, name: str) -> None:
    assert "is empty (0 bytes)" in refusal(write(name, b""))


@pytest.mark.parametrize(
    ("held", "rule"),
    [
        (b"one\x00two\n", "is binary data (it holds zero bytes)"),
        (b"text\n" + b"x" * 5000 + b"one\x00two\n", "line 2 holds a zero byte"),
        (b"%PDF-1.7 and so on", "a PDF"),
        (b"PK\x03\x04 and so on", "a zip archive"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"\x1f\x8b\x08 and so on", "gzip-compressed; name it .gz"),
        (b"PAR1 and so on", "a parquet file; name it .parquet"),
        ("one\ntwo".encode("utf-16"), "is UTF-16"),
        ("one\ntwo".encode("utf-16-le"), "is UTF-16"),
        ("one\ntwo".encode("utf-32"), "is UTF-32"),
        ("one\ntwo".encode("utf-32-be"), "is UTF-32"),
        ("one\ntwo!".encode("utf-32-le"), "is UTF-32"),
        ("ein\nschön\n".encode("latin-1"), "line 2 is not UTF-8 (byte 0xf6 at column 4)"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_not_utf8_text(write: Write, held: bytes, rule: str, name: str) -> None:
    said = refusal(write(name, held))
    if name == "a.txt" or "line" not in rule:
        assert rule in said
    else:
        assert "JSON" in said or "UTF-8" in said or "zero" in said or "csv" in said


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("a.json", "is one JSON document"),
        ("a.safetensors", "holds tensors, not text"),
        ("a.pdf", "is a PDF"),
        ("a.xlsx", "save it as .csv"),
        ("a.zip", "unpack it first"),
    ],
)
def test_suffixes_that_are_no_text(write: Write, name: str, rule: str) -> None:
    assert rule in refusal(write(name, "one"))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"text": ', "line 2 is not valid JSON"),
        ('"a string"', "line 2 is a JSON string"),
        ("[1, 2]", "line 2 is a JSON list"),
        ("3", "line 2 is a JSON number"),
        ('{"words": "x", "n": 1}', "line 2 has no field 'text'; it has 'words', 'n'; choose one with field="),
        ('{"text": 3}', "field 'text' of line 2 is a number, not text"),
        ('{"text": ["x"]}', "field 'text' of line 2 is a list, not text"),
        ('{"input_ids": [1]}', "input_ids are given as ready inputs"),
        ("{}", "it has no fields"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": %s}' % ("9" * 5000), "line 2 holds a number with too many digits to be read"),
    ],
)
def test_jsonl_lines_that_are_none(write: Write, line: str, rule: str) -> None:
    assert rule in refusal(write("a.jsonl", '{"text": "one"}\n' + line + "\n"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.safetensors"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    opener = read_inputs if name == "a.safetensors" else read_passages
    with pytest.raises(DataError, match="is a pipe or a device, and files are read more than once; save it"):
        opener(tmp_path / name)


def test_a_limit_beyond_machine_words_is_no_limit(write: Write) -> None:
    assert len(list(read_passages(write("a.txt", "one\ntwo\n"), limit=10**30))) == 2


def test_a_json_document_named_jsonl(write: Write) -> None:
    said = refusal(write("a.jsonl", json.dumps([{"text": "one"}], indent=1)))
    assert "line 1" in said


def test_wrong_field_is_refused_at_once(write: Write) -> None:
    with pytest.raises(DataError, match="has no field 'words'"):
        read_passages(write("a.jsonl", '{"text": "one"}'), field="words")


@pytest.mark.parametrize(
    ("held", "options", "rule"),
    [
        ("a,b\n1,2\n", {}, "has no column 'text'; it has 'a', 'b'"),
        ("text,n\none,1\n", {"field": "m"}, "has no column 'm'; it has 'text', 'n'"),
        ("text,n\none,1\n", {"field": "n"}, "column 'n' holds numbers (such as 1), not text"),
        ("text,n\none,1\ntwo,2,3\n", {}, "is not valid csv"),
        ("\n\n", {}, "holds no table"),
        ('text,n\n"one,1\n', {}, "is not valid csv"),
    ],
)
def test_csv_that_is_none(write: Write, held: str, options: dict[str, Any], rule: str) -> None:
    assert rule in refusal(write("a.csv", held), **options)


def test_damaged_parquet(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pd.DataFrame({"text": ["one", "two"]}).to_parquet(path)
    held = path.read_bytes()
    assert "is not a readable parquet file" in refusal(write("b.parquet", held[: len(held) // 2]))
    assert "is not a readable parquet file" in refusal(write("c.parquet", b"no parquet"))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"window": 0}, "window must be a whole number of at least 1, and is 0"),
        ({"window": 2.5}, "window must be"),
        ({"limit": True}, "limit must be"),
        ({"format": "xml"}, "format must be one of txt, jsonl"),
        ({"split": "word"}, "split must be one of line, paragraph, file"),
        ({"field": "text"}, "a .txt file has no fields"),
    ],
)
def test_wrong_arguments(write: Write, options: dict[str, Any], rule: str) -> None:
    assert rule in refusal(write("a.txt", "one"), InputError, **options)


def test_split_of_a_table(write: Write) -> None:
    assert "split='line' is for .txt files" in refusal(write("a.jsonl", "{}"), InputError, split="line")
    with pytest.raises(InputError, match="empty list of files"):
        read_passages([])


def test_strings_in_memory() -> None:
    assert texts(as_passages(["one", "two", "three"], limit=2)) == ["one", "two"]
    source = as_passages(word for word in ("one", "two"))
    assert texts(source) == ["one", "two"]
    with pytest.raises(InputError, match="read only once"):
        texts(source)
    pairs = list(as_passages([("one", "eins")]))
    assert (pairs[0].text, pairs[0].target) == ("one", "eins")


def test_series_and_arrays_of_strings() -> None:
    assert texts(as_passages(pd.Series(["one", "two"]))) == ["one", "two"]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("a plain sentence", r"texts is the string 'a plain sentence', which is not an existing file"),
        (b"bytes", "must be a list of strings, and is a bytes"),
        (3, "must be a list of strings, and is a int"),
        ([3], r"passage 0 \(counted from 0\) is a int"),
        (["one", None], r"passage 1 \(counted from 0\) is a NoneType"),
    ],
)
def test_things_that_are_no_texts(given: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        list(as_passages(given))


def test_a_path_is_read(write: Write) -> None:
    path = write("a.txt", "one\ntwo")
    assert texts(as_passages(path)) == texts(as_passages(str(path))) == ["one", "two"]
    assert as_passages(as_passages(path)) is not None


def test_the_name_of_a_file_in_a_list_is_refused(tmp_path: Path) -> None:
    """It would be measured as a text of eight letters."""
    file = tmp_path / "book.txt"
    file.write_text("A book.")
    with pytest.raises(InputError, match="the name of a file; in a list a string is the text itself"):
        list(as_passages([str(file)]))
    assert [one.text for one in as_passages([str(tmp_path / "none.txt")])] == [str(tmp_path / "none.txt")]

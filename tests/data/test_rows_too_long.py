"""A comma in a text without quotes must not lose the text before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.data import read_passages
from headwise.errors import DataError


@pytest.mark.parametrize("table", ["text\nthe cat, sat\na dog, ran\n", "text,label\nthe cat, sat,1\na dog, ran,0\n"])
def test_rows_longer_than_the_header_are_refused(tmp_path: Path, table: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(table)
    with pytest.raises(DataError, match="more fields than the header names columns"):
        list(read_passages(path))


def test_quotes_keep_a_comma(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\n"the cat, sat"\n"a dog, ran"\n')
    assert [passage.text for passage in read_passages(path)] == ["the cat, sat", "a dog, ran"]

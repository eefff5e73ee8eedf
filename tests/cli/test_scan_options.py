"""What ``headwise scan`` hands to the verb, and the combinations that it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwise import verbs
from headwise.cli import scan as scan_module
from headwise.cli.main import main


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the verb received; the verb itself does nothing."""
    received: dict[str, Any] = {}

    def scan(model: str, **options: Any) -> SimpleNamespace:
        received.update(options, model=model)
        assert callable(received.pop("progress"))
        assert callable(received.pop("notice"))
        return SimpleNamespace(run={"notes": ["12 tokens were cut", "12 tokens were cut"]}, table=None, folder=None)

    monkeypatch.setattr(verbs, "scan_run", scan, raising=False)
    monkeypatch.setattr(scan_module, "tell", lambda *_: None)
    return received


def test_defaults_are_left_to_the_verb(given: dict[str, Any]) -> None:
    assert main(["scan", "m", "--text", "a.txt"]) == 0
    assert given == {"model": "m", "texts": [Path("a.txt")]}


def test_everything(given: dict[str, Any]) -> None:
    options = (
        "--text a.txt --text b.jsonl --sentence X --field body --target-field de --window 7 --max-length 11 --limit 13 "
        "--batch-size 5 --device cuda:1 --dtype bfloat16 --seed 3 --backend tiled --revision main -o run "
        "--overwrite --allow-pickle --trust-remote-code --quiet --json"
    )
    assert main(["scan", "m", *options.split()]) == 0
    assert given == {
        "model": "m",
        "texts": [Path("a.txt"), Path("b.jsonl"), "X"],
        "field": "body",
        "target_field": "de",
        "window": 7,
        "max_length": 11,
        "limit": 13,
        "batch_size": 5,
        "device": "cuda:1",
        "dtype": "bfloat16",
        "seed": 3,
        "backend": "tiled",
        "revision": "main",
        "output": Path("run"),
        "overwrite": True,
        "allow_pickle": True,
        "trust_remote_code": True,
    }


def test_seed_zero_is_a_seed(given: dict[str, Any]) -> None:
    assert main(["scan", "m", "--sentence", "a", "--seed", "0"]) == 0
    assert given["seed"] == 0


def test_ready_inputs(given: dict[str, Any]) -> None:
    assert main(["scan", "m", "--inputs", "ids.jsonl"]) == 0
    assert given["inputs"] == Path("ids.jsonl")
    assert "texts" not in given


REFUSED = {
    "": "nothing to read: give --text FILE, --sentence TEXT or --inputs FILE",
    "--inputs a.jsonl --text b.txt": "--inputs stands alone",
    "--inputs a.jsonl --sentence b": "--inputs stands alone",
    "--sentence b --field body": "--field is about a file of text: it needs --text FILE",
    "--inputs a.jsonl --target-field de": "--target-field is about a file of text",
    "--sentence b --window 5": "--window is about a file of text",
    "--text a.txt --overwrite": "--overwrite needs -o RUN",
    "--text a.txt --window 9 --max-length 8": "--window 9 is longer than --max-length 8",
    "--sentence=": "--sentence is empty",
}


@pytest.mark.parametrize("options", REFUSED)
def test_combinations_that_are_wrong_usage(
    options: str, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scan", "m", *options.split()]) == 2
    assert REFUSED[options] in " ".join(capsys.readouterr().err.split())
    assert given == {}


def test_empty_sentence(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", "m", "--sentence", " "]) == 2
    assert "--sentence is empty" in capsys.readouterr().err

"""headwise importance, redundancy and statistics: what they hand on, print and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise import verbs
from headwise.cli.main import main
from tests.measures.tiny import llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk and inputs for it."""
    path = tmp_path_factory.mktemp("tiny")
    llama(num_hidden_layers=2).save_pretrained(path)
    generator = torch.Generator().manual_seed(3)
    lines = [json.dumps({"input_ids": torch.randint(3, 53, (n,), generator=generator).tolist()}) for n in (7, 5, 9)]
    (path / "inputs.jsonl").write_text("\n".join(lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_importance_page(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = run(
        capsys, "importance", folder, "--inputs", folder / "inputs.jsonl", "-o", tmp_path / "run",
        "--method", "gradient",
        "--method", "zero",
    )  # fmt: skip
    assert status == 0, err
    assert "Most important heads" in out
    assert "Least important heads" in out
    assert "ablation_zero" in out
    assert "loss: next_token" in err
    assert max(map(len, out.splitlines())) <= 80 or "report:" in out
    assert (tmp_path / "run" / "report.html").is_file()


def test_importance_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "importance", folder, "--inputs", folder / "inputs.jsonl", "--json", "--per", "token")
    document = json.loads(out)
    assert status == 0
    table = hw.HeadTable.from_document(document["table"])
    assert list(table.measures) == ["gate_gradient", "fisher"]
    assert document["run"]["arguments"]["per"] == "token"


def test_roles_are_never_cut_short(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "roles", folder, "--inputs", folder / "inputs.jsonl", "--no-confirm")
    assert status == 0, err
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    header, *lines = out.split("\n\n")[1].splitlines()
    assert header.split() == ["role", "best", "share", "interval", "by", "position", "shuffled", "rows", "heads"]
    assert all(line.split()[0] in {"previous", "own", "first", "duplicate", "induction", "rarest"} for line in lines)
    assert len(lines) >= 3


def test_redundancy(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "r.safetensors"
    status, out, err = run(capsys, "redundancy", folder, "--inputs", folder / "inputs.jsonl", "-o", file, "--at", "0.5")
    assert status == 0, err
    assert "1 - CKA" in out
    assert "nearer than 0.5" in out
    assert file.is_file()
    _, out, _ = run(capsys, "redundancy", folder, "--inputs", folder / "inputs.jsonl", "--at", "1")
    assert "1 cluster of heads nearer than 1 " in out
    status, out, _ = run(capsys, "redundancy", folder, "--inputs", folder / "inputs.jsonl", "--json", "--rows", "2")
    document = json.loads(out)
    assert document["patterns"]["rows_per_passage"] == 2
    assert document["file"] is None


def test_statistics(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "s.safetensors"
    arguments = ("statistics", folder, "--inputs", folder / "inputs.jsonl", "-o", file)
    status, out, _ = run(capsys, *arguments, "--gradients", "--skip-first", "1")
    assert (status, out) == (0, f"2 layers, 18 rows, gradients of next_token, sum over the example's tokens: {file}\n")
    status, out, _ = run(capsys, *arguments, "--json")
    assert json.loads(out) == {"file": str(file), "sites": 2, "rows": [21, 21], "loss": None}


def test_scan_of_chosen_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "scan", folder, "--inputs", folder / "inputs.jsonl", "--measures", "qk_rank, spread")
    assert status == 0
    assert "Largest qk_rank" in out
    assert "logit_spread" in out
    status, _, err = run(capsys, "scan", folder, "--inputs", folder / "inputs.jsonl", "--measures", "qk_rnk")
    assert status == 1
    assert "did you mean 'qk_rank'?" in err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["importance", "m"], 2, "nothing to read"),
        (["importance", "m", "--text", "a.txt", "--method", "gradients"], 2, "gradients"),
        (["importance", "m", "--text", "a.txt", "--overwrite"], 2, "--overwrite needs -o RUN"),
        (["statistics", "m", "--text", "a.txt"], 2, "Missing option"),
        (["statistics", "m", "--text", "a.txt", "-o", "x", "--loss", "labels"], 2, "it needs --gradients"),
        (["redundancy", "m", "--text", "a.txt", "--window", "9", "--max-length", "5"], 2, "would lose its end"),
        (["redundancy", "m", "--text", "a.txt", "--at", "2"], 2, "2"),
    ],
)
def test_wrong_usage(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, _, err = run(capsys, *arguments)
    assert found == status
    assert words in err


def test_a_loss_that_does_not_fit_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "importance", folder, "--inputs", folder / "inputs.jsonl", "--loss", "fidelity_kl")
    assert status == 1
    assert err.splitlines()[-1].startswith("headwise: the gradient of fidelity_kl is exactly zero")


def test_options_reach_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, Any] = {}

    def importance_run(model: str, **options: Any) -> Any:
        received.update(options, model=model)
        raise hw.HeadwiseError("enough")

    monkeypatch.setattr(verbs, "importance_run", importance_run)
    given = (
        "--text a.txt --sentence X --method zero --method mean --loss m:f --per token --limit 3 --device cpu --seed 5"
    )
    assert main(["importance", "m", *given.split()]) == 1
    assert {name: value for name, value in received.items() if name not in ("progress", "notice")} == {
        "model": "m",
        "texts": [Path("a.txt"), "X"],
        "method": ["zero", "mean"],
        "loss": "m:f",
        "per": "token",
        "limit": 3,
        "device": "cpu",
        "seed": 5,
    }


@pytest.mark.parametrize("rule", [".x:f", "x", "x:", ":f", "a b:f", "no_such_module:f", "json:nothing"])
def test_rules_that_are_not_there(rule: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "roles", folder, "--inputs", folder / "inputs.jsonl", "--rule", rule)
    assert (status, out) == (2, "")
    assert f"--rule {rule}: " in " ".join(err.split())

"""headwise plan: what it writes, prints and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import headwise as hw
from headwise import verbs
from headwise.artifacts import read_document
from headwise.cli import plan as cli
from headwise.cli.main import main
from headwise.cli.plan_page import plan_page
from headwise.measures.covariance import Statistics
from headwise.plans import HeadPlan
from headwise.verbs.choosing import CRITERIA
from tests.measures import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk and inputs for it."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.llama(num_hidden_layers=2).save_pretrained(path)
    lines = [json.dumps(one) for one in tiny.ids(*(8 + at % 5 for at in range(16)))]
    (path / "inputs.jsonl").write_text("\n".join(lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_it_knows_every_criterion() -> None:
    assert tuple(CRITERIA) == cli.CRITERIA


def test_a_plan_is_written_and_shown(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, moments = tmp_path / "plan.json", tmp_path / "m.safetensors"
    status, out, err = run(
        capsys, "plan", folder, "--inputs", folder / "inputs.jsonl", "--keep", "50%", "-o", file,
        "--save-statistics", moments,
    )  # fmt: skip
    assert status == 0, err
    plan = hw.HeadPlan.load(file)
    assert len(plan) == 4
    assert "4 of 8 heads go (50%), chosen by set-aware" in out
    assert "1.0 forward passes" in out
    marks = {line.split()[0]: line.split()[1] for line in out.splitlines() if line.startswith("model.layers")}
    assert {block: tuple(at for at, mark in enumerate(row) if mark == "·") for block, row in marks.items()} == {
        block: plan.removed.get(block, ()) for block in plan.blocks
    }
    again = verbs.plan(folder, statistics=moments, keep=0.5)
    assert again.cuts == plan.cuts


def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "plan", folder, "--inputs", folder / "inputs.jsonl", "--json", "--params", "1.5k", "--unit", "group",
        "--criterion", "random", "--per-layer", "0",
    )  # fmt: skip
    assert status == 1
    assert out == ""
    status, out, _ = run(
        capsys, "plan", folder, "--inputs", folder / "inputs.jsonl", "--json", "--keep", "0.5", "--protect",
        "model.layers.0.self_attn", "--per-layer", "0",
    )  # fmt: skip
    assert status == 0
    plan = hw.HeadPlan.from_document(json.loads(out)["plan"])
    assert plan.removed == {"model.layers.1.self_attn": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "give one budget of --keep, --params, --cache-bytes, --speed, --max-loss; 0 came"),
        (("--keep", "0.5", "--params", "3"), 2, "2 came"),
        (("--keep", "half"), 2, "'half' is no number like 0.6 or 60%"),
        (("--params", "many"), 2, "'many' is no number like 1500000, 80M or 1.5G"),
        (("--keep", "2"), 1, "keep must lie in (0, 1]"),
        (("--keep", "0.5", "--protect", "model.layers.0.self_attn:9"), 1, "there is no head 9"),
        (("--keep", "0.5", "--plot", "a.png"), 2, "--plot is about comparing: it needs --compare"),
        (("--keep", "0.5", "-o", "nowhere/at/all.json"), 1, "there is no folder nowhere/at"),
        (("--keep", "0.5", "-o", "a.json", "--save-statistics", "./a.json"), 2, "name the same file; give two"),
        (("--keep", "0.5", "--criterion", "random", "--save-statistics", "a.st"), 2, "random takes no statistics that"),
        (("--compare", "all", "--keep", "0.5"), 2, "--keep is about one plan"),
        (("--compare", "luck"), 2, "--compare takes all, or names of set-aware"),
        (("--compare", "random", "--plot", "a.gif"), 1, "a plot is written to .png, .svg, .pdf; choose one of these"),
    ],
)
def test_refusals(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, words: str
) -> None:
    found, out, err = run(capsys, "plan", folder, "--inputs", folder / "inputs.jsonl", *arguments)
    assert (found, out) == (status, "")
    assert words in " ".join(err.split())


def test_a_plan_that_is_there_is_kept(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("mine")
    wanted = ("plan", folder, "--inputs", folder / "inputs.jsonl", "--keep", "0.5", "-o", file)
    status, _, err = run(capsys, *wanted)
    assert status == 1
    assert "is there; give another file, or --overwrite to replace it" in err
    assert file.read_text() == "mine"
    assert run(capsys, *wanted, "--overwrite")[0] == 0
    assert len(hw.HeadPlan.load(file)) == 4


def test_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "plan", folder, "--keep", "0.5")
    assert status == 2
    assert "nothing to read" in err
    assert run(capsys, "plan", folder, "--keep", "0.5", "--criterion", "weight-norm")[0] == 0


def test_a_comparison(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, figure = tmp_path / "c.json", tmp_path / "c.svg"
    status, out, err = run(
        capsys, "plan", folder, "--inputs", folder / "inputs.jsonl", "--compare", "set-aware,michel,random",
        "--at", "25%,50%", "--seeds", "2", "-o", file, "--plot", figure,
    )  # fmt: skip
    assert status == 0, err
    document = read_document(file, "headwise.comparison")
    curves = {(one["criterion"], one["repair"], one["seed"]): one for one in document["curves"]}
    assert len(curves) == 2 * (1 + 1 + 2)
    assert [point["heads"] for point in curves["set-aware", "none", None]["points"]] == [2, 4]
    assert all(point["low"] <= point["loss"] <= point["high"] for one in curves.values() for point in one["points"])
    assert curves["michel", "none", None]["passes"] == 3
    assert document["held_out"]["passages"] == 4
    assert "random 1" in out
    assert max(map(len, out.splitlines())) <= 100
    assert figure.read_text().count("<svg") == 1


def test_an_interrupt_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    lines = (folder / "inputs.jsonl").read_text().splitlines() * 40
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    arguments = ["plan", str(folder), "--inputs", str(tmp_path / "long.jsonl"), "--keep", "0.4", "-o", str(file)]
    code = f"""
import sys
from headwise.cli.main import main
from headwise.plans import Greedy

def scores(self, *of, real=Greedy.scores):
    print("choosing", flush=True)
    return real(self, *of)

Greedy.scores = scores
sys.exit(main({[*arguments, "--criterion", "greedy", "--sample", "6000"]!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "choosing\n"
    process.send_signal(2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "interrupted; nothing was saved" in err
    assert not file.exists()
    assert not list(tmp_path.glob(".plan*"))


def test_texts_that_are_weighed_and_rows_that_count_alike(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    moments = tmp_path / "m.safetensors"
    arguments = ("plan", folder, "--inputs", folder / "inputs.jsonl", "--keep", "0.5", "-o", tmp_path / "p.json")
    status, _, err = run(capsys, *arguments, "--plain", "--save-statistics", moments)
    assert status == 0, err
    assert not Statistics.load(moments).relative
    status, out, err = run(capsys, *arguments, "--overwrite", "--weight", "2")
    assert (status, out) == (2, "")
    assert "--weight" in err


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (90, "90 parameters stay, 10 go (10.0%)"),
        (102, "102 parameters with the repair, 2 more than before (2.0%)"),
    ],
)
def test_parameters_that_go_or_come(after: int, said: str) -> None:
    """Running means that share no key-value head save nothing, and the repair brings intercepts."""
    sizes = [{"parameters": number, "cache_bytes": 0.0} for number in (100, after)]
    facts = {"before": sizes[0], "after": sizes[1]}
    console = Console(width=100)
    with console.capture() as shown:
        console.print(plan_page(HeadPlan((), blocks={"a": (2, 2)}, facts=facts), None))
    assert said in shown.get()

"""headwise prune and headwise verify: end to end on a tiny model, what they say, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.cli.main import main
from headwise.cli.prune import heads_of
from headwise.plans import HeadCut, HeadPlan
from tests.measures.tiny import llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk and inputs for it."""
    path = tmp_path_factory.mktemp("tiny")
    llama(num_hidden_layers=2).save_pretrained(path)
    generator = torch.Generator().manual_seed(3)
    lines = [json.dumps({"input_ids": torch.randint(3, 53, (n,), generator=generator).tolist()}) for n in (37, 45, 39)]
    (path / "inputs.jsonl").write_text("\n".join(lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_cut_said_and_verified(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    status, out, err = run(capsys, "prune", folder, "--heads", "model.layers.0:0", "--repair", "none", "-o", small)
    assert status == 0, err
    assert out.startswith("1 head of 1 block removed")
    assert "model.layers.0.self_attn" in out
    assert "removed equals gated: 1 layer call on the same input" in out
    assert "(allowed: 1e-05)" in out
    assert "the original, eager against as set" in out or "the same bit for bit" in out
    before = sum(one.numel() for one in hw.load(folder).module.parameters())
    loaded = hw.load(small)
    after = sum(one.numel() for one in loaded.module.parameters())
    assert f"parameters: {before:,} -> {after:,}" in out
    assert f"saves nothing: all {before:,} parameters stay" in out
    assert out.splitlines()[-1] == str(small)
    assert "loaded by: hw.load; not by from_pretrained" in out.splitlines()[-2]
    assert max(map(len, out.splitlines()[:4])) <= 80
    status, out, err = run(capsys, "verify", folder, small)
    assert status == 0, err
    assert out.startswith("1 head of 1 block is gone")
    assert err == ""
    status, out, _ = run(capsys, "verify", folder, small, "--json")
    assert json.loads(out)["removed"] == {"model.layers.0.self_attn": [0]}
    assert json.loads(out)["recorded"] is True


@pytest.mark.parametrize("option", [["--allow-pickle"], ["--dtype", "bfloat16"]], ids=str)
def test_verified_as_the_original_was_loaded(
    option: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What --allow-pickle and --dtype were needed for in prune is needed for the original in verify."""
    original, small = folder, tmp_path / "small"
    if "--allow-pickle" in option:
        original = tmp_path / "pickled"
        original.mkdir()
        (original / "config.json").write_text((folder / "config.json").read_text())
        torch.save(hw.load(folder).module.state_dict(), original / "pytorch_model.bin")
    named = ("--heads", "model.layers.0:0", "--repair", "none", "-o", small)
    assert run(capsys, "prune", original, *named, *option)[0] == 0
    assert run(capsys, "verify", original, small)[0] == 1
    status, out, err = run(capsys, "verify", original, small, *option)
    assert status == 0, err
    assert out.startswith("1 head of 1 block is gone")


def test_repaired_from_inputs_as_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    status, out, err = run(
        capsys, "prune", folder, "--heads", "model.layers.1:1", "--inputs", folder / "inputs.jsonl", "-o", small,
        "--json",
    )  # fmt: skip
    assert status == 0, err
    document = json.loads(out)
    repair = document["surgery"]["repair"]
    assert repair["method"] == "least_squares"
    assert repair["calibration"]["inputs"] == str(folder / "inputs.jsonl")
    assert repair["calibration"]["relative"] is True
    assert repair["calibration"]["rows"] == 37 + 45 + 39
    assert repair["layers"][0]["left"] < repair["layers"][0]["lost"]
    assert document["file_bytes"] == (small / "headwise.safetensors").stat().st_size
    assert "the text is short" not in err
    status, out, _ = run(capsys, "verify", folder, small)
    assert status == 0
    assert "repaired: 1 output projection, taken over" in out


def test_a_short_text_is_warned_of(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(
        capsys, "prune", folder, "--heads", "model.layers.1:1", "--inputs", folder / "inputs.jsonl", "--limit", "1",
        "-o", tmp_path / "small",
    )  # fmt: skip
    assert status == 0
    assert "warning: the text is short: 37 rows for the" in err


def test_another_model_is_not_verified(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    run(capsys, "prune", folder, "--heads", "model.layers.0:0", "--repair", "none", "-o", small)
    other: Any = llama(num_hidden_layers=2)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    other.save_pretrained(tmp_path / "other")
    status, _, err = run(capsys, "verify", tmp_path / "other", small)
    assert status == 1
    assert "mlp.up_proj.weight is not the original's" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "say which heads go"),
        (["--heads", "model.layers.0:0", "--plan", "p.json"], 2, "one of the two"),
        (["--heads", "model.layers.0"], 2, "--heads is written BLOCK:HEAD,HEAD"),
        (["--heads", "model.layers.0:0,x"], 2, "--heads is written BLOCK:HEAD,HEAD"),
        (["--heads", "model.layers.0:-1"], 2, "--heads is written BLOCK:HEAD,HEAD"),
        (["--heads", "model.layers.0:0", "--repair", "bias"], 2, "--repair bias needs --text"),
        (["--heads", "model.layers.0:0", "--text", "a.txt", "--statistics", "s"], 2, "--statistics stands alone"),
        (["--heads", "model.layers.0:0", "--text", "a.txt", "--weight", "1", "--weight", "2"], 2, "--weight once for"),
        (["--heads", "model.layers.0:0", "--text", "a.txt", "--weight", "0"], 2, "--weight"),
        (["--heads", "model.layers.0:0"], 1, "the repair needs something to learn from"),
        (["--heads", "model.layers.9:0", "--repair", "none"], 1, "no attention block 'model.layers.9'"),
        (["--heads", "model.layers.0:99", "--repair", "none"], 1, "there is no head 99"),
        (["--heads", "model.layers.0:0,0", "--repair", "none"], 1, "a head is named twice"),
        (["--heads", "model.layers.0:0", "--heads", "model.layers.0:0", "--repair", "none"], 1, "named twice"),
    ],
)
def test_refusals_leave_nothing(
    arguments: list[str],
    status: int,
    words: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, out, err = run(capsys, "prune", folder, *arguments, "-o", tmp_path / "small")
    assert found == status
    assert words in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_before_the_work(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    monkeypatch.setattr(sys.modules["headwise.verbs.prune"], "prune", None)
    status, _, err = run(capsys, "prune", folder, "--heads", "model.layers.0:0", "--repair", "none", "-o", tmp_path)
    assert status == 1
    assert "was not saved by headwise (it holds thesis.tex)" in err


def test_overwrite(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("prune", folder, "--heads", "model.layers.0:0", "--repair", "none", "-o", tmp_path / "small")
    assert run(capsys, *arguments)[0] == 0
    status, _, err = run(capsys, *arguments)
    assert status == 1
    assert "--overwrite" in err
    assert run(capsys, *arguments, "--overwrite")[0] == 0


def test_the_current_folder_is_filled_and_not_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell stands there."""
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino
    arguments = ("prune", folder, "--heads", "model.layers.0:0", "--repair", "none", "-o", ".")
    assert run(capsys, *arguments)[0] == 0
    assert tmp_path.stat().st_ino == before
    assert (Path() / "headwise.json").is_file()
    status, _, err = run(capsys, *arguments, "--overwrite")
    assert status == 1
    assert "is the current folder, which cannot be replaced in one step" in err


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_or_full_leaves_nothing(
    stop: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_given: Any, **_more: Any) -> None:
        raise stop

    monkeypatch.setattr("headwise.models.saving._write_companions", stopped)
    arguments = ("prune", folder, "--heads", "model.layers.0:0", "--repair", "none", "-o", tmp_path / "small")
    status, _, err = run(capsys, *arguments)
    assert status == (1 if isinstance(stop, OSError) else 130)
    assert ("No space left on device" in err) == isinstance(stop, OSError)
    assert list(tmp_path.iterdir()) == []


def test_heads_named_in_pieces_go_together() -> None:
    assert heads_of(("a.b:1,5", "c:0", "a.b:2")) == {"a.b": [1, 5, 2], "c": [0]}


def test_a_saved_plan_and_a_plan_for_another_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = hw.load(folder)
    blocks = {path: (one.query_heads, one.kv_heads) for path, one in model.layout.blocks.items()}
    cuts = (HeadCut("model.layers.1.self_attn", 3), HeadCut("model.layers.1.self_attn", 2))
    plan = HeadPlan(cuts, "tiny", model.source.weight_hash, "by hand", unit="group", blocks=blocks)
    plan.save(tmp_path / "plan.json")
    arguments = ("--plan", tmp_path / "plan.json", "--repair", "none")
    status, out, err = run(capsys, "prune", folder, *arguments, "-o", tmp_path / "small")
    assert status == 0, err
    assert "2 3" in out
    assert "4 -> 2" in out
    assert "2 -> 1" in out
    llama(seed=8, num_hidden_layers=2).save_pretrained(tmp_path / "other")
    status, _, err = run(capsys, "prune", tmp_path / "other", *arguments, "-o", tmp_path / "wrong")
    assert status == 1
    assert "make a plan for this model" in err
    assert not (tmp_path / "wrong").exists()
    (tmp_path / "plan.json").write_text("{}")
    status, _, err = run(capsys, "prune", folder, *arguments, "-o", tmp_path / "wrong")
    assert status == 1
    assert "is not a headwise.plan document" in err


def test_healed_and_timed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install headwise[heal]")
    small = tmp_path / "small"
    status, out, err = run(
        capsys, "prune", folder, "--heads", "model.layers.1:1", "--inputs", folder / "inputs.jsonl", "-o", small,
        "--heal", "3", "--heal-rate", "0.001", "--time",
    )  # fmt: skip
    assert status == 0, err
    assert "healed: 3 steps, kl" in out
    assert "time of a pass of 32 x 64 tokens here" in out
    assert "a pass with the same heads gated: " in out
    assert sorted(one.name for one in tmp_path.iterdir()) == ["small"]
    status, out, _ = run(
        capsys, "prune", folder, "--heads", "model.layers.1:1", "--inputs", folder / "inputs.jsonl", "-o", small,
        "--heal", "3", "--overwrite", "--json",
    )  # fmt: skip
    assert json.loads(out)["surgery"]["repair"]["heal"]["steps"] == 3
    status, out, err = run(capsys, "verify", folder, small, "--time")
    assert status == 0, err
    assert "trained after the cut, taken over as well" in out
    assert "time of a pass" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repair", "none", "--heal", "3"], "--heal learns from text"),
        (["--text", "a.txt", "--heal-rate", "0.1"], "it needs --heal STEPS"),
        (["--text", "a.txt", "--heal", "3", "--heal-rate", "2"], "--heal-rate"),
    ],
)
def test_healing_that_cannot_be_meant(
    arguments: list[str], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "prune", folder, "--heads", "model.layers.1:1", *arguments, "-o", tmp_path / "small")
    assert status == 2
    assert words in err


def test_a_stock_checkpoint_is_promised_or_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, text = tmp_path / "small", ("--inputs", folder / "inputs.jsonl")
    everywhere = [part for layer in (0, 1) for part in ("--heads", f"model.layers.{layer}:0,1")]
    status, out, err = run(capsys, "prune", folder, *everywhere[:2], *text, "--stock", "-o", small)
    assert (status, out) == (1, "")
    assert "stock: a checkpoint of plain transformers has the same number of heads in every layer" in err
    assert "headwise plan --uniform" in err
    assert not small.exists()
    status, out, err = run(capsys, "prune", folder, *everywhere, *text, "--stock", "-o", small)
    assert status == 0, err
    assert "loaded by: hw.load, and from_pretrained of plain transformers" in out
    assert (small / "model.safetensors").exists()
    assert json.loads((small / "config.json").read_text())["attention_bias"] is True
    status, out, err = run(capsys, "verify", folder, small)
    assert status == 0, err
    assert "repaired: 2 output projections" in out

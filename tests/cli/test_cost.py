"""``headwise cost``: what it prints, what it refuses, its figure."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise.cli.cost_tables import count, seconds, size
from headwise.cli.main import main

SMALL = ["--d-model", "768", "--heads", "12", "--layers", "1"]
LLAMA = ["cost", "--d-model", "4096", "--heads", "32", "--kv-heads", "8", "--layers", "32"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def config_in(folder: Path, **more: Any) -> str:
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 19,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return str(folder)


def test_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, *LLAMA, "--context", "8192", "--dtype", "float16", "--bandwidth", "50GB/s")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "32 x decoder self: 32 query and 8 key-value heads of width 128, d_model 4,096" in lines
    assert "attention 1,342,177,280" in lines
    assert "per query head 1,048,576" in lines
    assert "cache per token 131,072 128 KiB" in lines
    assert "cache at the context 1,073,741,824 1 GiB" in lines
    assert any(line.startswith("decode step: least time") and line.endswith("at 50 GB/s") for line in lines)
    assert max(map(len, out.splitlines())) <= 80
    assert err == ""


def test_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, "cost", "--d-model", "64", "--heads", "4", "--layers", "2", "--encoder", "--context", "9")
    assert "batch 1, length 9; bfloat16" in out
    assert "cache" not in out
    assert "decode" not in out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, *LLAMA, "--json", "--dtype", "float16", "--batch", "3", "--context", "11")
    document = json.loads(out)
    assert (document["format"], document["version"]) == ("headwise.cost", 1)
    assert document["cache"]["token_bytes"] == 131_072
    assert document["cache"]["bytes"] == 3 * 11 * 131_072
    assert len(document["layers"]) == 32
    assert document["layers"][31]["name"] == "layers.31"
    assert document["parameters"]["total"] is None
    assert document["traffic"]["seconds"] is None
    assert document["prefill"]["attention"]["visible_scores"] == 2 * 3 * 32 * 32 * 66 * 128


def test_a_config_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_in(tmp_path)
    out, _ = said(capsys, "cost", folder, "--context", "7")
    assert out.splitlines()[0].strip() == folder
    assert "4 query and 2 key-value heads of width 6" in out
    document = json.loads(said(capsys, "cost", folder, "--json", "--phase", "decode")[0])
    assert document["prefill"] is None
    assert document["decode"]["new_tokens"] == 1


def test_uneven_layers_and_windows_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_in(
        tmp_path,
        model_type="gemma2",
        architectures=["Gemma2ForCausalLM"],
        head_dim=6,
        sliding_window=5,
    )
    out, err = said(capsys, "cost", folder, "--context", "11", "--per-layer")
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[2:6] for row in rows] == [["0", "4/2", "6", "5"], ["1", "4/2", "6", "-"]]
    assert "W - 1" in err


def test_every_stack_and_kind_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 31, "d_model": 24}
    fields |= {"d_kv": 6, "d_ff": 19, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    out, _ = said(capsys, "cost", str(tmp_path), "--context", "7", "--source", "5")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "2 x encoder self: 4 heads of width 6, d_model 24" in lines
    assert "batch 1, context 7, 5 on the encoder's side; float32, cache float32" in lines
    for line in ("encoder self, layer 0 2,432", "encoder self, layer 1 2,304", "decoder self, layer 1 to 2 2,304 each"):
        assert line in lines
    assert "decoder cross, layer 0 to 2 2,304 each" in lines


def test_sweeps_say_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, "cost", "--d-model", "768", "--heads", "12", "--layers", "12", "--bias", "--sweep", "heads")
    assert "> 12   64      *" in out
    same = " ".join(out[out.index("the same in every row") :].split())
    assert "parameters 28.3 M, projections 116 G, scores and mixing 155 G, cache bytes 72 MiB, logit std 1" in same
    assert "softmax and score memory grow with it" in err
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("over", ["heads", "kv-heads", "context"])
def test_sweeps_as_json_and_figure(over: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for ending in ("png", "svg", "pdf"):
        figure = tmp_path / f"sweep.{ending}"
        out, err = said(capsys, *LLAMA, "--sweep", over, "--json", "--plot", str(figure), "--bandwidth", "1TB/s")
        assert json.loads(out)["over"] == over
        assert figure.stat().st_size > 5_000
        assert f"plot: {figure}" in err


def test_a_figure_of_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plain = ["cost", "--d-model", "64", "--heads", "4", "--layers", "2", "--encoder", "--sweep", "context"]
    said(capsys, *plain, "--contexts", "7,1_000", "--plot", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").exists()


def test_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, *LLAMA, "--sweep", "context", "--contexts", "64,512", "--json")
    assert [row[0] for row in json.loads(out)["rows"]] == [64, 512]


USAGE = {
    "--d-model describes a model by numbers and does not go with MODEL": ["m", "--d-model", "8"],
    "--tied describes a model by numbers": ["m", "--tied"],
    "give MODEL, or a model by numbers: --d-model, --heads, --layers": ["--context", "8"],
    "a model by numbers needs --layers": ["--d-model", "8", "--heads", "2"],
    "--revision is about a model on disk": [*LLAMA[1:], "--revision", "x"],
    "--plot draws a sweep": [*LLAMA[1:], "--plot", "x.png"],
    "--contexts belongs to --sweep context": [*LLAMA[1:], "--sweep", "heads", "--contexts", "8"],
    "--input-rms belongs to --sweep heads": [*LLAMA[1:], "--input-rms", "2"],
    "--input-rms measure runs a model and needs MODEL": [*LLAMA[1:], "--sweep", "heads", "--input-rms", "measure"],
    "Invalid value for '--input-rms'": [*LLAMA[1:], "--sweep", "heads", "--input-rms", "-1"],
    "--per-layer and --sweep are two different tables": [*LLAMA[1:], "--per-layer", "--sweep", "heads"],
    "'fast' is no bandwidth": [*LLAMA[1:], "--bandwidth", "fast"],
    "'50GB' is no bandwidth": [*LLAMA[1:], "--bandwidth", "50GB"],
    "must be positive": [*LLAMA[1:], "--bandwidth", "0GB/s"],
    "is no list of positive lengths": [*LLAMA[1:], "--sweep", "context", "--contexts", "8,-1"],
    "Invalid value for '--heads'": ["--d-model", "8", "--heads", "0", "--layers", "1"],
    "Invalid value for '--layers'": ["--d-model", "8", "--heads", "2", "--layers", "-1"],
    "Invalid value for '--batch'": [*LLAMA[1:], "--batch", "0"],
}


@pytest.mark.parametrize("words", USAGE)
def test_wrong_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *USAGE[words]]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


REFUSED = {
    "heads 12 is not a multiple of kv_heads 5": [
        "--d-model",
        "768",
        "--heads",
        "12",
        "--kv-heads",
        "5",
        "--layers",
        "1",
    ],
    "d_model 100 is not a multiple of heads 12": ["--d-model", "100", "--heads", "12", "--layers", "1"],
    "has no causal decoder": [*LLAMA[1:], "--encoder", "--phase", "decode"],
    "there is no such folder": ["./nowhere"],
    "a plot is written to .png, .svg, .pdf": [*LLAMA[1:], "--sweep", "heads", "--plot", "x.gif"],
    "there is no folder /nowhere; make it first": [*LLAMA[1:], "--sweep", "heads", "--plot", "/nowhere/x.png"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *REFUSED[words]]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.splitlines()[-1].startswith("headwise: ")
    assert captured.out == ""


MISNAMED = {
    "Invalid value for '--dtype': dtype 'fp7' is not known; did you mean": ["--dtype", "fp7"],
    "Invalid value for '--cache-dtype': dtype 'foo' is not known; known are float64": ["--cache-dtype", "foo"],
    "Invalid value for '--sweep': there is no sweep over 'head'; did you mean 'heads'?": ["--sweep", "head"],
}


@pytest.mark.parametrize("words", MISNAMED)
def test_a_name_that_is_not_known_is_wrong_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, *MISNAMED[words]]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("option", ["--input-rms", "--init-std"])
def test_a_spread_that_overflows(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--sweep", "heads", option, "1e300"]) == 1
    assert "is too large to be squared; give less" in capsys.readouterr().err


def test_a_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main([*LLAMA, "--sweep", "heads", "--plot", str(tmp_path / "x.png"), "-q"]) == 1
    assert capsys.readouterr().err == (
        "headwise: a plot needs matplotlib, which is not installed; pip install 'headwise[plot]'\n"
    )


def test_plain_numbers_need_no_torch() -> None:
    code = f"import sys; from headwise.cli.main import main; main({LLAMA!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


COUNTS = {0: "0", 999: "999", 999.6: "1 k", 1000: "1 k", 1_234_567: "1.23 M", 8.03e9: "8.03 G"}
SIZES = {0: "0 B", 12: "12 B", 1023.7: "1 KiB", 1024: "1 KiB", 131_072: "128 KiB", 2**40: "1 TiB"}
TIMES = {2.5: "2.5 s", 0.0125: "12.5 ms", 3e-6: "3 us"}


def test_prefixes() -> None:
    for write, table in ((count, COUNTS), (size, SIZES), (seconds, TIMES)):
        assert {value: write(value) for value in table} == table

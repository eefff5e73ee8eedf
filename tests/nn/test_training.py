"""A small character model learns, with the same loss curve as on ``nn.MultiheadAttention`` from the same weights."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_characters", EXAMPLES / "train_characters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curves(example: ModuleType, steps: int) -> tuple[list[float], list[float], object]:
    data, alphabet = example.encode(example.TEXT.read_text(encoding="utf-8"))
    torch.manual_seed(0)
    ours = example.CharacterModel(len(alphabet))
    theirs = example.on_torch(ours)
    return example.train(ours, data, steps), example.train(theirs, data, steps), (ours, data, alphabet)


def test_the_loss_curve_is_that_of_torchs_layer(example):
    ours, theirs, (model, data, _) = curves(example, 25)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-3
    assert ours[-1] < ours[0] - 1.0
    # the written text is the same with and without a cache
    tokens = example.write(model, data[:7], 20)
    with torch.no_grad():
        again = data[:7]
        for _ in range(20):
            again = torch.cat((again, model(again[None])[0, -1:].argmax(-1)))
    assert torch.equal(tokens, again)


@pytest.mark.slow
def test_it_learns_and_keeps_the_curve(example):
    ours, theirs, _ = curves(example, 500)
    smooth = [sum(curve[-20:]) / 20 for curve in (ours, theirs)]
    assert abs(smooth[0] - smooth[1]) < 0.02
    assert smooth[0] < 2.2  # a table of letter frequencies stays near 2.9 nats


@pytest.mark.parametrize("name", ["train_characters.py", pytest.param("tensor_parallel.py", marks=pytest.mark.slow)])
def test_examples_run(name, tmp_path):
    arguments = ["--steps", "3"] if name == "train_characters.py" else []
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = "layer 1: entropy of each head" if arguments else "largest difference"
    assert expected in done.stdout

"""What a run will need is said before it is long, and not when it is short."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2Model

import headwise as hw
from headwise.data import Facts
from headwise.trace import Progress
from headwise.verbs import forecast
from headwise.verbs.estimate import memory_estimate


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(forecast.time, "monotonic", lambda: now[0])
    return now


def model(width: int = 15) -> hw.Model:
    torch.manual_seed(5)
    return hw.wrap(GPT2Model(GPT2Config(n_layer=2, n_head=3, n_embd=width, vocab_size=23, n_positions=19)).eval())


def say(clock: list[float], pace: float, tokens: int) -> list[str]:
    told: list[str] = []
    shown = forecast.Forecast(model(), Facts(tokens=tokens, batches=tokens // 10, longest=13), 2, None, told.append)
    for batch in range(1, 5):
        shown(Progress(batch, 10 * batch))
        clock[0] += 10 * pace
    return told


def test_a_long_run_is_announced_once(clock: list[float]) -> None:
    told = say(clock, 0.3, 1000)
    assert len(told) == 1
    assert told[0].startswith(
        "about 4 min 54 s to go for this pass over 1,000 tokens in 100 batches, with an estimated "
    )


def test_a_short_run_is_not(clock: list[float]) -> None:
    assert say(clock, 0.3, 50) == []
    assert say(clock, 0.001, 1000) == []


def test_memory_is_linear_in_length_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (memory_estimate(model(), Facts(longest=n), 2) for n in (1000, 2000))
    smaller = memory_estimate(model(), Facts(longest=0), 2)
    assert large - smaller == 2 * (small - smaller)
    monkeypatch.setattr(forecast, "available_memory", lambda: 1000)
    told: list[str] = []
    shown = forecast.Forecast(model(), Facts(longest=500), 2, None, told.append)
    assert told == shown.warnings
    assert "use a smaller batch_size or max_length" in told[0]

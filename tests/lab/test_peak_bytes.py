"""Counting the bytes of live tensors."""

from __future__ import annotations

import numpy as np
import torch

from headwise.lab.experiments.tiling import ROADS, PeakBytes, memory


def test_peak_counts_what_is_alive_together() -> None:
    x = torch.zeros(101)
    with PeakBytes() as peak:
        for _ in range(7):
            y = x + 1
            z = y * 2
            del y, z
    assert peak.peak == 2 * 404
    assert peak.largest == 404


def test_views_and_inputs_count_once_or_not_at_all() -> None:
    x = torch.zeros(101, 3)
    with PeakBytes() as peak:
        assert x.t().shape == (3, 101)
        y = x + 1
        views = [y.t(), y.view(-1), y[1:]]
    assert len(views) == 3
    assert peak.peak == 1212


def test_in_place_makes_nothing() -> None:
    x = torch.zeros(101)
    with PeakBytes() as peak:
        x.add_(1).mul_(2)
    assert peak.peak == 0


def test_what_a_backward_pass_keeps_is_counted() -> None:
    x = torch.ones(101, requires_grad=True)
    with PeakBytes() as peak:
        x.exp().exp().sum().backward()
    assert peak.peak >= 3 * 404


def test_an_address_that_is_used_again_counts_again() -> None:
    with PeakBytes() as peak:
        for _ in range(50):
            outside = torch.from_numpy(np.zeros(101, dtype=np.float32))
            kept = outside + 1
            del outside
            again = [kept + number for number in range(3)]
            del kept, again
    assert peak.peak == 4 * 404


def test_the_same_call_gives_the_same_bytes() -> None:
    found = {tuple(memory(road, 257, 0).peak for road in ROADS) for _ in range(5)}
    assert len(found) == 1

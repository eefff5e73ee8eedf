"""Observers of one trace get what they asked for, each its own part."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2Model

import headwise as hw
from headwise.data import Batch, batches
from headwise.errors import MeasureError
from headwise.kernels import Problem, Wanted
from headwise.layout import Site
from headwise.models import AttentionCall
from headwise.trace import run


class Asks:
    """Asks for the weight on the given offsets before the query, and keeps what comes."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = offsets
        self.got: list[torch.Tensor | None] = []

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted | None:
        if not self.offsets:
            return Wanted(rows=True)
        at = torch.arange(problem.q.shape[2])
        return Wanted(rows=True, pairs=torch.stack([(at - offset).clamp(min=-1) for offset in self.offsets])[:, None])

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        assert call.answer.rows is not None
        self.got.append(call.answer.rows.pairs)


class Silent(Asks):
    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted | None:
        return None


def model() -> hw.Model:
    torch.manual_seed(5)
    return hw.wrap(GPT2Model(GPT2Config(n_layer=2, n_head=3, n_embd=15, vocab_size=23, n_positions=19)).eval())


def test_pairs_of_several_observers() -> None:
    handle = model()
    data = batches(handle, [{"input_ids": torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])}])
    first, none, second, silent = Asks(1), Asks(), Asks(0, 2), Silent(0)
    run(handle, data, [first, none, second, silent])
    alone_first, alone_second = Asks(1), Asks(0, 2)
    run(handle, data, [alone_first])
    run(handle, data, [alone_second])
    assert len(first.got) == 2
    assert silent.got == []
    assert none.got == [None, None]
    for together, alone in ((first, alone_first), (second, alone_second)):
        for a, b in zip(together.got, alone.got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert second.got[0] is not None
    assert second.got[0].shape == (2, 2, 3, 5)


def test_progress_and_training_mode() -> None:
    handle = model()
    handle.module.train()
    handle.module.h[0].eval()
    modes = [part.training for part in handle.module.modules()]
    told: list[tuple[int, int]] = []
    data = batches(handle, [{"input_ids": torch.tensor([[3, 1, 4]])}, {"input_ids": torch.tensor([[1, 5, 9, 2]])}])
    done = run(handle, data, [Asks(1)], progress=lambda at: told.append((at.batches, at.tokens)))
    assert [part.training for part in handle.module.modules()] == modes
    assert (done.batches, done.tokens) == told[-1] == (len(told), 7)


class Classes(Asks):
    """Asks for the weight on two classes of keys."""

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted | None:
        codes = (torch.arange(problem.k.shape[2]) % 2).to(torch.uint8)[None]
        return Wanted(rows=True, classes=codes, n_classes=2)

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        assert call.answer.rows is not None
        self.got.append(call.answer.rows.classes)


def test_classes_go_beside_pairs_and_only_one_observer_may_ask() -> None:
    handle = model()
    data = batches(handle, [{"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}])
    pairs, classes = Asks(1), Classes()
    run(handle, data, [pairs, classes])
    assert pairs.got[0] is not None
    assert classes.got[0] is not None
    torch.testing.assert_close(classes.got[0].sum(-1), torch.ones(1, 3, 5))
    with pytest.raises(MeasureError, match="two observers ask for the weight on classes"):
        run(handle, data, [Classes(), Classes()])

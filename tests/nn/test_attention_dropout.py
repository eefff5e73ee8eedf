"""Dropout acts on weights, in training, in blocks of queries that change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from headwise.kernels import Problem, ScoreRule, Visible
from headwise.nn import MultiHeadAttention
from headwise.nn.dropout import dropped


def problem(**rules: Any) -> Problem:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 5, dtype=torch.float64, requires_grad=True) for h, n in ((6, 11), (3, 13), (3, 13)))
    visible = Visible(causal=True, mask=torch.rand(2, 1, 11, 13) > 0.2, **rules)
    return Problem(q, k, v, visible, ScoreRule(bias=torch.randn(1, 6, 11, 13).double()))


def test_the_expectation_is_attention_itself():
    p, mean = problem(), torch.zeros(2, 6, 11, 5, dtype=torch.float64)
    truth = dropped(p, 0.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for _ in range(500):
            mean += dropped(p, 0.3) / 500
    assert (mean - truth).abs().max() < 0.3
    assert (dropped(p, 0.3) - truth).abs().max() > 0.5


@pytest.mark.parametrize("block", [1, 400, 2000, 1 << 25])
@pytest.mark.parametrize("rules", [{}, {"window": 3}, {"key_padding": torch.arange(13).expand(2, 13) > 1}])
def test_blocks_of_queries_change_nothing(block, rules):
    p = problem(**rules)
    whole, blocked = dropped(p, 0.0), dropped(p, 0.0, block=block)
    assert_close(blocked, whole)
    weight = torch.randn_like(whole)
    a = torch.autograd.grad((whole * weight).sum(), (p.q, p.k, p.v))
    b = torch.autograd.grad((blocked * weight).sum(), (p.q, p.k, p.v))
    for one, other in zip(a, b, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_plain_scores_take_torchs_road_with_the_same_answer(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 11, 5).double() for h in (6, 3, 3))
    plain = Problem(q, k, v, Visible(causal=causal), ScoreRule(scale=0.3))
    assert_close(dropped(plain, 0.0), dropped(plain, 0.0, block=1))
    wide = Problem(q, k, v, Visible(causal=causal, window=11), ScoreRule(scale=0.3))  # the window hides nothing
    assert_close(dropped(plain, 0.0), dropped(wide, 0.0))


def test_the_backward_pass_drops_the_same_weights():
    p = problem()
    torch.manual_seed(3)
    out = dropped(p, 0.5, block=1)
    grad = torch.autograd.grad(out.sum(), p.v)[0]
    # d sum(out) / d v is the sum of the dropped weights: out is linear in v
    assert_close((grad * p.v.detach()).sum(), out.sum())


def test_rate_of_zero_or_eval_is_plain_attention():
    layer, x = MultiHeadAttention(12, 3, dropout=0.25), torch.randn(2, 7, 12)
    plain = MultiHeadAttention(12, 3)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))
    assert not torch.equal(layer.train()(x), plain(x))


@pytest.mark.parametrize(
    "options",
    [{"combine": "mean"}, {"softmax": "summed"}, {"n_kv_heads": 1, "rotary": True, "window": 3, "sinks": True}],
)
def test_training_with_every_option(options):
    layer = MultiHeadAttention(12, 3, dropout=0.25, **options)
    x = torch.randn(2, 7, 12, requires_grad=True)
    mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(3), -torch.inf)
    out = layer(x, causal=True, mask=mask, gates=torch.ones(3))
    out.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *layer.parameters()))


def test_masks_are_checked_in_training_too():
    layer, x = MultiHeadAttention(12, 3, dropout=0.25), torch.randn(2, 7, 12)
    for wrong in (torch.ones(7, 7, dtype=torch.int64), torch.tril(torch.ones(7, 7)), torch.ones(2, 7, 7).bool()):
        with pytest.raises(ValueError, match="mask"):
            layer(x, mask=wrong)

"""What a constant or a running mean replaces, and the spread of logits, against dense arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.kernels import Problem, ScoreRule, Visible, mean_of_visible, reference, visible_block
from headwise.measures.spread import logit_spread
from tests.measures.tiny import bert, heads_of, ids, llama, tensor


def test_a_uniform_head_is_its_running_mean() -> None:
    """Query projection zero: every row is the plain mean of the values that it sees."""
    module = llama(num_hidden_layers=1)
    with torch.no_grad():
        module.model.layers[0].self_attn.q_proj.weight.zero_()
    table = hw.scan(hw.wrap(module), inputs=ids(13, 7), measures=["replaceable"])
    assert table["running_mean_share"] == pytest.approx([1.0] * 4, abs=1e-6)
    assert (table["constant_share"] < 0.99).all()


def test_a_constant_head_is_a_constant() -> None:
    module = bert(num_hidden_layers=1)
    with torch.no_grad():
        module.encoder.layer[0].attention.self.value.weight[:6].zero_()
        module.encoder.layer[0].attention.self.value.bias[:6] = torch.arange(1.0, 7.0)
    table = hw.scan(hw.wrap(module), inputs=ids(13, 7), measures=["replaceable"])
    assert table["constant_share"][0] == pytest.approx(1.0, abs=1e-6)
    assert table["constant_share"][1] < 0.99


def test_shares_are_those_of_least_squares() -> None:
    module = llama(num_hidden_layers=1)
    passages = ids(13, 7, 9)
    table = hw.scan(hw.wrap(module), inputs=passages, measures=["replaceable"], batch_size=2)
    z = torch.cat([heads_of(module, "model.layers.0.self_attn.o_proj", tensor(one), 4)[0] for one in passages]).double()
    means = torch.cat([running_mean(module, tensor(one)) for one in passages])
    for head in range(4):
        target, mean = z[:, head], means[:, head // 2]
        energy = target.square().sum()
        constant = target.mean(0)
        left = (target - constant).square().sum()
        assert table["constant_share"][head] == pytest.approx(float(1 - left / energy), abs=1e-6)
        flat_r, flat_z = (mean - mean.mean(0)).flatten(), (target - constant).flatten()
        left = (flat_z - flat_r * (flat_r @ flat_z) / (flat_r @ flat_r)).square().sum()
        assert table["running_mean_share"][head] == pytest.approx(float(1 - left / energy), abs=1e-6)


def running_mean(module: Any, example: dict[str, Tensor]) -> Tensor:
    """(Q, G, D) running means of layer 0's values."""
    layer = module.model.layers[0]
    hidden = layer.input_layernorm(module.model.embed_tokens(example["input_ids"]))
    values = layer.self_attn.v_proj(hidden)[0].detach().double().unflatten(-1, (2, -1))
    return values.cumsum(0) / torch.arange(1, len(values) + 1)[:, None, None]


def problems() -> dict[str, Problem]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(2, 6, 7, 5), draw(2, 3, 11, 5), draw(2, 3, 11, 4)
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[1, 8:] = False
    left = padding.flip(-1)
    bias = draw(1, 6, 7, 11)
    hides = torch.zeros(2, 1, 7, 11, dtype=torch.float64).masked_fill(
        draw(2, 1, 7, 11) <= 0, torch.finfo(torch.float64).min
    )
    mask = draw(2, 6, 7, 11) > 0
    rules = {
        "all": (Visible(), ScoreRule()),
        "causal": (Visible(causal=True), ScoreRule()),
        "causal from the left": (Visible(causal=True, offset=0), ScoreRule()),
        "causal, padded": (Visible(causal=True, key_padding=padding), ScoreRule(scale=0.3)),
        "padded on the left": (Visible(causal=True, key_padding=left), ScoreRule(softcap=2.0)),
        "window": (Visible(causal=True, window=3), ScoreRule()),
        "window, padded": (Visible(window=3, key_padding=padding), ScoreRule()),
        "mask": (Visible(mask=mask), ScoreRule()),
        "one mask for all heads": (Visible(mask=mask[:, :1]), ScoreRule()),
        "bias": (Visible(causal=True), ScoreRule(bias=bias)),
        "hides": (Visible(), ScoreRule(bias=bias, additive_mask=hides)),
    }
    return {name: Problem(q, k, v, visible, rule) for name, (visible, rule) in rules.items()}


def seen(problem: Problem) -> Tensor:
    block = visible_block(problem, (0, 7), (0, 11))
    return torch.ones(2, 6, 7, 11, dtype=torch.bool) if block is None else block.expand(2, 6, 7, 11)


@pytest.mark.parametrize("name", problems())
def test_mean_of_visible(name: str) -> None:
    problem = problems()[name]
    weights = seen(problem).double()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
    expected = weights @ problem.v.repeat_interleave(2, 1)
    torch.testing.assert_close(mean_of_visible(problem), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", problems())
def test_logit_spread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.measures import spread

    monkeypatch.setattr(spread, "_BLOCK", 2 * 6 * 11 * 3)  # three rows at a time
    problem = problems()[name]
    scores = problem.q * problem.scale @ problem.k.repeat_interleave(2, 1).transpose(2, 3)
    if problem.rule.softcap is not None:
        scores = problem.rule.softcap * torch.tanh(scores / problem.rule.softcap)
    for term in problem.rule.added:
        scores = scores + torch.where(term > -1e38, term, 0.0)
    found, several = logit_spread(problem)
    visible = seen(problem)
    assert torch.equal(several, visible.sum(-1) > 1)
    for place in several.nonzero().tolist():
        b, h, i = place
        row = scores[b, h, i][visible[b, h, i]]
        assert float(found[b, h, i]) == pytest.approx(float(row.std(correction=0)), rel=1e-9)


def test_hidden_values_do_not_count() -> None:
    """NaN in a padded value or key reaches no number."""
    problem = problems()["causal, padded"]
    v, k = problem.v.clone(), problem.k.clone()
    v[1, :, 8:], k[1, :, 8:] = torch.nan, torch.nan
    spoiled = Problem(problem.q, k, v, problem.visible, problem.rule)
    assert torch.equal(mean_of_visible(spoiled), mean_of_visible(problem))
    assert torch.equal(logit_spread(spoiled)[0], logit_spread(problem)[0])


def test_softmax_agrees_with_the_spread_rule() -> None:
    """The scores of the spread are those whose softmax the reference takes."""
    problem = problems()["hides"]
    answer = reference.attend(problem, hw_weights())
    scores = problem.q * problem.scale @ problem.k.repeat_interleave(2, 1).transpose(2, 3)
    for term in problem.rule.added:
        scores = scores + torch.where(term > -1e38, term, -torch.inf)
    expected = torch.nan_to_num(scores.softmax(-1))
    torch.testing.assert_close(answer.weights, expected, rtol=1e-9, atol=1e-12)


def hw_weights() -> Any:
    from headwise.kernels import Wanted

    return Wanted(weights=True)

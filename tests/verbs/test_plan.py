"""hw.plan on small models: what it evaluates is what surgery gives, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import FalconConfig, FalconForCausalLM

import headwise as hw
from headwise import verbs
from headwise.data import batches
from headwise.errors import InputError, MeasureError
from headwise.measures.covariance import Statistics
from headwise.measures.importance import NextToken, loss_for
from headwise.measures.importance.losses import Loss
from headwise.models import as_model, wrap
from headwise.plans import Greedy, Pool, Unit, removals
from headwise.surgery import prune
from headwise.surgery.repair import moments_of
from headwise.verbs.choosing import CRITERIA, Quality, block_shapes
from headwise.verbs.choosing.text import Part, sample, tokens_of
from headwise.verbs.plan_compare import compare
from tests.measures import tiny

LENGTHS = [6 + at % 7 for at in range(24)]
INPUTS = tiny.ids(*LENGTHS)
PAIRS = tiny.pairs(*LENGTHS)

MODELS: dict[str, Any] = {
    "llama": tiny.llama,  # grouped heads, W_O inside the attention module
    "bert": lambda: tiny.bert(),  # W_O outside it
    "gpt2": tiny.gpt2,  # a fused, transposed projection
    "albert": tiny.albert,  # one block, several sites
    "t5": tiny.t5,  # two stacks, cross-attention, a bias that layers share
}


def ready(name: str) -> Any:
    return wrap(MODELS[name]())


def text(name: str) -> list[dict[str, list[int]]]:
    return PAIRS if name == "t5" else INPUTS


def lossy(model: Any, **more: Any) -> Loss:
    return loss_for(model, "auto", labelled=False, gradients=False, mean=False, seed=0)


def own(module: nn.Module, model: Any, loss: Loss, data: list[Any]) -> float:
    """The loss per token or row of another module on the same text, by no evaluator."""
    quality = Quality(model, data, loss)
    quality.base  # noqa: B018 - the references of fidelities
    total = 0.0
    for at, task in enumerate(quality._tasks):
        with torch.no_grad():
            outputs = module(**dict(task.inputs))
        total += float(loss(outputs, task, quality._references[at]).double().sum())
    return total / quality._count() - quality.base


@pytest.mark.parametrize("repair", ["none", "bias", "least_squares", "least_squares_no_bias"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_evaluated_is_what_surgery_gives(name: str, repair: str) -> None:
    model = ready(name)
    found = verbs.statistics(model, inputs=text(name))
    data = list(batches(model, text(name), batch_size=5))
    loss = lossy(model)
    blocks = model.layout.blocks
    moments = {path: moments_of(model.layout, block, found) for path, block in blocks.items()}
    quality = Quality(model, data, loss, moments=moments, repair=repair)
    first, *_, last = [*blocks, *blocks]
    removed = [Unit(first, (1,)), Unit(last, (0,))]
    small = prune(model, {first: [1], last: [0]} if first != last else {first: [0, 1]}, repair=repair, statistics=found)
    expected = own(small.module.eval(), model, loss, data)
    assert quality.rise(removed) == pytest.approx(expected, rel=2e-3, abs=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_candidates_that_share_a_pass_are_as_if_alone(name: str) -> None:
    """Every candidate, played back and side by side, gives what a whole pass of its own gives; and costs less."""
    model = ready(name)
    data = list(batches(model, text(name), batch_size=5))
    loss = lossy(model)
    found = verbs.statistics(model, inputs=text(name))
    moments = {path: moments_of(model.layout, block, found) for path, block in model.layout.blocks.items()}
    shared = Quality(model, data, loss, moments=moments, repair="least_squares")
    units = Pool(block_shapes(model)).units
    removed, candidates = units[1:2], [units[0], *units[2:]]
    rises = shared.rises(removed, candidates)
    alone = Quality(model, data, loss, moments=moments, repair="least_squares", reuse=False)
    expected = [alone.rise([*removed, unit]) for unit in candidates]
    assert rises == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert shared.notes == []
    assert alone.own_passes == 1 + len(candidates)
    if name == "albert":  # its layers are one module, entered again and again: nothing can be played back
        assert shared.own_passes == pytest.approx(2 + len(candidates))
    else:
        assert shared.own_passes < 2 + 0.8 * len(candidates)


def test_greedy_gives_up_what_cannot_be_the_lowest_and_chooses_the_same() -> None:
    model = ready("bert")
    data = list(batches(model, text("bert"), batch_size=1))
    assert len(data) > 2
    found = []
    for lowest in (False, True):
        loss = loss_for(model, "fidelity_pooled", labelled=False, gradients=False, mean=False, seed=0)
        quality = Quality(model, data, loss)
        steps = list(removals(Greedy(quality, lowest=lowest), Pool(block_shapes(model))))
        found.append(([step.unit for step in steps], [step.score for step in steps], quality.own_passes))
    (plain, scores, passes), (stopped, same, fewer) = found
    assert stopped == plain
    assert same == pytest.approx(scores, rel=1e-3, abs=1e-6)
    guesses = len(stopped) - 1  # a pass each, which pays where there are more candidates than here
    assert fewer - guesses < 0.95 * passes


def test_the_model_is_as_it_was() -> None:
    model = ready("llama")
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    one = tiny.tensor(INPUTS[0])
    before = model.module(**one).logits
    hw.plan(model, inputs=INPUTS, keep=0.7, criterion="greedy", repair="bias")
    hw.plan(model, inputs=INPUTS, keep=0.7, criterion="michel-iterative")
    assert torch.equal(model.module(**one).logits, before)
    assert all(torch.equal(value, state[name]) for name, value in model.module.state_dict().items())
    assert not any("forward" in vars(part) for part in model.module.modules())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_plans(criterion: str) -> None:
    plan = hw.plan(ready("llama"), inputs=INPUTS, keep=0.5, criterion=criterion, step=0.3)
    assert len(plan) == 6
    assert plan.criterion == criterion
    free = criterion in ("random", "weight-norm")
    assert (plan.facts["passes"] == 0) == free
    assert all(len(gone) < 4 for gone in plan.removed.values())
    again = hw.plan(ready("llama"), inputs=INPUTS, keep=0.5, criterion=criterion, step=0.3)
    assert again.cuts == plan.cuts


def test_text_in_other_batches_and_order_gives_the_same_plan() -> None:
    plans = [
        hw.plan(ready("bert"), inputs=given, keep=0.5, batch_size=size)
        for given, size in ((INPUTS, 3), (INPUTS[::-1], 7))
    ]
    assert plans[0].cuts == plans[1].cuts


def test_statistics_instead_of_text(tmp_path: Path) -> None:
    model = ready("llama")
    whole = hw.plan(model, inputs=INPUTS, keep=0.5)
    assert isinstance(whole.statistics, Statistics)
    file = whole.statistics.save(tmp_path / "s.safetensors")
    again = hw.plan(model, statistics=file, keep=0.5)
    assert again.cuts == whole.cuts
    assert again.facts["passes"] == 0
    with pytest.raises(InputError, match=r"the statistics are of the weights .* take statistics of this model"):
        hw.plan(ready("gpt2"), statistics=file, keep=0.5)


def test_rows_count_relative_to_the_residual_stream() -> None:
    assert hw.plan(ready("llama"), inputs=INPUTS, keep=0.9).statistics.relative
    plain = hw.plan(ready("llama"), inputs=INPUTS, keep=0.9, relative=False, skip_first=2).statistics
    assert (plain.relative, plain.skip_first) == (False, 2)


def test_budgets() -> None:
    model = ready("llama")
    before = sum(value.numel() for value in model.module.parameters())
    plan = hw.plan(model, inputs=INPUTS, params=before - 1500)
    small = hw.prune(model, plan)
    assert sum(value.numel() for value in small.module.parameters()) == plan.facts["after"]["parameters"]
    assert plan.facts["after"]["parameters"] <= before - 1500 < before
    cache = hw.plan(model, inputs=INPUTS, cache_bytes=3 * 2 * 2 * 6 * 4 * 2 // 3)
    assert cache.unit == "group"
    assert cache.facts["before"]["cache_bytes"] == 3 * 2 * (6 + 6) * 4
    fast = hw.plan(model, inputs=INPUTS, speed=1.2, seconds=(dict.fromkeys(model.layout.blocks, 1.0), 6.0))
    assert fast.facts["before"]["seconds"] / fast.facts["after"]["seconds"] >= 1.2
    measured = hw.plan(model, inputs=INPUTS, speed=1.0)
    assert measured.facts["before"]["seconds"] > 0


def test_a_loss_is_searched_on_one_half_and_confirmed_on_the_other() -> None:
    model = ready("llama")
    plan = hw.plan(model, inputs=INPUTS, max_loss=0.5)
    assert 0 < len(plan) < 12
    assert plan.facts["loss"] <= 0.5
    assert plan.statistics.parts[0].endswith("/all but 1 of 2")
    assert {one["units"] for one in plan.facts["confirmed"]} >= {len(plan)}
    nothing = hw.plan(model, inputs=INPUTS, max_loss=0.0)
    assert nothing.facts["loss"] <= 0


def test_halves_and_samples() -> None:
    data = list(batches(ready("bert"), INPUTS, batch_size=5))
    halves = [Part(data, lambda number, rest=rest: number % 2 == rest) for rest in (0, 1)]  # type: ignore[misc]
    numbers = [{number for batch in half for number in batch.passages} for half in halves]
    assert numbers[0] | numbers[1] == set(range(24))
    assert not numbers[0] & numbers[1]
    some = sample(data, 40)
    assert 25 <= sum(map(tokens_of, some)) <= 60
    assert max(number for batch in some for number in batch.passages) > 15


def test_protected_heads_parts_and_uniform_counts() -> None:
    model = ready("t5")
    blocks = list(model.layout.blocks)
    plan = hw.plan(model, inputs=PAIRS, keep=0.8, protect=[f"{blocks[0]}:0,2", blocks[1]])
    assert not {0, 2} & set(plan.removed.get(blocks[0], ()))
    assert blocks[1] not in plan.removed
    cross = hw.plan(model, inputs=PAIRS, keep=0.9, only=["cross"])
    assert cross.removed
    assert all("EncDec" in block for block in cross.removed)
    even = hw.plan(ready("llama"), inputs=INPUTS, keep=0.5, uniform=True)
    assert {len(gone) for gone in even.removed.values()} == {2}
    small = prune(ready("llama"), even, repair="none")
    assert all(change.even for change in small.surgery.blocks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give one budget of keep, params"),
        ({"keep": 0.5, "criterion": "set-awar"}, "there is no criterion 'set-awar'; did you mean 'set-aware'?"),
        (
            {"keep": 0.5, "repair": "magic"},
            "repair must be one of none, bias, least_squares, least_squares_no_bias",
        ),
        ({"keep": 0.5, "replacement": "magic"}, "replacement must be one of nothing"),
        (
            {"keep": 0.5, "replacement": "constant", "repair": "least_squares_no_bias"},
            "heads that are replaced by a constant leave it in a bias, and repair='least_squares_no_bias' adds none",
        ),
        ({"keep": 0.5, "unit": "pair"}, "unit must be 'head' or 'group', and is 'pair'"),
        ({"keep": 0.5, "sample": 0}, "sample must be a whole number of tokens"),
        ({"keep": 0.5, "skip_first": -1}, "skip_first must be a whole number of rows"),
        ({"keep": 0.5, "ridge": -1}, "ridge must be a number, 0 or above, and is -1"),
        ({"keep": 0.5, "ridge": float("nan")}, "ridge must be a number, 0 or above, and is nan"),
        ({"keep": 0.5, "ridge": "1"}, "ridge must be a number, 0 or above, and is '1'"),
        ({"keep": 0.5, "criterion": "random", "seed": -1}, "seed must be a whole number from 0"),
        ({"keep": 0.5, "only": ["vision"]}, "only: 'vision' names no attention of the model; its blocks are model"),
        ({"keep": 0.9, "only": ["model.layers.0", "model.layers.9"]}, "only: 'model.layers.9' names no attention"),
        ({"keep": 0.5, "protect": 5}, "protect takes BLOCK or BLOCK:HEAD,HEAD"),
        ({"keep": 0.5, "protect": {"model.layers.9": [0]}}, "no attention block 'model.layers.9'"),
        ({"keep": 0.5, "protect": ["model.layers.0.self_attn:x"]}, "protect takes BLOCK or BLOCK:HEAD,HEAD"),
        ({"keep": 0.5, "protect": ["model.layers.0.self_attn:9"]}, "there is no head 9"),
        ({"keep": 0.1, "per_layer": 2}, "keep=0.1 cannot be reached"),
        (
            {"keep": 0.1, "only": "model.layers.1"},
            r"1 of 3 layers may lose any\); .*let more layers lose heads \(only\)",
        ),
        ({"keep": 0.5, "targets": ["x"]}, "targets: there is no such argument; .*headwise.load: allow_pickle, .*dtype"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        hw.plan(ready("llama"), inputs=INPUTS, **options)


def test_a_block_that_stays_whole_stays_whole_whatever_else_is_said_of_it() -> None:
    block = "model.layers.0.self_attn"
    for protect in ([block, f"{block}:1"], [f"{block}:1", block], [f"{block}:1", f"{block}:1,2", block]):
        assert block not in hw.plan(ready("llama"), inputs=INPUTS, keep=0.75, protect=protect).removed
    one = hw.plan(ready("llama"), inputs=INPUTS, keep=0.75, only="model.layers.1")
    assert list(one.removed) == ["model.layers.1.self_attn"]
    assert one.facts["rules"]["only"] == ["model.layers.1"]


def test_uniform_counts_where_groups_lie_together_in_a_weight() -> None:
    """Falcon's fused weight holds a group beside its keys and values: no head alone can go, one of each group can."""
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_kv_heads=2,
        bias=False,
    )
    config.new_decoder_architecture = True
    falcon = FalconForCausalLM(config).eval()
    with pytest.raises(InputError, match=r"whole groups \(--unit group\), or the same number from each \(--uniform\)"):
        hw.plan(falcon, inputs=INPUTS, keep=0.75)
    plan = hw.plan(falcon, inputs=INPUTS, keep=0.75, uniform=True)
    assert [[head // 4 for head in heads] for heads in plan.removed.values()] == [[0, 1]] * 2
    small = hw.prune(falcon, plan, inputs=INPUTS)
    assert hw.verify(falcon, small).removed == plan.removed


def test_text_is_needed_where_something_is_measured() -> None:
    with pytest.raises(InputError, match="give texts or inputs"):
        hw.plan(ready("llama"), keep=0.5)
    assert len(hw.plan(ready("llama"), keep=0.5, criterion="random")) == 6


def test_statistics_that_are_not_finite() -> None:
    model = ready("llama")
    found = verbs.statistics(model, inputs=INPUTS)
    next(iter(found.sites.values())).z._products[0, 0] = torch.nan
    with pytest.raises(MeasureError, match="not finite"):
        hw.plan(model, statistics=found, keep=0.5)


def test_little_text_is_said() -> None:
    plan = hw.plan(ready("llama"), inputs=INPUTS[:2], keep=0.5)
    assert any("the text is short" in note for note in plan.facts["notes"])


def test_gradients_are_taken_of_something_that_has_them() -> None:
    plan = hw.plan(ready("bert"), inputs=INPUTS, keep=0.5, criterion="fisher", loss="fidelity_pooled")
    assert any("gradients of the loss projection" in note for note in plan.facts["notes"])
    assert isinstance(lossy(as_model(tiny.llama())), NextToken)


def test_a_comparison_on_other_text() -> None:
    model = ready("llama")
    found = compare(model, inputs=INPUTS, held_out=INPUTS[:5], criteria=["set-aware"], at=[0.25, 0.5])
    assert found.held_out["passages"] == 5
    none, repaired = found.curves
    assert (none.repair, repaired.repair) == ("none", "least_squares")
    plan = hw.plan(model, inputs=INPUTS, keep=0.75)
    data = list(batches(model, INPUTS[:5]))
    expected = own(prune(model, plan, statistics=plan.statistics).module.eval(), model, NextToken(), data)
    assert repaired.points[0].loss == pytest.approx(math.expm1(expected), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"at": [0.0]}, r"at must be shares of the heads between 0 and 1, and is \[0.0\]"),
        ({"at": []}, "at must be shares"),
        ({"seeds": 0}, "seeds must be a whole number of random orders"),
        ({"repairs": ["magic"]}, "repairs must be of none, bias, least_squares"),
        ({"criteria": ["luck"]}, "there is no criterion 'luck'"),
    ],
)
def test_comparisons_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare(ready("llama"), inputs=INPUTS, **options)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("repair", ["none", "least_squares"])
def test_the_parameters_of_a_plan_are_those_of_the_cut_model(name: str, repair: Any) -> None:
    """The intercepts that a repair adds to output projections without a bias count, too."""
    model = ready(name)
    plan = hw.plan(model, inputs=INPUTS, keep=0.5, repair=repair)
    small = hw.prune(model, plan, repair=repair)
    assert plan.facts["after"]["parameters"] == sum(value.numel() for value in small.module.parameters())


@pytest.mark.parametrize("unit", ["head", "group"])
def test_the_parameters_of_a_uniform_plan_count_the_biases_that_come_with_the_intercepts(unit: Any) -> None:
    """A stock checkpoint has them beside those of W_O, with the value zero."""
    plan = hw.plan(model := ready("llama"), inputs=INPUTS, keep=0.5, uniform=True, unit=unit)
    small = hw.prune(model, plan, stock=True)
    assert (small.surgery or pytest.fail("no record")).repair["config"] == {"attention_bias": True}
    assert plan.facts["after"]["parameters"] == sum(value.numel() for value in small.module.parameters())


def test_a_share_that_uniform_counts_cannot_give_is_told() -> None:
    model = ready("llama")
    plan = hw.plan(model, inputs=INPUTS, keep=0.8, uniform=True)
    left = plan.heads - len(plan)
    assert left != round(0.8 * plan.heads)
    assert any(f"{left} of {plan.heads} heads stay" in note for note in plan.facts["notes"])
    assert not any("heads stay (" in note for note in hw.plan(model, inputs=INPUTS, keep=0.5).facts["notes"])


def test_rows_that_all_count_alike() -> None:
    plan = hw.plan(ready("llama"), inputs=INPUTS, keep=0.5, relative=False)
    assert plan.statistics.relative is False
    assert hw.plan(ready("llama"), inputs=INPUTS, keep=0.5).statistics.relative is True
    assert str(plan).startswith(f"{len(plan)} of {plan.heads} heads of")
    assert "tensor(" not in repr(plan)
    assert len(repr(plan)) < 300


def test_a_sink_goes_with_its_head() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=32, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    plan = hw.plan(model, keep=0.5, criterion="weight-norm")
    record = prune(model, plan, repair="none").surgery
    assert record is not None
    assert plan.facts["after"]["parameters"] == record.parameters[1]

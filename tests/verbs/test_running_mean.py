"""Planning with running means: evaluated equals cut, what they save is said, what cannot be done is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.cli.main import main
from headwise.data import batches
from headwise.errors import InputError
from headwise.measures.covariance import Statistics
from headwise.plans import HeadCut, HeadPlan, Unit
from headwise.surgery import prune
from headwise.surgery.repair import moments_of
from headwise.verbs.choosing import CRITERIA, GateGradientScores, Quality
from headwise.verbs.plan_compare import compare
from tests.measures import tiny
from tests.verbs.test_plan import INPUTS, lossy, own, ready, text

GONE = {"llama": (0, 1, 3), "bert": (0, 2), "gpt2": (0, 2), "albert": (0, 1)}


def plan_of(model: Any, block: str, heads: tuple[int, ...]) -> HeadPlan:
    blocks = {path: (one.query_heads, one.kv_heads) for path, one in model.layout.blocks.items()}
    return HeadPlan(tuple(HeadCut(block, head, "running_mean") for head in heads), blocks=blocks)


@pytest.mark.parametrize("name", GONE)
@pytest.mark.parametrize("repair", ["none", "bias", "least_squares"])
def test_evaluated_equals_cut(name: str, repair: str) -> None:
    model = ready(name)
    layout, heads = model.layout, GONE[name]
    block = list(layout.blocks)[-1]
    data = list(batches(model, text(name), batch_size=3))
    found = hw.statistics(model, inputs=text(name), running_means=True, batch_size=3)
    moments = {path: moments_of(layout, one, found, means=True) for path, one in layout.blocks.items()}
    loss = lossy(model)
    quality = Quality(model, data, loss, moments=moments, repair=repair, running=True)
    assert quality.rise(()) == 0
    units = [Unit(block, (head,)) for head in heads]
    rise = quality.rise(units)
    small = prune(model, plan_of(model, block, heads), repair=repair, statistics=found)
    assert rise == pytest.approx(own(small.module, model, loss, data), rel=1e-3, abs=1e-6)
    assert quality.rises(units[:-1], units[-1:])[0] == pytest.approx(rise, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_plans_and_the_plan_is_cut(criterion: str) -> None:
    model = ready("llama")
    plan = hw.plan(model, inputs=INPUTS, keep=0.5, criterion=criterion, replacement="running_mean")
    assert {cut.replacement for cut in plan.cuts} == {"running_mean"}
    heads = model.layout.blocks["model.layers.0.self_attn"].query_heads * len(model.layout.blocks)
    assert len(plan) == heads // 2
    small = hw.prune(model, plan, inputs=INPUTS, notice=lambda said: None)
    assert small.surgery is not None
    assert sum(len(one.averaged) for one in small.surgery.blocks) == len(plan)
    assert plan.facts["after"]["parameters"] == small.surgery.parameters[1]


def test_the_plan_carries_what_the_repair_needs() -> None:
    """One pass for the choice and the repair."""
    model = ready("llama")
    plan = hw.plan(model, inputs=INPUTS, keep=0.5, replacement="running_mean")
    assert plan.facts["passes"] == 1
    one, two = (hw.prune(model, plan, inputs=given, notice=lambda said: None) for given in (None, INPUTS))
    for left, right in zip(one.module.parameters(), two.module.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_a_head_that_is_a_running_mean_is_free() -> None:
    """To set-aware without repair, and to the gradients of Michel: <z - r, dL/dz> is zero."""
    model = ready("llama")
    block = "model.layers.1.self_attn"
    d_k = model.layout.blocks[block].d_k
    with torch.no_grad():
        model.module.get_submodule(block).q_proj.weight[2 * d_k : 3 * d_k] = 0
    plan = hw.plan(model, inputs=INPUTS, keep=0.5, replacement="running_mean", repair="none")
    assert (plan.cuts[0].block, plan.cuts[0].head) == (block, 2)
    assert plan.facts["scores"][0] <= 1e-6 * plan.facts["scores"][-1]
    data = list(batches(model, INPUTS, batch_size=3))
    units = [Unit(block, (head,)) for head in range(4)]
    scores, plain = (
        GateGradientScores(model, data, lossy(model), running=running).sensitivities((), units, "michel")
        for running in (True, False)
    )
    assert scores[2] <= 1e-5 * max(scores)
    assert plain[2] > 1e-3 * max(plain)


def test_what_it_saves_is_said() -> None:
    grouped = hw.plan(ready("llama"), inputs=INPUTS, keep=0.4, replacement="running_mean", repair="none")
    (said,) = [note for note in grouped.facts["notes"] if "running means stand" in note]
    before, after = grouped.facts["before"], grouped.facts["after"]
    assert f"that saves {before['parameters'] - after['parameters']:,} parameters" in said
    assert before["parameters"] > after["parameters"]
    assert before["cache_bytes"] == after["cache_bytes"]
    model = ready("bert")
    alone = hw.plan(model, inputs=INPUTS, keep=0.5, replacement="running_mean", repair="none")
    constant = hw.plan(model, inputs=INPUTS, keep=0.5, replacement="constant", repair="none")
    less = constant.facts["before"]["parameters"] - constant.facts["after"]["parameters"]
    (said,) = [note for note in alone.facts["notes"] if "save nothing here" in note]
    assert "constants in their place would save" in said
    assert less > 0
    assert alone.facts["before"]["parameters"] == alone.facts["after"]["parameters"]
    with pytest.warns(
        UserWarning, match=r"running means save nothing here: none of the heads replaced \(\d+\) shares its"
    ):
        hw.prune(model, alone, repair="none")


def test_budgets_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(InputError, match=r"a running mean in the place of a head saves nothing of params: one query"):
        hw.plan(ready("bert"), inputs=INPUTS, params=1, replacement="running_mean")
    with pytest.raises(InputError, match=r"in the place of a group saves nothing of cache_bytes"):
        hw.plan(ready("llama"), inputs=INPUTS, cache_bytes=1, replacement="running_mean")
    model = ready("llama")
    whole = sum(one.numel() for one in model.module.parameters())
    plan = hw.plan(model, inputs=INPUTS, params=whole - 1, unit="group", replacement="running_mean", repair="none")
    assert plan.facts["after"]["parameters"] < whole


def test_a_loss_is_a_budget() -> None:
    plan = hw.plan(ready("llama"), inputs=INPUTS, max_loss=0.2, replacement="running_mean", repair="bias")
    assert plan.facts["loss"] <= 0.2


def test_blocks_that_cannot_are_left_alone() -> None:
    plan = hw.plan(ready("t5"), inputs=text("t5"), keep=0.9, replacement="running_mean", repair="none")
    assert all("EncDecAttention" in cut.block for cut in plan.cuts)
    assert any("a bias is added to its scores" in note for note in plan.facts["notes"])
    with pytest.raises(InputError, match=r"no head of the model may go: encoder\S*: a bias is added"):
        hw.plan(ready("t5"), inputs=text("t5"), keep=0.9, replacement="running_mean", only=["encoder"])


def test_statistics_with_running_means(tmp_path: Path) -> None:
    model = ready("llama")
    found = hw.statistics(model, inputs=INPUTS, running_means=True)
    plain = hw.statistics(model, inputs=INPUTS)
    again = Statistics.load(found.save(tmp_path / "s.safetensors"))
    for key in found:
        assert again[key].means == model.layout.block_of(key).kv_heads
        torch.testing.assert_close(again[key].joint_covariance, found[key].joint_covariance, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[key].covariance, plain[key].covariance, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found[key].mean, plain[key].mean, rtol=1e-5, atol=1e-7)
    with pytest.raises(InputError, match="has other heads, or running means, in the other"):
        found.merge(plain, overlap=True)
    halves = [hw.statistics(model, inputs=part, running_means=True) for part in (INPUTS[:12], INPUTS[12:])]
    merged = halves[0].merge(halves[1])
    for key in found:
        torch.testing.assert_close(merged[key].joint_covariance, found[key].joint_covariance, rtol=1e-4, atol=1e-6)


def test_curves_are_compared() -> None:
    from headwise.verbs.choosing import Asked

    found = compare(ready("llama"), inputs=INPUTS, criteria=["set-aware"], repairs=["none", "least_squares"], at=[0.3],
                    asked=Asked(replacement="running_mean"))  # fmt: skip
    assert len(found.curves) == 2


def test_constants_without_repair_are_chosen_by_what_is_left() -> None:
    model = ready("llama")
    constant = hw.plan(model, inputs=INPUTS, keep=0.5, replacement="constant", repair="none")
    bias = hw.plan(model, inputs=INPUTS, keep=0.5, repair="bias")
    assert [(cut.block, cut.head) for cut in constant.cuts] == [(cut.block, cut.head) for cut in bias.cuts]
    assert constant.facts["scores"] == bias.facts["scores"]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.llama().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"input_ids": torch.tensor(one["input_ids"]).flatten().tolist()}) for one in INPUTS]
    (tmp_path / "inputs.jsonl").write_text("\n".join(lines))

    def run(*arguments: Any) -> str:
        status = main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    model, plan, small = tmp_path / "model", tmp_path / "plan.json", tmp_path / "small"
    inputs = ("--inputs", tmp_path / "inputs.jsonl")
    out = run("plan", model, *inputs, "--keep", "50%", "--replacement", "running_mean", "-o", plan)
    assert "replaced by running mean, chosen by set-aware" in out
    out = run("prune", model, "--plan", plan, *inputs, "-o", small)
    assert "replaced by running means, which" in out
    assert "the mean of the values that a query sees stands in the place" in (small / "README.md").read_text()
    out = run("verify", model, small)
    assert "running means stand in the place of" in out
    assert "repaired: " in out

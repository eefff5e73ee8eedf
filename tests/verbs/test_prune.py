"""hw.prune and hw.verify: what the repair learns from, and what is refused before anything is changed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.measures.covariance import Scatter, Statistics
from headwise.plans import HeadCut, HeadPlan
from headwise.verbs.calibration import weighted
from tests.measures.tiny import VOCABULARY, llama

PLAN = {"model.layers.0": [1]}


def passages(seed: int, count: int = 3, length: int = 21, most: int = VOCABULARY) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, most, (1, length), generator=draw)} for _ in range(count)]


def weights_of(model: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def plan_of(*cuts: HeadCut, weight_hash: str | None = None, **changes: Any) -> HeadPlan:
    blocks = {f"model.layers.{layer}.self_attn": (4, 2) for layer in range(3)}
    return HeadPlan(cuts, "tiny", weight_hash, "by hand", blocks=blocks, **changes)


def test_the_original_is_untouched_and_the_record_says_what_was_used() -> None:
    model = llama()
    before = weights_of(model)
    small = hw.prune(model, PLAN, inputs=passages(1), repair="bias")
    assert all(map(torch.equal, before, model.parameters()))
    assert small.surgery is not None
    said = small.surgery.repair["calibration"]
    assert said["rows"] == 3 * 21
    assert said["relative"] is True
    assert len(said["parts"]) == 1


def test_statistics_from_a_file_are_those_in_memory(tmp_path: Path) -> None:
    model = llama()
    known = hw.statistics(model, inputs=passages(2))
    known.save(tmp_path / "s.safetensors")
    one = hw.prune(model, PLAN, statistics=known)
    two = hw.prune(model, PLAN, statistics=tmp_path / "s.safetensors")
    assert all(map(torch.equal, one.module.parameters(), two.module.parameters()))
    assert two.surgery is not None
    assert two.surgery.repair["calibration"]["file"] == str(tmp_path / "s.safetensors")


def test_a_plan_brings_its_statistics() -> None:
    model = llama()
    known = hw.statistics(model, inputs=passages(2))
    plan = plan_of(HeadCut("model.layers.0.self_attn", 1), statistics=known)
    one, two = hw.prune(model, plan), hw.prune(model, PLAN, statistics=known)
    assert all(map(torch.equal, one.module.parameters(), two.module.parameters()))
    assert one.surgery is not None
    assert one.surgery.repair["calibration"]["from"] == "the plan"
    assert hw.prune(model, plan, repair="none").surgery is not None


def scatter_of(statistics: Statistics) -> Any:
    return next(iter(statistics.sites.values())).z


def test_weights_count_and_lengths_do_not() -> None:
    """Half and half of a short and a long text is the plain mean of the two second moments."""
    model = llama()
    short, long = (hw.statistics(model, inputs=passages(seed, count)) for seed, count in ((1, 1), (2, 40)))
    both = scatter_of(weighted([short, long], [1, 1]))
    for name in ("mean", "second_moment"):
        expected = (getattr(scatter_of(short), name) + getattr(scatter_of(long), name)) / 2
        assert torch.allclose(getattr(both, name), expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    assert both.rows == 41 * 21
    far = scatter_of(short.merge(long))
    assert not torch.allclose(far.mean, both.mean, rtol=0, atol=0.01 * float(both.mean.abs().max()))


def two_texts(folder: Path) -> tuple[hw.Model, list[Path]]:
    """A model with a tokenizer, and two texts of other words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    handle = hw.wrap(llama(), words)
    texts = []
    for seed, most in ((1, 9), (2, VOCABULARY)):
        draw = torch.Generator().manual_seed(seed)
        text = " ".join(f"w{at}" for at in torch.randint(3, most, (400,), generator=draw).tolist())
        texts.append(folder / f"{seed}.txt")
        texts[-1].write_text(text)
    return handle, texts


def test_weights_reach_the_repair_and_the_record(tmp_path: Path) -> None:
    handle, texts = two_texts(tmp_path)
    smalls = [hw.prune(handle, PLAN, texts, weights=weights, window=40) for weights in ([1, 9], [9, 1])]
    name = "model.layers.0.self_attn.o_proj.weight"
    assert not torch.allclose(*(one.module.get_parameter(name) for one in smalls), rtol=0, atol=1e-4)
    assert smalls[0].surgery is not None
    said = smalls[0].surgery.repair["calibration"]
    assert said["weights"] == [1.0, 9.0]
    assert said["texts"] == list(map(str, texts))
    alone = hw.prune(handle, PLAN, str(texts[0]), window=40).surgery
    assert alone is not None
    assert alone.repair["calibration"]["texts"] == [str(texts[0])]
    with pytest.raises(hw.HeadwiseError, match="1 weights for 2 texts"):
        hw.prune(handle, PLAN, texts, weights=[1])
    with pytest.raises(hw.HeadwiseError, match="numbers above 0"):
        hw.prune(handle, PLAN, texts, weights=[1, 0])


def test_weights_reach_the_plan(tmp_path: Path) -> None:
    handle, texts = two_texts(tmp_path)
    plans = [hw.plan(handle, texts, weights=weights, window=40, keep=0.5) for weights in ([1, 9], [9, 1])]
    found = [scatter_of(plan.statistics).covariance for plan in plans if plan.statistics is not None]
    assert len(found) == 2
    assert not torch.allclose(*found, rtol=0, atol=1e-4 * float(found[0].abs().max()))
    assert plans[0].facts["passes"] == 1
    small = hw.prune(handle, PLAN, statistics=plans[0].statistics)
    again = hw.prune(handle, PLAN, texts, weights=[1, 9], window=40)
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.allclose(small.module.get_parameter(name), again.module.get_parameter(name), rtol=0, atol=1e-6)
    for wrong, said in (
        ({"weights": [1]}, "1 weights for 2 texts"),
        ({"weights": [1, 2], "max_loss": 0.1, "keep": None}, "do not go together"),
        ({"weights": [1, 2], "statistics": plans[0].statistics}, "leave one of the two out"),
    ):
        with pytest.raises(hw.HeadwiseError, match=said):
            hw.plan(handle, texts, window=40, **{"keep": 0.5, **wrong})
    with pytest.raises(hw.HeadwiseError, match="no texts were given"):
        hw.plan(handle, inputs=[{"input_ids": torch.arange(8)[None]}], weights=[1], keep=0.5)


def test_a_plan_is_refused_before_the_text_is_read() -> None:
    for plan, words in (
        ({"model.layers.7": [0]}, "no attention block"),
        ({"model.layers.0": [9]}, "there is no head 9"),
        ({"model.layers.0": [1, 1]}, "named twice"),
        (3, "plan must be a HeadPlan or a mapping"),
    ):
        with pytest.raises(hw.HeadwiseError, match=words):
            hw.prune(llama(), plan, [Path("does-not-exist.txt")])


def test_a_plan_for_another_model_is_refused() -> None:
    model = llama()
    plan = plan_of(HeadCut("model.layers.0.self_attn", 1), weight_hash=hw.wrap(model).source.weight_hash)
    assert hw.prune(model, plan, repair="none").surgery is not None
    with pytest.raises(hw.HeadwiseError, match="make a plan for this model"):
        hw.prune(llama(seed=8), plan, repair="none")


def test_statistics_of_another_model_or_not_finite_are_refused() -> None:
    model = llama()
    known = hw.statistics(model, inputs=passages(2))
    with pytest.raises(hw.HeadwiseError, match="take statistics of this model"):
        hw.prune(llama(seed=8), PLAN, statistics=known)
    sites = list(known.sites.values())
    broken = sites[0].z.covariance.clone()
    broken[0, 0] = torch.nan
    sites[0] = replace(sites[0], z=Scatter.of(sites[0].z.rows, sites[0].z.mean, broken))
    with pytest.raises(hw.HeadwiseError, match="not finite; take them again"):
        hw.prune(model, PLAN, statistics=Statistics(sites, weight_hash=known.weight_hash))
    empty = [replace(one, z=Scatter(one.z.width)) for one in sites]
    with pytest.raises(hw.HeadwiseError, match="hold no rows; give more text"):
        hw.prune(model, PLAN, statistics=Statistics(empty, weight_hash=known.weight_hash))


def test_sources_that_do_not_go_together() -> None:
    model = llama()
    known = hw.statistics(model, inputs=passages(2))
    with pytest.raises(hw.HeadwiseError, match="give texts or statistics, one of the two"):
        hw.prune(model, PLAN, statistics=known, inputs=passages(1))
    with pytest.raises(hw.HeadwiseError, match="needs something to learn from"):
        hw.prune(model, PLAN)
    ignored: dict[str, Any]
    for ignored in ({"statistics": known}, {"repair": "none"}):
        with pytest.raises(hw.HeadwiseError, match=r"none is learned from texts here .* or no weights"):
            hw.prune(model, PLAN, weights=[1], **ignored)
    with pytest.raises(hw.HeadwiseError, match="or no weights"):
        hw.prune(model, PLAN, inputs=passages(1), weights=[1])


def test_constants_are_learned_without_a_repair() -> None:
    model = llama()
    plan = plan_of(HeadCut("model.layers.0.self_attn", 1, "constant"))
    small: Any = hw.prune(model, plan, inputs=passages(1), repair="none").module
    assert small.model.layers[0].self_attn.o_proj.bias is not None
    assert model.model.layers[0].self_attn.o_proj.bias is None


def test_verify_of_the_verb_is_that_of_surgery(tmp_path: Path) -> None:
    model = llama()
    small = hw.prune(model, PLAN, repair="none")
    found = hw.verify(model, small)
    assert found.removed == {"model.layers.0.self_attn": (1,)}
    assert found.recorded


def test_a_short_text_warns_where_no_notice_is_given() -> None:
    with pytest.warns(UserWarning, match="the text is short: 21 rows for the"):
        hw.prune(llama(), PLAN, inputs=passages(1, count=1))


def test_a_plan_for_another_model_says_which_and_which_this_is() -> None:
    model = llama()
    other = plan_of(HeadCut("model.layers.0.self_attn", 1), weight_hash="f" * 64)
    with pytest.raises(
        hw.HeadwiseError, match=r"made for tiny \(weights ffffffffffff...\), and this is Llama.*\(--dtype\)"
    ):
        hw.prune(model, other, inputs=passages(1))


def test_a_plan_for_another_dtype_is_refused_before_the_text_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hw.plan(llama(), inputs=passages(1), keep=0.75)
    monkeypatch.setattr(
        sys.modules["headwise.verbs.prune"], "calibrate", lambda *_, **__: pytest.fail("the text was run")
    )
    with pytest.raises(hw.HeadwiseError, match=r"load it as for the plan: the same dtype \(--dtype\) and revision"):
        hw.prune(llama().bfloat16(), plan, inputs=passages(1))


def test_a_constant_with_nothing_to_learn_it_from_is_told_what_to_give() -> None:
    plan = plan_of(HeadCut("model.layers.0.self_attn", 1, "constant"))
    with pytest.raises(hw.HeadwiseError, match=r"give texts \(--text FILE\) or statistics= \(--statistics FILE\)"):
        hw.prune(llama(), plan, repair="none")


def test_a_constant_and_a_repair_without_a_bias_do_not_go_together() -> None:
    plan = plan_of(HeadCut("model.layers.0.self_attn", 1, "constant"))
    with pytest.raises(hw.HeadwiseError, match="replaced by a constant leave it in a bias"):
        hw.prune(llama(), plan, inputs=passages(1), repair="least_squares_no_bias")


def test_records_are_shown_in_a_line() -> None:
    model = llama()
    small = hw.prune(model, {"model.layers.0": [0, 1], "model.layers.2": [3]}, inputs=passages(1))
    shown = repr(small.surgery)
    assert "3 heads of 2 blocks removed, repair least_squares, " in shown
    assert "3 heads of 2 blocks are gone, 2 layer calls proved, 2 projections repaired, 0 weights healed" in repr(
        hw.verify(model, small)
    )
    assert max(len(shown), len(repr(hw.verify(model, small)))) < 300


def test_constants_are_said(tmp_path: Path) -> None:
    plan = plan_of(HeadCut("model.layers.0.self_attn", 1, "constant"))
    with pytest.raises(
        hw.HeadwiseError, match=r"their mean output, which is taken from text: give texts \(--text FILE\)"
    ):
        hw.prune(llama(), plan, repair="none")
    small = hw.prune(llama(), plan, inputs=passages(1), repair="none")
    assert small.surgery is not None
    assert small.surgery.repair["constants"] == 1
    card = (small.save(tmp_path / "small") / "README.md").read_text()
    assert "The mean output of the removed head stays, in biases" in card
    assert "nothing was repaired" not in card

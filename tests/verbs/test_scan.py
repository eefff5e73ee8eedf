"""The scan verb on tiny models: which rows count, and that nothing but the data changes a number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import headwise as hw
from headwise.data import Facts, batches
from headwise.errors import InputError, RunError, UnsupportedError
from headwise.trace import body_of
from headwise.verbs import scan_run
from tests.truth import disagreements, truth_of


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    settings = {
        "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 53, "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def bert() -> BertModel:
    torch.manual_seed(7)
    config = BertConfig(
        hidden_size=24, intermediate_size=29, num_hidden_layers=2, num_attention_heads=4, vocab_size=53,
        max_position_embeddings=64,
    )  # fmt: skip
    return BertModel(config).eval()


def examples(lengths: tuple[int, ...] = (11, 3, 7, 13, 5)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [{"input_ids": torch.randint(3, 53, (1, length), generator=generator)} for length in lengths]


def padded(rows: list[Tensor], left: bool) -> dict[str, Tensor]:
    longest = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for at, row in enumerate(rows):
        start = longest - len(row) if left else 0
        ids[at, start : start + len(row)], mask[at, start : start + len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def same(a: hw.HeadTable, b: hw.HeadTable, relative: float = 1e-5) -> None:
    for name in a.measures:
        assert a.count(name).tolist() == b.count(name).tolist(), name
        for ours, theirs in ((a.mean(name), b.mean(name)), (a.std(name), b.std(name))):
            assert ours == pytest.approx(theirs, rel=relative, abs=2e-6, nan_ok=True), name


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("make", [llama, bert])
def test_numbers_are_those_of_float64_eager(make: Any, left: bool) -> None:
    module = make()
    rows = [one["input_ids"][0] for one in examples()]
    batch = padded(rows, left)
    model = hw.wrap(module)
    table = hw.scan(model, inputs=[batch])
    if module.config.model_type == "llama":  # rotary positions: a passage in a batch is as if alone
        data = [({"input_ids": row[None]}, {"input": torch.ones(1, len(row))}) for row in rows]
    else:
        data = [(batch, {"input": batch["attention_mask"]})]
    assert disagreements(table, truth_of(module, model.layout, data)) == []
    assert set(table.count("entropy").tolist()) == {39}


def test_truth_can_disagree() -> None:
    """The comparison above must be able to fail."""
    module = bert()
    batch = padded([one["input_ids"][0] for one in examples()], left=False)
    model = hw.wrap(module)
    table = hw.scan(model, inputs=[batch])
    everything = {"input": torch.ones_like(batch["attention_mask"])}
    assert disagreements(table, truth_of(module, model.layout, [(batch, everything)]))


@pytest.mark.parametrize("make", [llama, bert])
def test_batches_order_and_splitting_change_nothing(make: Any) -> None:
    model, data = hw.wrap(make()), examples()
    whole = hw.scan(model, inputs=[padded([one["input_ids"][0] for one in data], left=False)])
    same(whole, hw.scan(model, inputs=data, batch_size=1))
    same(whole, hw.scan(model, inputs=data[::-1], batch_size=3))
    first, second = hw.scan(model, inputs=data[:2]), hw.scan(model, inputs=data[2:])
    same(whole, first.merge(second))
    same(whole, second.merge(first))


def test_the_same_piece_is_not_merged_twice() -> None:
    model, data = hw.wrap(bert()), examples()
    with pytest.raises(InputError, match=r"twice|both"):
        hw.scan(model, inputs=data).merge(hw.scan(model, inputs=data[::-1], batch_size=2))


def uniform(module: Any) -> Any:
    """Query projections set to zero: every visible key gets the same weight."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "q_proj" in name or ".query." in name:
                parameter.zero_()
    return module


def test_case_18_uniform_causal_rows() -> None:
    table = hw.scan(hw.wrap(uniform(llama())), inputs=[{"input_ids": torch.tensor([[5, 6, 7, 8]])}])
    expected = (0 + math.log(2) + math.log(3) + math.log(4)) / 4
    assert table["entropy"] == pytest.approx([expected] * 8, abs=1e-6)
    assert expected == pytest.approx(0.7945, abs=1e-4)
    assert table["normalized_entropy"] == pytest.approx([1.0] * 8, abs=1e-6)
    assert set(table.count("normalized_entropy").tolist()) == {3}


def test_case_18_one_hot_is_exactly_zero() -> None:
    """One visible key: entropy exactly 0, no epsilon, and nothing to normalise."""
    table = hw.scan(hw.wrap(llama()), inputs=[{"input_ids": torch.tensor([[5]])}])
    assert table["entropy"].tolist() == [0.0] * 8
    assert table["max_weight"].tolist() == [1.0] * 8
    assert table.count("normalized_entropy").tolist() == [0] * 8
    assert all(math.isnan(value) for value in table["normalized_entropy"])


def test_case_19_left_padding() -> None:
    batch = {"input_ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    table = hw.scan(hw.wrap(uniform(llama())), inputs=[batch])
    assert table["entropy"] == pytest.approx([math.log(2) / 2] * 8, abs=1e-6)


@pytest.mark.parametrize("pads", [0, 2, 10])
def test_case_19_right_padding(pads: int) -> None:
    batch = padded([torch.tensor([5, 6, 7]), torch.full((3 + pads,), 9)], left=False)
    one = {name: value[:1] for name, value in batch.items()}
    table = hw.scan(hw.wrap(uniform(bert())), inputs=[one])
    assert table["entropy"] == pytest.approx([math.log(3)] * 8, abs=1e-6)
    assert set(table.count("entropy").tolist()) == {3}


def test_case_17_default_implementation_is_measured_and_restored() -> None:
    for module in (llama(), bert()):
        assert module.config._attn_implementation == "sdpa"
        table = hw.scan(hw.wrap(module), inputs=examples())
        assert table.matrix("entropy").shape == (2, 4)
        assert bool(torch.isfinite(torch.tensor(table["entropy"])).all())
        assert module.config._attn_implementation == "sdpa"


def test_case_23_generation_steps_are_query_rows() -> None:
    module = llama()
    with hw.watch(module) as watched:
        module.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    table = watched.table
    assert set(table.count("entropy").tolist()) == {5}
    ids = module.generate(
        torch.tensor([[3, 1, 4]]), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0
    )
    same(table, hw.scan(hw.wrap(module), inputs=[{"input_ids": ids[:, :5]}]), relative=1e-4)


def test_case_25_the_model_is_as_before_when_a_layer_raises() -> None:
    module = llama().train()
    frozen = module.model.layers[0].mlp.up_proj.weight
    frozen.requires_grad_(False)
    _ = hw.wrap(module).layout
    ids = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    module.eval()
    before = module(**ids).logits
    module.train()
    wanted = {name: value.requires_grad for name, value in module.named_parameters()}

    def explode(*_: object) -> None:
        raise RuntimeError("layer 1 fails")

    model = hw.wrap(module)
    hook = module.model.layers[1].register_forward_pre_hook(explode)
    with pytest.raises(RuntimeError, match="layer 1 fails"), hw.watch(model):
        module(**ids)
    with pytest.raises(InputError, match="layer 1 fails"):
        hw.scan(model, inputs=[ids])
    hook.remove()
    assert all(part.training for part in module.modules())
    assert {name: value.requires_grad for name, value in module.named_parameters()} == wanted
    assert all(value.grad is None for value in module.parameters())
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()) == 0
    assert module.config._attn_implementation == "sdpa"
    module.eval()
    assert torch.equal(module(**ids).logits, before)


def test_the_language_model_head_does_not_run() -> None:
    module = llama()
    assert body_of(module, ["input_ids"], ["model.layers.0.self_attn"]) is module.model
    assert body_of(module, ["input_ids", "labels"], ["model.layers.0.self_attn"]) is module
    assert body_of(module, ["input_ids"], ["extra.self_attn"]) is module


def test_special_tokens_stand_apart() -> None:
    from tests.loading.tiny_models import word_tokenizer

    model = hw.wrap(bert(), word_tokenizer())
    table = hw.scan(model, ["the cat sat", "on mat"], batch_size=2)
    assert set(table.count("entropy").tolist()) == {5}
    assert set(table.count("entropy", "special").tolist()) == {4}


def test_run_folder(tmp_path: Path) -> None:
    result = scan_run(hw.wrap(llama()), inputs=examples(), output=tmp_path / "run", seed=3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["heads.json", "report.html", "run.json"]
    assert result.run["seed"] == 3
    assert result.run["counts"] == {"sites": 2, "blocks": 2, "heads": 8, "passages": 5, "tokens": 39}
    assert result.run["backends"][0]["backend"] in ("tiled", "cpu")
    with pytest.raises(RunError, match="overwrite"):
        scan_run(hw.wrap(llama()), inputs=examples(), output=tmp_path / "run")


def test_an_interrupted_run_leaves_the_finished_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    scan_run(hw.wrap(llama()), inputs=examples(), output=folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def interrupt(_done: int, _total: int | None = None, stage: str = "") -> None:
        if stage == "measuring":
            raise KeyboardInterrupt

    module = llama()
    with pytest.raises(KeyboardInterrupt):
        scan_run(hw.wrap(module), inputs=examples(), output=folder, overwrite=True, progress=interrupt)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert module.config._attn_implementation == "sdpa"


def test_plain_network_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="attention"):
        hw.scan(hw.wrap(torch.nn.Sequential(torch.nn.Linear(3, 5))), inputs=[{"input": torch.zeros(2, 3)}])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give texts or inputs, one of the two; neither was given"),
        ({"texts": ["a"], "inputs": [1]}, "give texts or inputs, one of the two; both were given"),
        ({"inputs": [{"input_ids": torch.tensor([[1]])}], "window": 4}, "window is about text"),
        ({"texts": ["a"], "field": "body"}, "field names a column of a file"),
        ({"inputs": [{"input_ids": torch.tensor([[1]])}], "device": "cpu"}, "device: options of loading"),
        ({"inputs": [{"input_ids": torch.tensor([[1]])}], "batch_size": 0}, "batch_size must be"),
        ({"inputs": []}, "the source of texts or inputs is empty"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        hw.scan(hw.wrap(llama()), **options)
    assert words in str(caught.value)


def test_cross_attention_has_no_neighbours() -> None:
    from transformers import T5Config, T5Model

    torch.manual_seed(3)
    config = T5Config(d_model=24, d_kv=7, d_ff=29, num_layers=2, num_heads=3, vocab_size=53, decoder_start_token_id=0)
    model = hw.wrap(T5Model(config).eval())
    ids = torch.randint(3, 53, (2, 11), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    table = hw.scan(model, inputs=[inputs])
    assert table.groups == (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
    cross = [site for site in table.sites if site.key.kind == "cross"]
    assert all("different sequences" in str(table.reason("distance", site.key)) for site in cross)
    everything = {
        name: torch.ones_like(inputs[key]) for name, key in (("input", "input_ids"), ("decoder", "decoder_input_ids"))
    }
    assert disagreements(table, truth_of(model.module, model.layout, [(inputs, everything)])) == []


def test_batches_are_what_the_scan_saw() -> None:
    """The padding that batches make is not in the counts."""
    model = hw.wrap(bert())
    made = list(batches(model, examples(), batch_size=2))
    assert sum(batch.tokens for batch in made) == 39


def test_whole_masks_and_skipped_passages_are_told() -> None:
    """What a reader of run.json must know stands in its notes; the usual compact masks are no news."""
    from headwise.layout import HeadLayout
    from headwise.verbs.facts import BackendLog, facts_of

    model = hw.wrap(bert())
    _ = model.layout
    seen = facts_of(model, Facts(passages=3, skipped_passages=2), BackendLog(), [], "hash")
    assert seen["mask"] == {"mode": "compact", "reason": None}
    assert seen["notes"] == ["2 passages hold no token of text and were skipped"]
    model._layout = HeadLayout(
        model.layout.sites, model.layout.blocks, facts=(("masks", "dense: BertModel indexes its mask"),)
    )
    seen = facts_of(model, Facts(), BackendLog(), [], "hash")
    assert seen["mask"] == {"mode": "dense", "reason": "BertModel indexes its mask"}
    assert seen["notes"] == ["whole masks of queries times keys were built: BertModel indexes its mask"]

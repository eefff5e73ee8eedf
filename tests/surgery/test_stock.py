"""Stock checkpoints: a repaired model that plain transformers loads, what gives its intercept a place, and promises."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertLMHeadModel, DeepseekV3Config, DeepseekV3ForCausalLM

import headwise as hw
from headwise.errors import InputError, ModelError, UnsupportedError
from headwise.models import expressible, wrap
from headwise.models.stock import switch_of
from headwise.models.switches import built
from headwise.plans import HeadCut, HeadPlan
from headwise.surgery import Healing, prune, verify
from headwise.verbs.statistics import statistics
from tests.surgery import small
from tests.surgery.small import IDS, apart, outputs

TEXT = [{"input_ids": torch.randint(2, 31, (1, 17), generator=torch.Generator().manual_seed(at))} for at in range(29)]
#: What a process does that has transformers and nothing of ours.
PLAIN = """
import json, sys
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM
found = {}
for name in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}").eval()
    case = load_file(f"{sys.argv[1]}/{name}.case")
    with torch.no_grad():
        logits = model(case["ids"]).logits
    tokens = model.generate(case["ids"], max_new_tokens=7, do_sample=False)
    found[name] = [float((logits - case["logits"]).abs().max()), tokens.tolist() == case["tokens"].tolist()]
assert not any(name.partition(".")[0] == "headwise" for name in sys.modules)
print(json.dumps(found))
"""
#: With an intercept under another config (Llama, Gemma, Cohere), and without one (Mistral, Qwen2, Phi3).
WITH, WITHOUT = ("Llama", "Gemma", "Cohere"), ("Mistral", "Qwen2", "Phi3")


def uniform(model: nn.Module, heads: list[int]) -> dict[str, list[int]]:
    return dict.fromkeys(wrap(model).layout.blocks, heads)


def deepseek() -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=6,
        first_k_dense_replace=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    return DeepseekV3ForCausalLM(config).eval()


def repair_of(pruned: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = pruned.surgery.repair
    return found


@pytest.fixture(scope="module")
def cut() -> dict[str, tuple[nn.Module, Any]]:
    """Models without two of four heads, under the promise."""
    found = {}
    for name in (*WITH, *WITHOUT):
        model = small.decoder(name)
        heads = [0, 1] if name in ("Llama", "Qwen2") else [1, 3]  # a whole group, or one head of each
        found[name] = (model, hw.prune(model, uniform(model, heads), inputs=TEXT, stock=True))
    return found


def test_plain_transformers_gives_the_same_bits_and_generates(
    cut: Mapping[str, tuple[nn.Module, Any]], tmp_path: Path
) -> None:
    """In a process that imports nothing of headwise."""
    for name, (_, pruned) in cut.items():
        pruned.save(tmp_path / name)
        tokens = pruned.module.generate(IDS, max_new_tokens=7, do_sample=False)
        case = {"ids": IDS, "logits": outputs(pruned.module, input_ids=IDS)[0].clone(), "tokens": tokens}
        save_file(case, tmp_path / f"{name}.case")
    asked = [sys.executable, "-c", PLAIN, str(tmp_path), *cut]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [0.0, True] for name in cut}


@pytest.mark.parametrize("name", WITH)
def test_the_config_gives_the_intercept_a_place(name: str, cut: Mapping[str, tuple[nn.Module, Any]]) -> None:
    model, pruned = cut[name]
    assert pruned.surgery.repair["method"] == "least_squares"
    assert pruned.surgery.repair["config"] == {"attention_bias": True}
    assert (model.config.attention_bias, pruned.config.attention_bias) == (False, True)
    attention = pruned.module.model.layers[0].self_attn
    assert bool(attention.o_proj.bias.any())
    assert not any(bool(getattr(attention, f"{part}_proj").bias.any()) for part in "qkv")
    assert pruned.surgery.parameters[1] == sum(value.numel() for value in pruned.module.parameters())
    assert len(verify(model, pruned).repaired) == 2


def test_the_intercept_is_the_same_without_the_promise() -> None:
    """Uneven plans keep it where it was; uniform ones find the same place by themselves."""
    model = small.decoder("Llama")
    known = statistics(model, inputs=TEXT)
    uneven = prune(model, {"model.layers.0.self_attn": [0, 1]}, statistics=known)
    assert "config" not in repair_of(uneven)
    assert uneven.config.attention_bias is False
    even, promised = (hw.prune(model, uniform(model, [1, 3]), statistics=known, stock=stock) for stock in (False, True))
    assert all(map(torch.equal, even.module.parameters(), promised.module.parameters()))
    assert expressible(even.module) is None


@pytest.mark.parametrize("name", WITHOUT)
def test_elsewhere_the_repair_has_no_intercept_and_says_so(name: str) -> None:
    model, said = small.decoder(name), []
    plan = uniform(model, [1, 3])
    known = statistics(model, inputs=TEXT)
    pruned = hw.prune(model, plan, statistics=known, stock=True, notice=said.append)
    assert repair_of(pruned)["method"] == "least_squares_no_bias"
    assert f"{name}Config builds no model.layers.0.self_attn.o_proj.bias" in said[0]
    assert pruned.module.model.layers[0].self_attn.o_proj.bias is None
    changes = {}
    for repair in ("least_squares", "least_squares_no_bias", "none"):
        record = repair_of(prune(model, plan, statistics=known, repair=repair))
        changes[repair] = sum(layer["left"] for layer in record["layers"])
    assert changes["least_squares"] <= changes["least_squares_no_bias"]
    assert verify(model, pruned).unchanged > 0


def test_a_width_of_the_config_that_is_no_heads_stays(tmp_path: Path) -> None:
    """DeepSeek's config calls the rotary part of a head head_dim."""
    model = deepseek()
    assert model.config.head_dim == 4
    pruned = hw.prune(model, uniform(model, [1, 3]), inputs=TEXT, stock=True)
    assert (repair_of(pruned)["method"], repair_of(pruned)["config"]) == ("least_squares", {"attention_bias": True})
    assert (pruned.config.head_dim, pruned.config.num_attention_heads) == (4, 2)
    stock = type(model).from_pretrained(pruned.save(tmp_path / "stock")).eval()
    assert apart(outputs(stock, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0


def test_a_stock_model_is_cut_again_and_is_one_again(cut: Mapping[str, tuple[nn.Module, Any]], tmp_path: Path) -> None:
    model, once = cut["Llama"]
    once.save(tmp_path / "once")
    for before in (once, hw.load(tmp_path / "once")):
        twice = hw.prune(before, uniform(before.module, [1]), inputs=TEXT, stock=True)
        assert twice.config.num_attention_heads == 1
        assert verify(model, twice).removed == dict.fromkeys(uniform(model, []), (0, 1, 3))
        stock = type(model).from_pretrained(twice.save(tmp_path / "twice", overwrite=True)).eval()
        assert apart(outputs(stock, input_ids=IDS), outputs(twice.module, input_ids=IDS)) == 0.0


def test_half_precision(tmp_path: Path) -> None:
    model = small.decoder("Llama").bfloat16()
    pruned = hw.prune(model, uniform(model, [1, 3]), inputs=TEXT, stock=True)
    folder = pruned.save(tmp_path / "small")
    assert {value.dtype for value in pruned.module.parameters()} == {torch.bfloat16}
    stock = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    assert apart(outputs(stock, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_bias_that_no_repair_put_there_is_found(name: str) -> None:
    """Zeros beside an intercept are taken for what they are; anything else is not the original's."""
    model = small.decoder("Llama")
    pruned: Any = hw.prune(model, uniform(model, [1, 3]), inputs=TEXT, stock=True)
    record = {**pruned.surgery.repair, "layers": []} if name == "o_proj" else pruned.surgery.repair
    object.__setattr__(pruned.surgery, "repair", record)
    with torch.no_grad():
        getattr(pruned.module.model.layers[1].self_attn, name).bias[0] += 1
    with pytest.raises(ModelError, match=f"{name}.(bias|weight) is not the original's"):
        verify(model, pruned)


def test_healed_biases_that_came_with_the_intercept_are_taken_over() -> None:
    """They were zero before, and are the trained model's own afterwards."""
    pytest.importorskip("accelerate")
    model = small.decoder("Llama")
    pruned: Any = hw.prune(model, uniform(model, [1, 3]), inputs=TEXT, stock=True, heal=Healing(3, 1e-2))
    assert bool(pruned.module.model.layers[0].self_attn.v_proj.bias.any())
    assert verify(model, pruned).healed > 6
    assert expressible(pruned.module) is None


def test_a_config_that_no_repair_turned_is_found() -> None:
    model = small.decoder("Llama")
    pruned: Any = hw.prune(model, uniform(model, [1, 3]), inputs=TEXT, stock=True)
    del pruned.surgery.repair["config"]
    with pytest.raises(ModelError, match="the config says attention_bias = True in PRUNED and False in ORIGINAL"):
        verify(model, pruned)


def test_a_switch_is_taken_back_whole() -> None:
    """What surgery does where a model would compute something else under the other config."""
    pruned = prune(small.decoder("Llama"), uniform(small.decoder("Llama"), [1, 3]), repair="none").module
    pruned.model.layers[0].self_attn.o_proj.bias = nn.Parameter(torch.ones(24))
    before = pruned.state_dict()
    switch = switch_of(pruned)
    assert switch is not None
    assert switch.values == {"attention_bias": True}
    switch.put(pruned)
    assert len(pruned.state_dict()) == len(before) + 7
    switch.take_back(pruned)
    assert list(pruned.state_dict()) == list(before)
    assert pruned.config.attention_bias is False


@pytest.mark.parametrize(
    ("name", "plan", "asked", "error", "words"),
    [
        ("Llama", {0: [0, 1]}, {}, InputError, r"leaves 2 in model.layers.0.self_attn and 4 in .*--uniform"),
        ("Llama", {0: [0], 1: [0]}, {}, InputError, "leaves 3 for 2 in model.layers.0.self_attn, unevenly"),
        ("Llama", {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}, {}, InputError, "leaves no head"),
        ("Mistral", {0: [0, 2], 1: [0, 2]}, {"repair": "least_squares"}, UnsupportedError,
         r"repair='least_squares' adds an intercept, and MistralConfig builds no .*o_proj.bias; take repair="),
        ("Mistral", {0: [0, 2], 1: [0, 2]}, {"repair": "bias"}, UnsupportedError, "repair='bias' adds an intercept"),
        ("Helium", {0: [0, 2], 1: [0, 2]}, {}, UnsupportedError,
         r"cannot say this plan: .*o_proj.weight would be \(24, 12\), and is \(24, 24\) in what HeliumConfig builds"),
    ],
)  # fmt: skip
def test_a_promise_that_cannot_be_kept_is_refused_first(
    name: str, plan: dict[int, list[int]], asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = small.decoder(name, head_dim=6)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    named = {f"model.layers.{at}": heads for at, heads in plan.items()}
    read: list[int] = []

    def texts() -> Any:
        read.append(1)
        yield from TEXT

    with pytest.raises(error, match=words):
        hw.prune(model, named, inputs=texts(), stock=True, **asked)
    assert read == []
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def by_means(model: nn.Module, cuts: Mapping[int, list[int]], replacement: str) -> HeadPlan:
    blocks = {path: (block.query_heads, block.kv_heads) for path, block in wrap(model).layout.blocks.items()}
    named = [(f"model.layers.{layer}.self_attn", head) for layer, heads in cuts.items() for head in heads]
    return HeadPlan(tuple(HeadCut(path, head, replacement) for path, head in named), blocks=blocks)


def test_heads_that_carry_running_means_are_counted_among_those_left(tmp_path: Path) -> None:
    """All heads of every layer go, and two stay in each in order to put the running means out."""
    model = small.decoder("Llama")
    every = by_means(model, {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}, "running_mean")
    pruned = hw.prune(model, every, inputs=TEXT, stock=True)
    again = type(model).from_pretrained(pruned.save(tmp_path / "small"))  # type: ignore[attr-defined]
    assert again.config.num_attention_heads == again.config.num_key_value_heads == 2
    assert apart(outputs(again.eval(), input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0
    with pytest.raises(InputError, match=r"leaves 2 in model.layers.0.self_attn and 4 in"):
        hw.prune(model, by_means(model, {0: [0, 1, 2, 3]}, "running_mean"), inputs=TEXT, stock=True)
    with pytest.raises(InputError, match=r"leaves 3 for 2 in model.layers.0.self_attn, unevenly"):
        hw.prune(model, by_means(model, {0: [0, 1], 1: [0, 1]}, "running_mean"), inputs=TEXT, stock=True)


@pytest.mark.parametrize("repair", [None, "none", "least_squares"])
def test_constants_without_a_place_are_told_what_helps(repair: str | None) -> None:
    model = small.decoder("Mistral")
    plan = by_means(model, {0: [1, 3], 1: [1, 3]}, "constant")
    with pytest.raises(UnsupportedError, match=r"constant add an intercept.*o_proj.bias; make the plan with the repl"):
        hw.prune(model, plan, inputs=TEXT, stock=True, repair=repair)


@pytest.mark.parametrize("repair", [None, "none"])
def test_layers_that_were_cut_one_after_the_other(repair: str | None) -> None:
    """The intercept of the first layer has its place under another config, which the second cut promises."""
    model = small.decoder("Llama")
    first = hw.prune(model, {"model.layers.0": [1, 3]}, inputs=TEXT)
    assert expressible(first.module) is not None
    both = hw.prune(first, {"model.layers.1": [1, 3]}, inputs=None if repair else TEXT, stock=True, repair=repair)
    assert expressible(both.module) is None


def test_weights_that_are_single_numbers() -> None:
    """Apertus learns two numbers without an axis in every activation."""
    model = small.decoder("Apertus")
    assert any(value.ndim == 0 for value in model.state_dict().values())
    pruned = hw.prune(model, uniform(model, [1, 3]), inputs=TEXT, stock=True)
    assert expressible(pruned.module) is None


def test_a_family_with_a_bias_needs_nothing() -> None:
    model = small.bert(hidden_size=24)
    with pytest.raises(UnsupportedError, match="cannot say this plan"):  # BertConfig has no head_dim of its own
        hw.prune(model, uniform(model, [1, 3]), repair="none", stock=True)
    model = small.decoder("Starcoder2")
    pruned = hw.prune(model, uniform(model, [1, 3]), inputs=TEXT, stock=True)
    assert repair_of(pruned)["method"] == "least_squares"
    assert "config" not in repair_of(pruned)


def test_nothing_is_said_while_a_config_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers says at every build that this class wants ``is_decoder``, and a build of ours is not the user's."""
    said: list[str] = []
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [Handler(said)])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16, vocab_size=31, head_dim=4
    )
    model = BertLMHeadModel(config)
    assert len(said) == 1
    assert "is_decoder" in said[0]
    assert built(model, config) is not None
    assert len(said) == 1


class Handler(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

"""Heads replaced by running means: proved against the mean of what is seen, saved, loaded, run; or refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import InputError, ModelError, UnsupportedError
from headwise.layout import HeadId
from headwise.models import discover, expressible, gate, load, weight_hash
from headwise.models.cut_modules import cut_of
from headwise.plans import HeadCut, HeadPlan
from headwise.surgery import prune, verify
from tests.surgery import small
from tests.surgery.small import IDS, apart, outputs

LEFT = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
BERT = "encoder.layer.{}.attention.self"
LLAMA = "model.layers.{}.self_attn"


def plan_of(model: nn.Module, cuts: Mapping[str, Sequence[int]], **other: Mapping[str, Sequence[int]]) -> HeadPlan:
    """Heads replaced by running means, and ``nothing=`` or ``constant=`` heads by that."""
    named = {"running_mean": cuts, **other}
    blocks = {path: (block.query_heads, block.kv_heads) for path, block in discover(model).blocks.items()}
    every = [
        HeadCut(path, head, name) for name, found in named.items() for path, heads in found.items() for head in heads
    ]
    return HeadPlan(tuple(every), blocks=blocks)


def averaged(model: nn.Module, cuts: Mapping[str, Sequence[int]], **inputs: Any) -> list[Tensor]:
    """The reference: gates that put the mean of what is seen in the heads' places."""
    layout = discover(model)
    heads = [HeadId(site.key, head) for site in layout.sites for head in cuts.get(site.block, ())]
    with gate(model, heads, replacement="running_mean"):
        return outputs(model, **inputs)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert": (small.bert, BERT),
    "gpt2": (small.gpt2, "transformer.h.{}.attn"),
    "llama": (lambda: small.decoder("Llama"), LLAMA),
    "mistral": (lambda: small.decoder("Mistral", sliding_window=3), LLAMA),
    "qwen2, with a bias": (lambda: small.decoder("Qwen2"), LLAMA),
    "qwen3, with norms of queries": (lambda: small.decoder("Qwen3", head_dim=6), LLAMA),
    "gemma2, with a soft cap": (lambda: small.decoder("Gemma2", head_dim=6, sliding_window=3), LLAMA),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "padded on the left"])
def test_it_is_the_mean_of_what_is_seen(name: str, mask: Tensor | None) -> None:
    build, path = FAMILIES[name]
    model = build()
    cuts = {path.format(0): [0, 1, 3], path.format(1): [2]}
    pruned = prune(model, plan_of(model, cuts), repair="none")
    inputs = {"input_ids": IDS} | ({} if mask is None else {"attention_mask": mask})
    expected = averaged(model, cuts, **inputs)
    assert apart(outputs(pruned.module, **inputs), expected) <= 1e-5
    assert apart(outputs(model, **inputs), expected) > 1e-3
    assert pruned.surgery is not None
    assert all(one.difference <= 1e-5 * one.largest for one in pruned.surgery.proof.layers)


def test_grouped_heads_need_one_carrier() -> None:
    model = small.decoder("Llama")
    pruned = prune(model, plan_of(model, {LLAMA.format(0): [0, 1, 3]}), repair="none")
    attention: Any = pruned.module.get_submodule(LLAMA.format(0))
    whole: Any = model.get_submodule(LLAMA.format(0))
    assert pruned.surgery is not None
    (change,) = pruned.surgery.blocks
    assert (change.means, change.removed, change.query_heads, change.kv_heads) == (((0, 1), (3,)), (1,), (4, 3), (2, 2))
    assert not attention.q_proj.weight.view(3, 6, 24)[[0, 2]].any()
    assert attention.q_proj.weight.view(3, 6, 24)[1].any()
    columns = whole.o_proj.weight.T.view(4, 6, 24)
    torch.testing.assert_close(attention.o_proj.weight.T.view(3, 6, 24)[0], columns[0] + columns[1], rtol=0, atol=1e-6)
    assert pruned.surgery.parameters[0] - pruned.surgery.parameters[1] == 2 * 6 * 24
    cut = cut_of(attention)
    assert cut is not None
    assert cut.means == ((0, 1), (3,))


def test_every_head_has_its_own_where_nothing_is_shared() -> None:
    bert = small.bert()
    pruned = prune(bert, plan_of(bert, {BERT.format(0): [0, 1, 2, 3]}), repair="none")
    assert pruned.surgery is not None
    assert pruned.surgery.parameters[0] == pruned.surgery.parameters[1]
    assert pruned.surgery.blocks[0].means == ((0,), (1,), (2,), (3,))


def test_all_three_replacements_in_one_layer() -> None:
    model = small.decoder("Llama", num_attention_heads=6, num_key_value_heads=2)
    path = LLAMA.format(0)
    plan = plan_of(model, {path: [0, 1]}, nothing={path: [2]}, constant={path: [4]})
    statistics = hw.statistics(model, inputs=[{"input_ids": IDS}])
    pruned = prune(model, plan, repair="none", statistics=statistics)
    assert pruned.surgery is not None
    assert (pruned.surgery.blocks[0].means, pruned.surgery.blocks[0].removed) == (((0, 1),), (1, 2, 4))
    layout = discover(model)
    site = layout.sites[0].key
    bias = pruned.module.get_submodule(path).o_proj.bias
    weight = model.get_submodule(path).o_proj.weight.T.view(6, 4, 24)[4].double()
    expected = statistics[site].mean.view(6, 4)[4] @ weight
    torch.testing.assert_close(bias.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_generation_with_every_cache(name: str) -> None:
    build, path = FAMILIES[name]
    model: Any = build()
    cuts = {path.format(0): [0, 1, 3], path.format(1): [1]}
    pruned: Any = prune(model, plan_of(model, cuts), repair="none").module
    options: dict[str, Any] = {
        "attention_mask": LEFT, "max_new_tokens": 7, "do_sample": False, "pad_token_id": 0,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    layout = discover(model)
    heads = [HeadId(site.key, head) for site in layout.sites for head in cuts.get(site.block, ())]
    for kind in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        with gate(model, heads, replacement="running_mean"):
            expected = model.generate(IDS, **options, **kind)
        found = pruned.generate(IDS, **options, **kind)
        assert torch.equal(found.sequences, expected.sequences), kind
        assert apart(list(found.logits), list(expected.logits)) <= 1e-5, kind


def test_saved_and_loaded_where_nobody_saw_the_original(tmp_path: Path) -> None:
    model = small.decoder("Llama")
    pruned = prune(model, plan_of(model, {LLAMA.format(0): [0, 1, 3]}), repair="none")
    folder = pruned.save(tmp_path / "small")
    torch.save(outputs(pruned.module, input_ids=IDS, attention_mask=LEFT), tmp_path / "expected.pt")
    program = (
        "import sys, torch, headwise as hw\n"
        "from tests.surgery.small import IDS, apart, outputs\n"
        "found = hw.load(sys.argv[1])\n"
        "left = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])\n"
        "expected = torch.load(sys.argv[2])\n"
        "assert apart(outputs(found.module, input_ids=IDS, attention_mask=left), expected) <= 1e-6\n"
        "assert found.surgery.blocks[0].means == ((0, 1), (3,))\n"
        "print(found.module.generate(IDS, max_new_tokens=3, do_sample=False).shape[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path / "expected.pt")],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "8"
    model.save_pretrained(tmp_path / "original")
    found = verify(tmp_path / "original", folder)
    assert found.means == {LLAMA.format(0): ((0, 1), (3,))}
    assert found.removed == {LLAMA.format(0): (1,)}
    assert found.repaired == ()
    assert found.unchanged == len(model.state_dict())
    assert found.recorded


def test_stock_where_no_head_went(tmp_path: Path) -> None:
    """A head without a query is a head: plain transformers loads the model."""
    from transformers import BertModel

    bert = small.bert()
    pruned = prune(bert, plan_of(bert, {BERT.format(1): [1, 2]}), repair="none")
    folder = pruned.save(tmp_path / "small")
    plain = BertModel.from_pretrained(folder).eval()
    assert apart(outputs(plain, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) <= 1e-6
    assert verify(bert, load(folder)).means == {BERT.format(1): ((1,), (2,))}


@pytest.mark.parametrize("repair", ["bias", "least_squares"])
def test_repaired_and_verified(tmp_path: Path, repair: str) -> None:
    model = small.decoder("Llama")
    plan = plan_of(model, {LLAMA.format(0): [0, 1, 3]})
    inputs = [{"input_ids": torch.randint(3, 31, (4, 24), generator=torch.Generator().manual_seed(0))}]
    pruned = hw.prune(model, plan, inputs=inputs, repair=repair)
    assert pruned.surgery is not None
    (layer,) = pruned.surgery.repair["layers"]
    assert layer["columns"] == 3 * 6
    assert layer["left"] < layer["lost"]
    found = verify(model, load(pruned.save(tmp_path / "small")))
    assert found.means == {LLAMA.format(0): ((0, 1), (3,))}
    if repair == "least_squares":
        assert found.repaired == (f"{LLAMA.format(0)}.o_proj",)


def test_the_repair_is_the_best_from_what_is_left() -> None:
    """Against least squares on the very rows: kept heads and running means predict what the layer put out."""
    model: Any = small.decoder("Llama")
    path = LLAMA.format(0)
    ids = torch.randint(3, 31, (4, 24), generator=torch.Generator().manual_seed(0))
    statistics = hw.statistics(model, inputs=[{"input_ids": row[None]} for row in ids], running_means=True)
    pruned: Any = prune(model, plan_of(model, {path: [0, 1, 3]}), statistics=statistics, ridge=1e-10).module
    given: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, args: given.update({name: args[0].detach().flatten(0, 1).double()})

    handles = [one.get_submodule(path).o_proj.register_forward_pre_hook(keep(name)) for name, one in
               (("whole", model), ("left", pruned))]  # fmt: skip
    outputs(model, input_ids=ids)
    outputs(pruned, input_ids=ids)
    for handle in handles:
        handle.remove()
    wanted = given["whole"] @ model.get_submodule(path).o_proj.weight.T.double()
    known = torch.cat([given["left"], torch.ones(len(wanted), 1, dtype=torch.float64)], 1)
    best = wanted - known @ torch.linalg.lstsq(known, wanted).solution
    layer = pruned.get_submodule(path).o_proj
    ours = wanted - given["left"] @ layer.weight.T.double() - layer.bias.double()
    ours, best = ours.detach(), best.detach()
    assert float(ours.square().sum()) == pytest.approx(float(best.square().sum()), rel=1e-4)


def test_again_on_top(tmp_path: Path) -> None:
    """A second surgery lets the carrier of the first stand for more, or takes it away."""
    model = small.decoder("Llama", num_attention_heads=6, num_key_value_heads=2)
    path = LLAMA.format(0)
    first = prune(model, plan_of(model, {path: [0, 1]}), repair="none")
    second = prune(first, plan_of(first.module, {path: [1]}), repair="none")  # head 2 of the original
    cut = cut_of(second.module.get_submodule(path))
    assert cut is not None
    assert (cut.heads, cut.means) == ((0, 3, 4, 5), ((0, 1, 2),))
    expected = averaged(model, {path: [0, 1, 2]}, input_ids=IDS)
    assert apart(outputs(second.module, input_ids=IDS), expected) <= 1e-5
    loaded = load(second.save(tmp_path / "small"))
    assert verify(model, loaded).means == {path: ((0, 1, 2),)}
    assert verify(first, loaded).means == {path: ((0, 1),)}
    third = prune(loaded, {path: [0]}, repair="none")
    cut = cut_of(third.module.get_submodule(path))
    assert cut is not None
    assert (cut.heads, cut.means) == ((3, 4, 5), ())
    assert apart(outputs(third.module, input_ids=IDS), small.masked(model, {path: [0, 1, 2]}, input_ids=IDS)) <= 1e-5


def test_cross_attention_is_a_mean_of_the_encoder() -> None:
    model = small.t5()
    path = "decoder.block.1.layer.1.EncDecAttention"
    inputs = {"input_ids": IDS, "attention_mask": LEFT, "decoder_input_ids": IDS[:, :3]}
    pruned = prune(model, plan_of(model, {path: [0, 2]}), repair="none")
    assert apart(outputs(pruned.module, **inputs), averaged(model, {path: [0, 2]}, **inputs)) <= 1e-5


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_in_float64_with_a_softmax_in_float32(name: str) -> None:
    """Eager attention takes its softmax in float32 whatever the model is in; Gemma 2 has no other attention."""
    model: Any = small.decoder(name, head_dim=6).double()
    model.set_attn_implementation("eager")
    path = LLAMA.format(0)
    pruned = prune(model, plan_of(model, {path: [0, 1, 3]}), repair="none")
    assert pruned.surgery is not None
    assert pruned.surgery.proof.bound == 1e-6
    assert verify(model, pruned).means == {path: ((0, 1), (3,))}
    nothing = prune(model, {path: [0]}, repair="none")
    assert nothing.surgery is not None
    assert nothing.surgery.proof.bound == 1e-12


def test_queries_that_lie_shard_by_shard() -> None:
    """CodeGen's weight holds them in shards, each head's rows beside values and keys."""
    from transformers import CodeGenConfig, CodeGenForCausalLM

    config = CodeGenConfig(vocab_size=31, n_embd=48, n_layer=1, n_head=8, rotary_dim=4, n_inner=16)
    model = small.noisy(CodeGenForCausalLM(config))
    path = "transformer.h.0.attn"
    cuts = {path: [1, 2, 7]}
    pruned = prune(model, plan_of(model, cuts, nothing={path: [0]}), repair="none")
    layout = discover(model)
    with gate(model, {path: [0]}), gate(model, [HeadId(layout.sites[0].key, head) for head in cuts[path]],
                                        replacement="running_mean"):  # fmt: skip
        expected = outputs(model, input_ids=IDS, use_cache=False)
    assert apart(outputs(pruned.module, input_ids=IDS, use_cache=False), expected) <= 1e-5


def phi() -> nn.Module:
    return small.decoder("Phi", qk_layernorm=True, num_key_value_heads=4, hidden_size=32)


def gpt_oss() -> nn.Module:
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 32, "intermediate_size": 32}
    model: Any = small.decoder("GptOss", **sizes)
    model.set_attn_implementation("eager")
    return model  # type: ignore[no-any-return]


def olmo2() -> nn.Module:
    return small.decoder("Olmo2")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (small.t5, r"encoder\.block\.0\S*: a bias is added to its scores"),
        (gpt_oss, r"model\.layers\.0\S*: a sink takes a part of every row"),
        (phi, r"model\.layers\.0\S*: LayerNorm q_layernorm adds a bias to the queries"),
        (olmo2, r"layers\.0\.self_attn\.q_norm: .* over all heads at once"),
    ],
    ids=["relative positions", "sinks", "a norm with a bias", "a norm over all heads"],
)
def test_what_is_not_even_is_refused_by_name(build: Callable[[], nn.Module], said: str) -> None:
    model = build()
    before = weight_hash(model)
    path = next(iter(discover(model).blocks))
    with pytest.raises(UnsupportedError, match=said):
        prune(model, plan_of(model, {path: [1]}), repair="none")
    assert weight_hash(model) == before


def test_a_query_that_does_not_come_from_the_projection_alone() -> None:
    """Something is added between W_Q and the scores, and no name says so: found by running it."""
    model: Any = small.decoder("Qwen3", head_dim=6)
    attention = model.model.layers[0].self_attn
    attention.q_norm = _Lifted(attention.q_norm)
    with pytest.raises(UnsupportedError, match=r"layers\.0\S*: its queries are not zero where W_Q and its bias are"):
        prune(model, plan_of(model, {LLAMA.format(0): [1]}), repair="none")


class _Lifted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden) + 0.5
        return found


def test_the_proof_alone_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.surgery import averaging

    model = small.t5()
    path = next(iter(discover(model).blocks))
    monkeypatch.setattr(averaging, "_uneven", lambda problem, heads: None)
    with pytest.raises(UnsupportedError, match=r"running means cannot stand in the place of its heads \[1\]"):
        prune(model, plan_of(model, {path: [1]}), repair="none")


def test_statistics_without_running_means_are_refused() -> None:
    model = small.decoder("Llama")
    statistics = hw.statistics(model, inputs=[{"input_ids": IDS}])
    with pytest.raises(InputError, match=r"hold no running means, .* running_means=True"):
        prune(model, plan_of(model, {LLAMA.format(0): [0]}), statistics=statistics)


def test_a_carrier_that_looks_again_is_found() -> None:
    model = small.decoder("Llama")
    pruned: Any = prune(model, plan_of(model, {LLAMA.format(0): [0, 1]}), repair="none")
    with torch.no_grad():
        pruned.module.model.layers[0].self_attn.q_proj.weight[0, 0] = 1e-3
    with pytest.raises(ModelError, match=r"q_proj\.weight is not the original's"):
        verify(model, pruned)


def test_healing_leaves_the_queries_at_zero() -> None:
    pytest.importorskip("accelerate")
    model = small.decoder("Llama")
    inputs = [
        {"input_ids": torch.randint(3, 31, (4, 12), generator=torch.Generator().manual_seed(at))} for at in (1, 2)
    ]
    plan = plan_of(model, {LLAMA.format(0): [0, 1, 3]})
    healed: Any = hw.prune(model, plan, inputs=inputs, repair="none", heal=4)
    cold: Any = prune(model, plan, repair="none")
    ours, theirs = (one.module.model.layers[0].self_attn.q_proj.weight.view(3, 6, 24) for one in (healed, cold))
    assert not ours[[0, 2]].any()
    assert not torch.equal(ours[1], theirs[1])
    assert verify(model, healed).healed > 0


def test_layers_that_keep_every_head_do_not_differ_in_number() -> None:
    """What a stock checkpoint cannot say of running means alone is the intercept of the repair."""
    model = small.decoder("Mistral")
    inputs = [{"input_ids": torch.randint(3, 31, (4, 24), generator=torch.Generator().manual_seed(0))}]
    pruned = hw.prune(model, plan_of(model, {LLAMA.format(0): [0]}), inputs=inputs, repair="bias", notice=print)
    why = expressible(pruned.module)
    assert why is not None
    assert "builds no model.layers.0.self_attn.o_proj.bias" in why


def test_a_stock_checkpoint_promised_where_no_head_went(tmp_path: Path) -> None:
    """Heads that put out their running mean stay, so layers are not uneven by them; heads that share one go."""
    from transformers import BertModel

    bert = small.bert()
    plan = plan_of(bert, {BERT.format(1): [1, 2]})
    pruned = hw.prune(bert, plan, repair="none", stock=True, notice=print)
    plain = BertModel.from_pretrained(pruned.save(tmp_path / "small")).eval()
    assert apart(outputs(plain, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) <= 1e-6
    model = small.decoder("Llama")
    with pytest.raises(InputError, match=r"leaves 3 for 2 in model.layers.0.self_attn, unevenly"):
        hw.prune(model, plan_of(model, {LLAMA.format(0): [0, 1]}), repair="none", stock=True)

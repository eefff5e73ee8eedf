"""What is found in a model, what is refused, and by which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2Model,
    GPTBigCodeConfig,
    GPTBigCodeModel,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaModel,
    Phi3Config,
    Phi3Model,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5Model,
)

from headwise.errors import InputError, ModelError, UnsupportedError
from headwise.layout import SiteKey
from headwise.models import discover, forget, observe, output_weight

SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 23}


def counts(model: nn.Module) -> set[tuple[int, int, int]]:
    return {(block.query_heads, block.kv_heads, block.d_k) for block in discover(model).blocks.values()}


CASE_45 = {
    "GPT-2": (GPT2Model, GPT2Config(vocab_size=31, n_layer=2, n_head=4, n_embd=16), 2, (4, 4, 4)),
    "GPT-BigCode": (
        GPTBigCodeModel,
        GPTBigCodeConfig(vocab_size=31, n_layer=2, n_head=4, n_embd=16, multi_query=True),
        2,
        (4, 1, 4),
    ),
    "DistilBERT": (
        DistilBertModel,
        DistilBertConfig(vocab_size=31, n_layers=2, n_heads=4, dim=16, hidden_dim=23),
        2,
        (4, 4, 4),
    ),
    "T5": (
        T5Model,
        T5Config(vocab_size=31, d_model=16, d_kv=6, d_ff=23, num_layers=2, num_heads=4, decoder_start_token_id=0),
        6,
        (4, 4, 6),
    ),
    "key-value heads None": (
        LlamaModel,
        LlamaConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=None),
        2,
        (4, 4, 4),
    ),
    "Qwen3": (
        Qwen3Model,
        Qwen3Config(**SMALL, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        2,
        (4, 2, 8),
    ),
}


@pytest.mark.parametrize("name", CASE_45)
def test_case_45_counts_by_whatever_name(name: str) -> None:
    kind, config, sites, expected = CASE_45[name]
    model = kind(config).eval()
    assert len(discover(model).sites) == sites
    assert counts(model) == {expected}


def test_case_45_a_nested_text_config() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 23,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=30,
        boi_token_id=29,
        eoi_token_id=28,
        mm_tokens_per_image=4,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    layout = discover(model)
    found = {site.key.stack: layout.block_of(site.key) for site in layout.sites}
    assert (found["decoder"].query_heads, found["decoder"].kv_heads, found["decoder"].d_k) == (4, 2, 8)
    missed = dict(layout.uncovered)
    assert "vision" in found or any("vision" in path for path in missed)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: zoo.build("longformer"), "in a way that headwise cannot follow .LongformerSelfAttention, 2 modules"),
        (
            lambda: zoo.build("vits"),
            "VitsAttention: no layer reads its results head by head, .*2 modules, the first is",
        ),
        (lambda: zoo.build("fnet"), "has no attention heads that headwise understands"),
    ],
)
def test_attention_that_cannot_be_followed_is_refused_by_name(model: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{named}.*looked for: modules whose code"):
        discover(model())


def test_case_45_a_plain_mlp_is_an_error_with_the_list_of_what_was_looked_for() -> None:
    mlp = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(
        UnsupportedError,
        match=r"Sequential has no attention heads .*looked for: .*AttentionInterface.*; found none",
    ):
        discover(mlp)


def test_case_11_four_query_heads_on_three_key_value_heads() -> None:
    """transformers builds this model and fails only in its forward pass."""
    model = LlamaModel(LlamaConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=3))
    with pytest.raises(ModelError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        discover(model)


def test_case_11_which_key_value_head_a_query_head_reads(ids: Tensor, collect: Any) -> None:
    """Values of head 0 zero and of head 1 one, uniform weights: per query head 0, 0, 1, 1."""
    model = LlamaModel(LlamaConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)).eval()
    attention = model.layers[0].self_attn
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        model(ids)
    assert seen.calls[0].block.kv_map == (0, 0, 1, 1)

    class Constant(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.tensor([0.0] * 4 + [1.0] * 4).expand(*hidden.shape[:2], 8)

    attention.v_proj = Constant()
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        with observe(model, seen):
            model(ids)
    torch.testing.assert_close(seen.calls[1].z.mean(dim=(0, 2, 3)), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_weights_that_disagree_with_the_config_are_refused() -> None:
    model = BertModel(BertConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4)).eval()
    attention = model.encoder.layer[0].attention
    with torch.no_grad():
        for name in ("query", "key", "value"):
            linear = getattr(attention.self, name)
            linear.weight, linear.bias = (
                nn.Parameter(linear.weight[:12].clone()),
                nn.Parameter(linear.bias[:12].clone()),
            )
        attention.output.dense.weight = nn.Parameter(attention.output.dense.weight[:, :12].clone())
    with pytest.raises(ModelError, match="the weights have 3 query heads, but BertConfig says num_attention_heads = 4"):
        discover(model)


def test_case_26_pruned_heads_of_a_config_remove_nothing() -> None:
    model = BertModel(BertConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4, pruned_heads={0: [1]}))
    assert counts(model) == {(4, 4, 4)}


ARRANGEMENTS = {
    "separate": (
        LlamaModel,
        LlamaConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2),
        "heads",
        False,
    ),
    "Conv1D": (GPT2Model, GPT2Config(vocab_size=31, n_layer=1, n_head=4, n_embd=16), "q|k|v", True),
    "per head": (
        GPTNeoXModel,
        GPTNeoXConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4),
        "(q,k,v) per head",
        False,
    ),
    "grouped, fused": (
        Phi3Model,
        Phi3Config(**SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0),
        "q|k|v",
        False,
    ),
    "multi-query": (GPTBigCodeModel, GPTBigCodeConfig(vocab_size=31, n_layer=1, n_head=4, n_embd=16), "q|k|v", False),
    "multi-head BigCode": (
        GPTBigCodeModel,
        GPTBigCodeConfig(vocab_size=31, n_layer=1, n_head=4, n_embd=16, multi_query=False),
        "(q,k,v) per head",
        False,
    ),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_where_the_projections_sit(name: str, ids: Tensor) -> None:
    kind, config, arrangement, transposed = ARRANGEMENTS[name]
    block = next(iter(discover(kind(config).eval()).blocks.values()))
    for projection in (block.q, block.k, block.v):
        assert projection is not None
        assert (projection.arrangement, projection.transposed) == (arrangement, transposed)
    assert block.o is not None
    assert block.o.parameter == block.o_path
    assert block.unknown == ()


def test_the_output_weight_is_a_view_by_heads(ids: Tensor, collect: Any) -> None:
    """The heads' results and the bias add up to what the projection puts out."""
    for model in (
        GPT2Model(GPT2Config(vocab_size=31, n_layer=1, n_head=4, n_embd=16)).eval(),
        BertModel(BertConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4)).eval(),
    ):
        block = next(iter(discover(model).blocks.values()))
        weight = output_weight(model, block)
        linear = model.get_submodule(block.o.parameter)
        assert weight.shape == (4, 4, 16)
        assert weight.untyped_storage().data_ptr() == linear.weight.untyped_storage().data_ptr()
        kept: list[Tensor] = []
        handle = linear.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
        seen = collect()
        with torch.no_grad(), observe(model, seen):
            model(ids)
        handle.remove()
        total = torch.einsum("bhqd,hde->bqe", seen.calls[0].z, weight) + linear.bias
        torch.testing.assert_close(total, kept[0], rtol=1e-5, atol=1e-6)


def test_something_between_the_heads_and_the_projection_is_named() -> None:
    from transformers import BitNetConfig, BitNetModel

    config = BitNetConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model = BitNetModel(config).eval()
    block = next(iter(discover(model).blocks.values()))
    assert block.o is None
    assert block.o_path is None
    assert (
        "attn_sub_norm (BitNetRMSNorm) stands between the heads and the output projection" in dict(block.unknown)["o"]
    )
    with pytest.raises(ModelError, match="stands between"):
        output_weight(model, block)


def test_an_adapter_on_the_output_projection_is_named() -> None:
    """Its weight alone would not be what the heads are multiplied by."""

    class Adapted(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.base_layer(hidden) + self.up(self.down(hidden))

    model = LlamaModel(LlamaConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4)).eval()
    model.layers[0].self_attn.o_proj = Adapted(model.layers[0].self_attn.o_proj)
    block = next(iter(discover(model).blocks.values()))
    assert block.o is None
    assert "an adapter on layers.0.self_attn.o_proj stands between" in dict(block.unknown)["o"]


def test_half_precision_is_judged_by_its_own_rounding() -> None:
    config = LlamaConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4)
    for dtype in (torch.bfloat16, torch.float16):
        layout = discover(LlamaModel(config).eval().to(dtype))
        assert dict(layout.facts) == {"masks": "compact"}


def test_stacks_kinds_and_labels(tiny_t5: nn.Module) -> None:
    keys = [(site.key.stack, site.key.kind, site.layer, site.causal) for site in discover(tiny_t5).sites]
    assert keys == [
        ("encoder", "self", 0, False),
        ("encoder", "self", 1, False),
        ("decoder", "self", 0, True),
        ("decoder", "cross", 0, False),
        ("decoder", "self", 1, True),
        ("decoder", "cross", 1, False),
    ]


def test_sites_have_names_for_people(tiny_albert: nn.Module) -> None:
    names = [str(site.key) for site in discover(tiny_albert).sites]
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert names == [path, f"{path}@1", f"{path}@2"]
    assert discover(tiny_albert).site(SiteKey("encoder", "self", path, 2)).layer == 2


def test_a_model_is_probed_once(tiny_bert: nn.Module, ids: Tensor) -> None:
    passes: list[int] = []
    tiny_bert.register_forward_pre_hook(lambda module, args: passes.append(1))
    first = discover(tiny_bert)
    count = len(passes)
    assert discover(tiny_bert) is first
    assert len(passes) == count
    discover(tiny_bert, {"input_ids": ids})
    assert len(passes) > count
    forget(tiny_bert)
    assert discover(tiny_bert) == first


def test_an_example_that_does_not_run(tiny_bert: nn.Module) -> None:
    with pytest.raises(
        InputError,
        match=r"does not run on the example \(input_ids \(1, 2\)\): IndexError.*give the keyword arguments of a small "
        r"forward pass that it runs on \(example= in Python, --inputs FILE on the command line\)",
    ):
        discover(tiny_bert, {"input_ids": torch.tensor([[3, 31]])})


def test_a_model_that_needs_an_example_of_its_own() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = BertModel(BertConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens).last_hidden_state

    model = Wrapped().eval()
    with pytest.raises(UnsupportedError, match=r"no transformers config.*example= in Python, --inputs FILE"):
        discover(model)
    layout = discover(model, {"tokens": torch.tensor([[3, 5, 7]])})
    assert [site.key.module for site in layout.sites] == ["inner.encoder.layer.0.attention.self"]


def test_modules_that_the_example_does_not_reach_are_listed(tiny_t5: nn.Module, ids: Tensor) -> None:
    layout = discover(tiny_t5.encoder, {"input_ids": ids})
    assert layout.uncovered == ()
    import zoo
    from transformers import CLIPConfig, CLIPModel

    clip = CLIPModel(zoo.small_config(CLIPConfig)).eval()

    class TextOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = clip

        def forward(self, input_ids: Tensor) -> Any:
            return self.clip.text_model(input_ids)

    layout = discover(TextOnly(), {"input_ids": ids})
    assert {path.split(".")[1] for path, _ in layout.uncovered} == {"vision_model"}
    assert all("was not called on the example input" in why for _, why in layout.uncovered)


# --- what is not understood is refused, never measured ---


def patched(monkeypatch: pytest.MonkeyPatch, change: Any) -> nn.Module:
    """A small Llama whose own eager attention is changed by ``change(scores, kwargs)``."""
    from transformers.models.llama import modeling_llama

    def eager_attention_forward(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, dropout: float = 0.0, **kwargs: Any
    ) -> Any:
        scores = query @ modeling_llama.repeat_kv(key, module.num_key_value_groups).transpose(2, 3) * scaling
        scores = change(scores, kwargs)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        output = weights @ modeling_llama.repeat_kv(value, module.num_key_value_groups)
        return output.transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    config = LlamaConfig(
        **SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"
    )
    return LlamaModel(config).eval()


def test_a_rule_that_does_not_pass_through_the_seam_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(monkeypatch, lambda scores, kwargs: scores * 1.7)
    with pytest.raises(
        UnsupportedError,
        match=r"layers.0.self_attn: its own attention \('eager'\) and headwise differ by .*measured wrongly",
    ):
        discover(model)


def test_an_unknown_argument_that_the_model_reads_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, ids: Tensor
) -> None:
    model = patched(monkeypatch, lambda scores, kwargs: scores / kwargs.get("temperature", 1.0))
    discover(model)
    with pytest.raises(UnsupportedError, match="passes the argument 'temperature' to its attention function"):
        discover(model, {"input_ids": ids, "temperature": 1.0})


def test_an_unknown_argument_that_nothing_reads_is_harmless(ids: Tensor) -> None:
    model = LlamaModel(LlamaConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4)).eval()
    assert len(discover(model, {"input_ids": ids, "temperature": 1.0}).sites) == 1


def test_a_model_that_needs_its_weights_gets_them(monkeypatch: pytest.MonkeyPatch, ids: Tensor, collect: Any) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaAttention.forward
    model = patched(monkeypatch, lambda scores, kwargs: scores)

    def with_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = forward(self, *args, **kwargs)
        return output * weights.amax(), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", with_weights)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        assert "weights it needs" in dict(discover(model).facts)["output"]
        seen = collect()
        with observe(model, seen):
            torch.testing.assert_close(model(ids).last_hidden_state, plain)
    assert len(seen.calls) == 1


def test_a_model_that_computes_with_its_mask_gets_whole_masks(
    monkeypatch: pytest.MonkeyPatch, ids: Tensor, collect: Any
) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaAttention.forward

    def sliced(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :, :]
        return forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", sliced)
    model = LlamaModel(LlamaConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4)).eval()
    fact = dict(discover(model).facts)["masks"]
    assert fact.startswith("dense: the model computes with its attention mask (it uses '__getitem__')")
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        model(ids, attention_mask=mask)
    assert seen.calls[0].answer.rows.visible[0, 0].tolist() == [0, 0, 1, 2, 3, 4, 5]


def test_a_model_whose_implementations_disagree_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(monkeypatch, lambda scores, kwargs: scores * 3)
    model.set_attn_implementation("sdpa")
    assert "gives other numbers under 'eager'" in dict(discover(model).facts)["implementations"]

"""Modules in memory: taken as they are, unwrapped where that is exact, refused where it would not be."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tiny_models import bert_config, llama_config, word_tokenizer
from torch import nn
from transformers import BertModel, LlamaForCausalLM

from headwise.errors import HeadwiseError, InputError, ModelError, UnsupportedError
from headwise.models import load, wrap


def refusal(module: object, kind: type[HeadwiseError]) -> str:
    with pytest.raises(kind) as caught:
        wrap(module)  # type: ignore[arg-type]
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(bert_config())


def test_nothing_is_changed(bert: BertModel) -> None:
    bert.train()
    held = copy.deepcopy(bert.state_dict())
    model = wrap(bert, word_tokenizer(), name="mine")
    assert model.module is bert
    assert bert.training
    assert (model.name, model.source.kind, model.source.path) == ("mine", "memory", None)
    assert all(torch.equal(held[name], value) for name, value in bert.state_dict().items())
    assert wrap(bert).name == "BertModel"
    assert wrap(bert).tokenizer_note == "none was given to wrap"


def test_plain_module_can_be_wrapped() -> None:
    """Whether it has heads shows when they are looked for."""
    model = wrap(nn.Sequential(nn.Linear(3, 5), nn.ReLU()))
    assert model.config is None
    with pytest.raises(UnsupportedError):
        _ = model.layout


def test_a_string_goes_to_load() -> None:
    assert "a path or hub id goes to load" in refusal("bert", InputError)


def test_other_things() -> None:
    class Pipeline:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

    assert "give its .model (Linear)" in refusal(Pipeline(nn.Linear(1, 1)), InputError)
    assert "a NoneType was given" in refusal(None, InputError)


def test_a_model_needs_no_wrapping(bert: BertModel) -> None:
    assert "needs no wrapping" in refusal(wrap(bert), InputError)


@pytest.mark.parametrize("example", [[1, 2], {}, {"input_ids": [1, 2]}])
def test_example_must_be_tensors(bert: BertModel, example: object) -> None:
    with pytest.raises(InputError, match="example must be a mapping"):
        wrap(bert, example=example)  # type: ignore[arg-type]


def test_compiled_module_is_unwrapped(bert: BertModel) -> None:
    model = wrap(torch.compile(bert, backend="eager"))
    assert model.module is bert
    assert any("was compiled" in note for note in model.notes)
    assert model.source.weight_hash == wrap(bert).source.weight_hash


def test_module_compiled_in_place(bert: BertModel) -> None:
    bert.encoder.layer[1].compile(backend="eager")
    assert "encoder.layer.1: was compiled in place" in refusal(bert, UnsupportedError)


def test_part_compiled(bert: BertModel) -> None:
    bert.encoder.layer[0] = torch.compile(bert.encoder.layer[0], backend="eager")
    assert "was compiled in place" in refusal(bert, UnsupportedError)


def test_forward_compiled(bert: BertModel) -> None:
    bert.forward = torch.compile(bert.forward, backend="eager")
    assert "its forward was compiled in place" in refusal(bert, UnsupportedError)


def test_data_parallel(bert: BertModel) -> None:
    assert "DataParallel" in refusal(nn.DataParallel(bert), UnsupportedError)
    assert "module.module" in refusal(nn.DataParallel(bert), UnsupportedError)


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DistributedDataParallel", "DeepSpeedEngine"])
def test_sharded(name: str) -> None:
    kind = type(name, (nn.Module,), {})
    assert f"wrapped in {name}" in refusal(kind(), UnsupportedError)


def test_traced() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    assert "traced or exported graph" in refusal(graph, UnsupportedError)


def test_meta_parameters() -> None:
    with torch.device("meta"):
        module = BertModel(bert_config())
    said = refusal(module, ModelError)
    assert "embeddings.word_embeddings.weight: has no values" in said


def test_lazy_parameters() -> None:
    assert "has no values yet" in refusal(nn.Sequential(nn.LazyLinear(3)), ModelError)


def test_peft_module(bert: BertModel) -> None:
    layer = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    bert.encoder.layer[1].attention.self.query = layer(20, 20)
    said = refusal(bert, UnsupportedError)
    assert "encoder.layer.1.attention.self.query: the model carries a PEFT adapter" in said
    assert "merge_and_unload()" in said


def test_peft_through_transformers(bert: BertModel) -> None:
    bert._hf_peft_config_loaded = True
    assert "PEFT adapter" in refusal(bert, UnsupportedError)


@pytest.mark.parametrize("home", ["bitsandbytes.nn.modules", "gptqmodel.nn_modules.qlinear", "awq.modules.linear"])
def test_quantised_layers(bert: BertModel, home: str) -> None:
    layer = type("Linear4bit", (nn.Linear,), {"__module__": home})
    bert.encoder.layer[0].output.dense = layer(23, 20)
    said = refusal(bert, UnsupportedError)
    assert f"Linear4bit of {home.split('.')[0]}" in said
    assert "dequantise" in said


def test_quantised_by_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 5)), {nn.Linear})
    assert "the weights are quantised" in refusal(module, UnsupportedError)


def test_quantised_by_config(bert: BertModel) -> None:
    bert.config.quantization_config = {"quant_method": "hqq"}
    assert "BertModel (hqq)" in refusal(bert, UnsupportedError)


def test_narrow_floats(bert: BertModel) -> None:
    held = bert.encoder.layer[0].output.dense
    held.weight = nn.Parameter(held.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert "output.dense.weight (float8_e4m3fn)" in refusal(bert, UnsupportedError)


def test_tensor_of_another_kind(bert: BertModel) -> None:
    class Packed(torch.Tensor):
        pass

    held = bert.encoder.layer[0].output.dense
    held.weight = nn.Parameter(held.weight.detach().as_subclass(Packed))
    assert "a Packed" in refusal(bert, UnsupportedError)


def test_split_tensors(bert: BertModel) -> None:
    kind = type("DTensor", (torch.Tensor,), {})
    held = bert.encoder.layer[0].output.dense
    whole = held.weight.detach().clone()
    held.weight = nn.Parameter(whole.as_subclass(kind))
    assert "output.dense.weight: is split over devices (DTensor)" in refusal(bert, UnsupportedError)
    held.weight = nn.Parameter(whole)
    held.weight.ds_id = 3
    assert "is split by DeepSpeed" in refusal(bert, UnsupportedError)


def test_parameters_on_two_devices(bert: BertModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bert.named_parameters

    class Elsewhere:
        is_meta = False
        device = torch.device("cuda:0")
        data = torch.zeros(1)
        dtype = torch.float32

        def is_floating_point(self) -> bool:
            return True

    monkeypatch.setattr(bert, "named_parameters", lambda: [*real(), ("pooler.extra", Elsewhere())])
    assert "pooler.extra on cuda:0); move the model to one" in refusal(bert, ModelError)


def test_sentence_transformers() -> None:
    kind = type("SentenceTransformer", (nn.Sequential,), {"__module__": "sentence_transformers.SentenceTransformer"})
    assert "wrap(model[0].auto_model, model.tokenizer)" in refusal(kind(), UnsupportedError)


def test_heads_that_kv_heads_do_not_divide_are_refused_in_memory_too() -> None:
    """Case 11: transformers builds a Llama with 4 query and 3 KV heads and fails only in forward."""
    config = llama_config(num_key_value_heads=3)
    model = wrap(LlamaForCausalLM(config))
    with pytest.raises(ModelError, match=r"4.*3"):
        _ = model.layout


def test_layout_is_found_once(bert: BertModel) -> None:
    model = wrap(bert)
    assert len(model.layout) == 2 * 5
    assert model.layout is model.layout


def test_repr_says_what_it_is(bert: BertModel) -> None:
    assert repr(wrap(bert, name="x")) == "Model('x', BertModel, float32 on cpu, without tokenizer)"


def test_load_points_to_wrap(bert: BertModel) -> None:
    with pytest.raises(InputError, match="a module goes to wrap"):
        load(bert)  # type: ignore[arg-type]

"""After a session the model is what it was, whatever ended the session (case 25)."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import GateError
from headwise.models import discover, gate, observe, probe, sessions
from headwise.models.restore import configs_of
from headwise.models.standin import StandIn


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a session might leave changed."""
    return {
        "implementations": [config._attn_implementation for config in configs_of(model)],
        "types": [type(config._attn_implementation) for config in configs_of(model)],
        "configs": [config.to_dict() for config in configs_of(model)],
        "hooks": [
            len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks)
            for part in model.modules()
        ],
        "training": [part.training for part in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grads": [parameter.grad for parameter in model.parameters()],
        "attributes": [sorted(vars(part)) for part in model.modules()],
        "buffers": [buffer.clone().tolist() for buffer in model.buffers()],
    }


@pytest.fixture
def half_frozen(tiny_llama: nn.Module) -> nn.Module:
    tiny_llama.train()
    tiny_llama.model.layers[1].eval()
    next(tiny_llama.parameters()).requires_grad_(False)
    return tiny_llama


def test_case_25_an_input_that_raises_in_layer_1(half_frozen: nn.Module, ids: Tensor, collector: Any) -> None:
    discover(half_frozen)
    before = state(half_frozen)
    half_frozen.eval()
    plain = half_frozen(ids).logits
    half_frozen.train()
    half_frozen.model.layers[1].eval()

    class BrokenError(Exception):
        pass

    class Failing:
        def want(self, site: Any, problem: Any) -> Any:
            if ".1." in site.key.module:
                raise BrokenError
            return collector.want(site, problem)

        def see(self, call: Any) -> None:
            collector.see(call)

    with pytest.raises(BrokenError), observe(half_frozen, Failing()):
        half_frozen(ids)
    assert len(collector.calls) == 1
    assert state(half_frozen) == before
    half_frozen.eval()
    assert torch.equal(half_frozen(ids).logits, plain)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit, GeneratorExit])
def test_every_exit_restores(half_frozen: nn.Module, ids: Tensor, collector: Any, error: type[BaseException]) -> None:
    discover(half_frozen)
    before = state(half_frozen)

    def ends() -> None:
        with gate(half_frozen, {"model.layers.0": [1]}), observe(half_frozen, collector):
            half_frozen(ids)
            raise error

    with pytest.raises(error):
        ends()
    assert state(half_frozen) == before


def test_discovery_leaves_nothing_behind(half_frozen: nn.Module) -> None:
    before = state(half_frozen)
    torch.manual_seed(7)
    discover(half_frozen)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
    assert state(half_frozen) == before


def test_a_probe_that_was_interrupted_while_it_let_go_takes_no_calls(
    tiny_bert: nn.Module, ids: Tensor, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe, "expel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            discover(tiny_bert)
    with observe(tiny_bert, collector):
        tiny_bert(ids)
    assert len(collector.calls) == len(discover(tiny_bert).sites)


def test_gates_that_were_interrupted_while_they_let_go_act_no_more(
    tiny_bert: nn.Module, ids: Tensor, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with observe(tiny_bert, collector):
        plain = tiny_bert(ids).last_hidden_state
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "expel", interrupted)
        with pytest.raises(KeyboardInterrupt), gate(tiny_bert, {next(iter(discover(tiny_bert).blocks)): [0, 1]}):
            assert not torch.equal(tiny_bert(ids).last_hidden_state, plain)
    with observe(tiny_bert, collector):
        assert torch.equal(tiny_bert(ids).last_hidden_state, plain)


def test_a_generator_that_is_closed_restores(tiny_bert: nn.Module, ids: Tensor, collector: Any) -> None:
    before = state(tiny_bert)

    def steps() -> Any:
        with observe(tiny_bert, collector):
            yield tiny_bert(ids)
            yield tiny_bert(ids)

    running = steps()
    next(running)
    assert isinstance(tiny_bert.config._attn_implementation, StandIn)
    running.close()
    assert state(tiny_bert) == before


def test_sessions_of_two_models_with_one_config_may_end_in_any_order(ids: Tensor, collect: Any) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=31, hidden_size=20, num_hidden_layers=1, num_attention_heads=4, intermediate_size=23)
    first, second = BertModel(config).eval(), BertModel(config).eval()
    assert first.config is second.config
    one, two = collect(), collect()
    session = observe(first, one)
    session.__enter__()
    other = observe(second, two)
    other.__enter__()
    session.__exit__(None, None, None)
    with torch.no_grad():
        second(ids)
        first(ids)
    other.__exit__(None, None, None)
    assert (len(one.calls), len(two.calls)) == (0, 1)
    assert type(config._attn_implementation) is str
    assert config._attn_implementation == "sdpa"


def test_another_model_with_the_same_config_is_left_alone(ids: Tensor, collect: Any) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=31, hidden_size=20, num_hidden_layers=1, num_attention_heads=4, intermediate_size=23)
    first, second = BertModel(config).eval(), BertModel(config).eval()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    with torch.no_grad():
        plain = second(ids, attention_mask=mask).last_hidden_state
        with gate(first, {"encoder.layer.0": [0, 1, 2, 3]}):
            first(ids)
            assert torch.equal(second(ids, attention_mask=mask).last_hidden_state, plain)


def test_a_copy_made_inside_a_session_keeps_working_afterwards(
    tiny_bert: nn.Module, ids: Tensor, collector: Any
) -> None:
    with torch.no_grad():
        plain = tiny_bert(ids).last_hidden_state
        with observe(tiny_bert, collector):
            twin = copy.deepcopy(tiny_bert)
        assert torch.equal(twin(ids).last_hidden_state, plain)
        assert collector.calls == []


@pytest.mark.parametrize("nested", [False, True])
def test_a_copy_made_inside_a_session_is_the_model_alone(
    tiny_llama: nn.Module, ids: Tensor, collector: Any, nested: bool
) -> None:
    """Of the whole model and of a part: no hooks, no stand-ins, no wrapped checkpointing."""
    tiny_llama.activation_checkpointing_enable()
    before, layer = state(tiny_llama), state(tiny_llama.model.layers[0])
    inner = observe(tiny_llama, collector) if nested else nullcontext()
    with gate(tiny_llama, {"model.layers.0": [1]}), inner:
        twin, part = copy.deepcopy(tiny_llama), copy.deepcopy(tiny_llama.model.layers[0])
        again = pickle.loads(pickle.dumps(tiny_llama.config))
        assert state(twin) == before
        assert state(part) == layer
        assert type(again._attn_implementation) is str
    functions = [
        [vars(part).get("_gradient_checkpointing_func") for part in one.modules()] for one in (twin, tiny_llama)
    ]
    assert functions[0] == functions[1]
    assert state(tiny_llama) == before


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_own_implementation_comes_back(ids: Tensor, collector: Any, implementation: str) -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(
        GPT2Config(n_layer=2, n_head=4, n_embd=20, vocab_size=31, attn_implementation=implementation)
    ).eval()
    with torch.no_grad(), observe(model, collector):
        model(ids)
        assert model.config._attn_implementation == implementation
        assert type(model.config._attn_implementation) is StandIn
    assert type(model.config._attn_implementation) is str
    assert model.config._attn_implementation == implementation
    assert len(collector.calls) == 2


def test_the_dtype_of_a_gate_that_fails_leaves_no_trace(tiny_bert: nn.Module, ids: Tensor) -> None:
    discover(tiny_bert)
    before = state(tiny_bert)
    with pytest.raises(GateError), gate(tiny_bert, {"encoder.layer.0": [0]}, scale=torch.ones(5, 1)):
        tiny_bert(ids)
    assert state(tiny_bert) == before

"""Models of which a layer, or every layer, has no head left: measured, planned and pruned on (case 30)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

import headwise as hw
from headwise.errors import InputError, MeasureError
from headwise.models import discover
from headwise.surgery import prune
from tests.surgery import small

INPUTS = [{"input_ids": small.IDS}]
ALL = [0, 1, 2, 3]
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (small.bert, "encoder.layer.{}"),
    "gpt2": (small.gpt2, "transformer.h.{}"),
    "llama": (lambda: small.decoder("Llama"), "model.layers.{}"),
    "phi3": (lambda: small.decoder("Phi3"), "model.layers.{}"),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_case_30_a_scan_shows_the_layer_as_empty(name: str) -> None:
    """The heads of the other layer are measured as if the empty one had gates of zero."""
    make, path = MODELS[name]
    model = make()
    block = next(iter(discover(model).blocks))
    emptied = prune(model, {path.format(0): ALL}, repair="none")
    with hw.gate(model, {block: ALL}):
        truth = hw.scan(model, inputs=INPUTS)
    found = hw.scan(emptied, inputs=INPUTS)
    assert len(found) == 4
    torch.testing.assert_close(torch.tensor(found["entropy"]), torch.tensor(truth["entropy"][4:]), atol=1e-5, rtol=0)
    assert any(what == "empty" and block in said for what, said in emptied.layout.facts)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_without_heads_runs_under_either_attention(implementation: str) -> None:
    """GPT-BigCode's eager code multiplies matrices of one key-value head, and does not run without any."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(vocab_size=31, n_embd=16, n_layer=2, n_head=4, multi_query=True)
    model: Any = small.noisy(GPTBigCodeForCausalLM(config))
    emptied: Any = prune(model, {"transformer.h.1": ALL}, repair="none").module
    for one in (model, emptied):
        one.set_attn_implementation(implementation)
    truth = small.masked(model, {"transformer.h.1.attn": ALL}, input_ids=small.IDS, use_cache=False)
    assert small.apart(small.outputs(emptied, input_ids=small.IDS, use_cache=False), truth) <= 1e-5


@pytest.mark.parametrize("criterion", ["set-aware", "lazy", "michel", "weight-norm"])
def test_a_plan_for_a_model_with_an_empty_layer(criterion: str) -> None:
    emptied = prune(small.gpt2(), {"transformer.h.0": ALL}, repair="none")
    plan = hw.plan(emptied, inputs=INPUTS, keep=0.5, criterion=criterion)
    assert {path: len(heads) for path, heads in plan.removed.items()} == {"transformer.h.1.attn": 2}
    again = hw.prune(emptied, plan, repair="none")
    assert [block.query_heads for block in again.layout.blocks.values()] == [0, 2]


def test_a_model_without_any_head_is_refused_by_name() -> None:
    emptied = prune(small.gpt2(), {"transformer.h.0": ALL, "transformer.h.1": ALL}, repair="none")
    with pytest.raises(InputError, match="no head of the model may go: none is left in it"):
        hw.plan(emptied, criterion="weight-norm", keep=0.5)
    with pytest.raises(MeasureError, match="no head is left in it, so there is nothing to compare"):
        hw.redundancy(emptied, inputs=INPUTS)
    with pytest.raises(MeasureError, match="no attention was computed"):
        hw.scan(emptied, inputs=INPUTS)


def test_an_interrupt_leaves_nothing_behind() -> None:
    """No mode stays on torch's stack, whatever ends a pass through a layer without heads."""
    emptied: Any = prune(small.decoder("Llama"), {"model.layers.0": ALL}, repair="none").module
    attention = emptied.model.layers[0].self_attn
    expected = small.outputs(emptied, **INPUTS[0])

    def interrupted(_hidden: Any) -> Any:
        raise KeyboardInterrupt

    attention.o_proj.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        emptied(**INPUTS[0])
    del attention.o_proj.forward
    assert _get_current_function_mode_stack() == []
    for again in (emptied, copy.deepcopy(emptied), pickle.loads(pickle.dumps(emptied))):
        assert small.apart(small.outputs(again, **INPUTS[0]), expected) == 0
    assert copy.deepcopy(emptied).model.layers[0].self_attn.forward.__wrapped__.__self__ is not attention

"""Gates act where they say, refuse what they cannot do, and let gradients through."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

import headwise as hw
from headwise.errors import GateError, UnsupportedError
from headwise.layout import HeadId, SiteKey
from headwise.models import discover, gate, observe, output_weight

BERT_0 = "encoder.layer.0.attention.self"


def hidden(model: nn.Module, ids: Tensor, **extra: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **extra)[0]


def test_case_26_head_1_of_layer_0_equals_zeroed_columns(tiny_bert: nn.Module, ids: Tensor) -> None:
    plain = hidden(tiny_bert, ids)
    changed = copy.deepcopy(tiny_bert)
    with torch.no_grad():
        changed.encoder.layer[0].attention.output.dense.weight[:, 5:10] = 0
    with gate(tiny_bert, {"encoder.layer.0": [1]}):
        gated = hidden(tiny_bert, ids)
    torch.testing.assert_close(gated, hidden(changed, ids), rtol=0, atol=1e-6)
    assert (gated - plain).abs().max() > 1e-4
    assert torch.equal(hidden(tiny_bert, ids), plain)


def test_case_26_head_mask_changes_nothing_in_transformers(tiny_bert: nn.Module, ids: Tensor) -> None:
    """Why the gate does not rely on it."""
    mask = torch.zeros(2, 4)
    assert torch.equal(hidden(tiny_bert, ids, head_mask=mask), hidden(tiny_bert, ids))


def test_case_26_all_heads_off_leave_the_output_bias(tiny_bert: nn.Module, ids: Tensor) -> None:
    output = tiny_bert.encoder.layer[0].attention.output
    discover(tiny_bert)
    kept: list[Tensor] = []
    handle = output.dense.register_forward_hook(lambda module, args, result: kept.append(result))
    with gate(tiny_bert, {"encoder.layer.0": [0, 1, 2, 3]}):
        hidden(tiny_bert, ids)
    handle.remove()
    torch.testing.assert_close(kept[0], output.dense.bias.expand_as(kept[0]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "heads",
    [
        {BERT_0: [1]},
        {"encoder.layer.0": (1,)},
        {"encoder.layer.0.attention": torch.tensor([1])},
        {SiteKey("encoder", "self", BERT_0): {1: 0.0}},
        {"encoder.layer.0": torch.tensor([1.0, 0.0, 1.0, 1.0])},
        {"encoder.layer.0": torch.tensor([[1.0, 0.0, 1.0, 1.0]] * 2)},
        [HeadId(SiteKey("encoder", "self", BERT_0), 1)],
        {HeadId(SiteKey("encoder", "self", BERT_0), 1): 0.0},
    ],
)
def test_every_way_to_name_a_head_says_the_same(tiny_bert: nn.Module, ids: Tensor, heads: Any) -> None:
    with gate(tiny_bert, {BERT_0: [1]}):
        expected = hidden(tiny_bert, ids)
    with gate(tiny_bert, heads):
        assert torch.equal(hidden(tiny_bert, ids), expected)


def test_scales_per_example(tiny_bert: nn.Module, ids: Tensor) -> None:
    plain = hidden(tiny_bert, ids)
    with gate(tiny_bert, {BERT_0: [1]}):
        off = hidden(tiny_bert, ids)
    with gate(tiny_bert, {BERT_0: [1]}, scale=torch.tensor([[0.0], [1.0]])):
        mixed = hidden(tiny_bert, ids)
    assert torch.equal(mixed[0], off[0])
    assert torch.equal(mixed[1], plain[1])


def test_a_tensor_of_scales_covers_the_named_heads_in_order(tiny_bert: nn.Module, ids: Tensor) -> None:
    other = "encoder.layer.1.attention.self"
    with gate(tiny_bert, {BERT_0: {3: 0.25, 0: 0.5}, other: {2: 2.0}}):
        expected = hidden(tiny_bert, ids)
    with gate(tiny_bert, {BERT_0: [3, 0], other: [2]}, scale=torch.tensor([0.25, 0.5, 2.0])):
        assert torch.equal(hidden(tiny_bert, ids), expected)


def test_two_gates_multiply(tiny_bert: nn.Module, ids: Tensor) -> None:
    with gate(tiny_bert, {BERT_0: [1]}, scale=0.15):
        expected = hidden(tiny_bert, ids)
    with gate(tiny_bert, {BERT_0: [1]}, scale=0.5), gate(tiny_bert, {BERT_0: [1]}, scale=0.3):
        torch.testing.assert_close(hidden(tiny_bert, ids), expected)


def test_gradients_flow_to_the_scales(tiny_llama: nn.Module, ids: Tensor) -> None:
    """Case 21: the gradient is <z, d loss / d z>, checked by a finite difference, and there again on a second round."""
    tiny_llama.double()
    site = "model.layers.0.self_attn"
    for _ in range(2):
        scale = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        with gate(tiny_llama, {site: scale}):
            tiny_llama(ids).logits.square().sum().backward()
        assert scale.grad is not None
        assert bool((scale.grad != 0).all())
    step = 1e-2
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            moved = torch.ones(2, 4, dtype=torch.float64)
            moved[1, 2] += sign * step
            with gate(tiny_llama, {site: moved}):
                losses.append(tiny_llama(ids).logits.square().sum().item())
    assert scale.grad[1, 2].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=2e-3)


def test_train_mode_and_dropout_are_the_models_own(ids: Tensor) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=31, hidden_size=20, num_hidden_layers=2, num_attention_heads=4, intermediate_size=23)
    model = BertModel(config).train()
    discover(model)
    torch.manual_seed(3)
    plain = model(ids).last_hidden_state
    torch.manual_seed(3)
    with gate(model, {BERT_0: [1]}, scale=1.0):
        assert torch.equal(model(ids).last_hidden_state, plain)


def test_generation_with_a_gate_equals_zeroed_columns_at_every_step(tiny_llama: nn.Module, ids: Tensor) -> None:
    changed = copy.deepcopy(tiny_llama)
    layout = discover(tiny_llama)
    block = layout.blocks["model.layers.0.self_attn"]
    with torch.no_grad():
        output_weight(changed, block)[3] = 0
    arguments = {
        "max_new_tokens": 5,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    expected = changed.generate(ids, **arguments)
    with gate(tiny_llama, {"model.layers.0": [3]}) as session:
        gated = tiny_llama.generate(ids, **arguments)
    assert session.forwards == 5
    assert torch.equal(gated.sequences, expected.sequences)
    for left, right in zip(gated.logits, expected.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_encoder_decoder_generation(tiny_t5: nn.Module, ids: Tensor) -> None:
    layout = discover(tiny_t5)
    cross = next(site.key for site in layout.sites if site.key.kind == "cross")
    changed = copy.deepcopy(tiny_t5)
    with torch.no_grad():
        output_weight(changed, layout.block_of(cross))[2] = 0
    arguments = {"max_new_tokens": 4, "do_sample": False}
    with gate(tiny_t5, {cross: [2]}):
        gated = tiny_t5.generate(ids, **arguments)
    assert torch.equal(gated, changed.generate(ids, **arguments))


def test_albert_has_one_gate_per_call(tiny_albert: nn.Module, ids: Tensor) -> None:
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    outputs = []
    for call in range(3):
        with gate(tiny_albert, {f"{path}@{call}": [1]}):
            outputs.append(hidden(tiny_albert, ids))
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    changed = copy.deepcopy(tiny_albert)
    layout = discover(tiny_albert)
    with torch.no_grad():
        output_weight(changed, layout.blocks[path])[1] = 0
    with gate(tiny_albert, {SiteKey("encoder", "self", path, call): [1] for call in range(3)}):
        torch.testing.assert_close(hidden(tiny_albert, ids), hidden(changed, ids), rtol=0, atol=1e-6)


def checkpointed(module: nn.Module, *, reentrant: bool) -> None:
    """Checkpoint a module as transformers' GradientCheckpointingLayer does."""
    forward = module.forward
    module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)
    module.forward = lambda *args, **kwargs: module._gradient_checkpointing_func(partial(forward, **kwargs), *args)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_gets_the_gate_of_its_own_ordinal(
    tiny_albert: nn.Module, ids: Tensor, reentrant: bool
) -> None:
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    discover(tiny_albert)

    def gradients(model: nn.Module) -> tuple[list[Tensor], Tensor]:
        model.zero_grad()
        scale = torch.tensor([0.2, 0.4, 0.7, 1.3], requires_grad=True)
        heads = {SiteKey("encoder", "self", path, 0): scale, SiteKey("encoder", "self", path, 2): scale.detach() * 2}
        with gate(model, heads):
            model(ids).last_hidden_state.square().sum().backward()
        assert scale.grad is not None
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], scale.grad

    plain, plain_scale = gradients(tiny_albert)
    checkpointed(tiny_albert.encoder.albert_layer_groups[0], reentrant=reentrant)
    again, again_scale = gradients(tiny_albert)
    torch.testing.assert_close(again_scale, plain_scale, rtol=1e-5, atol=1e-6)
    for left, right in zip(again, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_the_users_own_is_refused_where_calls_cannot_be_told(
    tiny_albert: nn.Module, ids: Tensor
) -> None:
    layer = tiny_albert.encoder.albert_layer_groups[0].albert_layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    with pytest.raises(UnsupportedError, match="which one cannot be told"), gate(tiny_albert, {f"{path}@1": [1]}):
        tiny_albert(ids).last_hidden_state.sum().backward()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(
    tiny_llama: nn.Module, ids: Tensor, reentrant: bool, own: bool
) -> None:
    """With transformers' own switch, and with a checkpoint that the user wrote."""
    discover(tiny_llama)
    tiny_llama.train()

    def gradients() -> tuple[list[Tensor], Tensor]:
        tiny_llama.zero_grad()
        scale = torch.tensor([0.2, 0.4, 0.7, 1.3], requires_grad=True)
        with gate(tiny_llama, {"model.layers.1": scale}):
            tiny_llama(ids, labels=ids, use_cache=False).loss.backward()
        assert scale.grad is not None
        return [
            parameter.grad.clone() for parameter in tiny_llama.parameters() if parameter.grad is not None
        ], scale.grad

    plain, plain_scale = gradients()
    if own:
        tiny_llama.activation_checkpointing_enable({"use_reentrant": reentrant})
    else:
        for layer in tiny_llama.model.layers:
            forward = layer.forward
            layer.forward = partial(_through_checkpoint, forward, reentrant)
    again, again_scale = gradients()
    torch.testing.assert_close(again_scale, plain_scale, rtol=1e-5, atol=1e-7)
    for left, right in zip(again, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def _through_checkpoint(forward: Any, reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)


def test_a_backward_pass_after_the_gate_under_checkpointing_is_refused(tiny_llama: nn.Module, ids: Tensor) -> None:
    discover(tiny_llama)
    tiny_llama.activation_checkpointing_enable({"use_reentrant": False})
    tiny_llama.train()
    with gate(tiny_llama, {"model.layers.0": [1]}):
        loss = tiny_llama(ids, labels=ids).loss
    with pytest.raises(Exception, match="call backward\\(\\) inside the 'with' block"):
        loss.backward()


@pytest.mark.parametrize(
    ("heads", "scale", "message"),
    [
        (
            {"encoder.layer.7": [0]},
            0.0,
            "no attention at 'encoder.layer.7'; did you mean encoder.layer.1.attention.self, encoder.layer.0",
        ),
        ({"layer.0": [0]}, 0.0, "did you mean encoder.layer.0.attention.self"),
        ({"encoder.layer": [0]}, 0.0, "names 2 sites"),
        ({"encoder.layer.0": [4]}, 0.0, "there is no head 4; it has the heads 0 to 3"),
        ({"encoder.layer.0": [-1]}, 0.0, "there is no head -1"),
        ({"encoder.layer.0": [1, 1]}, 0.0, "named twice"),
        ({"encoder.layer.0": [1], BERT_0: [2]}, 0.0, "named twice"),
        ({"encoder.layer.0": [True]}, 0.0, "counted from 0, got True"),
        ({"encoder.layer.0": ["1"]}, 0.0, "counted from 0, got '1'"),
        ({"encoder.layer.0": [1.0]}, 0.0, "counted from 0, got 1.0"),
        (
            {"encoder.layer.0": torch.tensor([True, False, True, True])},
            0.0,
            "does not say whether True keeps or removes",
        ),
        ({"encoder.layer.0": torch.ones(3)}, 0.0, r"scales of shape \(3,\) for 4 heads"),
        ({"encoder.layer.0": [1]}, torch.ones(2), r"shape \(2,\), but 1 heads are named"),
        ({"encoder.layer.0": [1]}, "off", "must be a number or a tensor"),
        ({}, 0.0, "no heads were named"),
        ({"encoder.layer.0": []}, 0.0, "no heads were named"),
        ("encoder.layer.0", 0.0, "must be a mapping"),
        ({3: [1]}, 0.0, "named by its module path or a SiteKey, got int"),
    ],
)
def test_refusals_name_what_is_wrong(tiny_bert: nn.Module, heads: Any, scale: Any, message: str) -> None:
    with pytest.raises(GateError, match=message), gate(tiny_bert, heads, scale=scale):
        pass


def test_a_prefix_of_self_and_cross_attention_is_ambiguous(tiny_t5: nn.Module) -> None:
    with (
        pytest.raises(
            GateError, match=r"decoder.block.0.layer.0.SelfAttention@0 \(self\), .*EncDecAttention@0 \(cross\)"
        ),
        gate(tiny_t5, {"decoder.block.0": [1]}),
    ):
        pass


def test_gates_for_another_batch_are_refused(tiny_bert: nn.Module, ids: Tensor) -> None:
    message = "gates for 3 examples, but the call has a batch of 2"
    with pytest.raises(GateError, match=message), gate(tiny_bert, {BERT_0: [1]}, scale=torch.zeros(3, 1)):
        tiny_bert(ids)


def test_a_gate_that_never_acted_raises(tiny_t5: nn.Module, ids: Tensor) -> None:
    with pytest.raises(GateError, match="never acted"), gate(tiny_t5, {"decoder.block.0.layer.0": [1]}):
        tiny_t5.encoder(ids)


def test_a_gate_that_never_acted_does_not_hide_another_error(tiny_t5: nn.Module, ids: Tensor) -> None:

    def ends() -> None:
        with gate(tiny_t5, {"decoder.block.0.layer.0": [1]}):
            tiny_t5.encoder(ids)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ends()


def test_a_model_that_did_not_run_is_no_error(tiny_bert: nn.Module) -> None:
    with gate(tiny_bert, {BERT_0: [1]}) as session:
        pass
    assert session.forwards == 0


def test_an_observer_sees_z_before_and_after_the_gate(tiny_bert: nn.Module, ids: Tensor, collector: Any) -> None:
    for order in (0, 1):
        collector.calls.clear()
        with torch.no_grad():
            if order:
                with gate(tiny_bert, {BERT_0: [1]}, scale=0.5), observe(tiny_bert, collector):
                    tiny_bert(ids)
            else:
                with observe(tiny_bert, collector), gate(tiny_bert, {BERT_0: [1]}, scale=0.5):
                    tiny_bert(ids)
        call = collector.calls[0]
        torch.testing.assert_close(call.z[:, 1], call.answer.z[:, 1] * 0.5)
        torch.testing.assert_close(call.z[:, 0], call.answer.z[:, 0])


def test_heads_of_a_table_and_scales_that_are_no_numbers() -> None:
    """The best heads of a table can be gated as they are; a scale of NaN is refused."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=24, intermediate_size=29, num_hidden_layers=2, num_attention_heads=4, vocab_size=53
    )
    module = LlamaModel(config).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    best = hw.scan(hw.wrap(module), inputs=[{"input_ids": ids}]).top("entropy", 3)
    with torch.no_grad():
        with hw.gate(module, best):
            by_rows = module(input_ids=ids).last_hidden_state
        with hw.gate(module, best.heads):
            by_heads = module(input_ids=ids).last_hidden_state
    assert torch.equal(by_rows, by_heads)
    for scale in (float("nan"), torch.tensor([1.0, float("inf"), 0.0])):
        with (
            pytest.raises(GateError, match="scale holds a value that is not finite"),
            hw.gate(module, best, scale=scale),
        ):
            pass

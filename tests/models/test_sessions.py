"""What an observer is told, and how the seam treats caches, threads, dropout and nesting."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import InputError, ModelError, UnsupportedError
from headwise.kernels import Wanted
from headwise.models import discover, gate, observe


@pytest.mark.parametrize("which", ["tiny_llama", "tiny_bert"])
def test_case_17_the_default_implementation_gives_true_weights(
    request: Any, ids: Tensor, collector: Any, which: str
) -> None:
    """2 x 4 finite values that equal the eager model's, and the setting is sdpa again afterwards."""
    model = request.getfixturevalue(which)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad(), observe(model, collector):
        model(ids)
    assert type(model.config._attn_implementation) is str
    assert model.config._attn_implementation == "sdpa"
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(ids, output_attentions=True).attentions
    mean = torch.stack([call.answer.rows.entropy.mean(dim=(0, 2)) for call in collector.calls])
    expected = torch.stack([-torch.special.xlogy(w, w).sum(-1).mean(dim=(0, 2)) for w in weights])
    assert mean.shape == (2, 4)
    assert bool(torch.isfinite(mean).all())
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5)


def test_the_weights_themselves(tiny_llama: nn.Module, ids: Tensor, collect: Any) -> None:
    seen = collect(Wanted(weights=True))
    eager = copy.deepcopy(tiny_llama)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        with observe(tiny_llama, seen):
            tiny_llama(ids)
        for call, weights in zip(seen.calls, eager(ids, output_attentions=True).attentions, strict=True):
            torch.testing.assert_close(call.answer.weights, weights, rtol=1e-4, atol=1e-5)


def test_case_23_generation_gives_rows_of_growing_width(tiny_llama: nn.Module, ids: Tensor, collect: Any) -> None:
    """Prompt 3, 3 new: (1,4,3,3), (1,4,1,4), (1,4,1,5); joined, 5 query rows."""
    seen = collect(Wanted(weights=True, rows=True))
    with observe(tiny_llama, seen) as session:
        tiny_llama.generate(ids[:1, :3], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert session.forwards == 3
    first = [call for call in seen.calls if call.site.layer == 0]
    assert [tuple(call.answer.weights.shape) for call in first] == [(1, 4, 3, 3), (1, 4, 1, 4), (1, 4, 1, 5)]
    assert [call.forward for call in first] == [0, 1, 2]
    assert all(call.site.key.call == 0 for call in seen.calls)
    visible = torch.cat([call.answer.rows.visible[0, 0] for call in first])
    assert visible.tolist() == [1, 2, 3, 4, 5]


def test_case_14_a_left_padded_prompt_attends_as_if_alone(tiny_llama: nn.Module, ids: Tensor, collect: Any) -> None:
    """At every cached step the rows of the short prompt equal those of its own run."""
    prompt = ids[:1, :2]
    batch = torch.cat([torch.cat([torch.zeros(1, 2, dtype=torch.long), prompt], dim=1), ids[1:, :4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    alone, together = collect(), collect()
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with observe(tiny_llama, alone):
        single = tiny_llama.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
    with observe(tiny_llama, together):
        both = tiny_llama.generate(batch, attention_mask=mask, **arguments)
    assert torch.equal(both[0, 4:], single[0, 2:])
    for left, right in zip(alone.calls, together.calls, strict=True):
        rows, other = left.answer.rows, right.answer.rows
        start = other.entropy.shape[2] - rows.entropy.shape[2]
        torch.testing.assert_close(other.entropy[:1, :, start:], rows.entropy, rtol=0, atol=1e-5)
        torch.testing.assert_close(other.max_weight[:1, :, start:], rows.max_weight, rtol=0, atol=1e-5)
        assert torch.equal(other.visible.expand(2, -1, -1)[0, 0, start:], rows.visible.expand(1, -1, -1)[0, 0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_caches_of_every_kind(tiny_llama: nn.Module, ids: Tensor, collect: Any, cache: str) -> None:
    """A static cache has unwritten keys, which no row may see."""
    arguments: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    if cache == "static":
        arguments |= {"cache_implementation": "static", "disable_compile": True}
    seen = collect()
    plain = tiny_llama.generate(ids[:, :3], **arguments)
    with observe(tiny_llama, seen):
        assert torch.equal(tiny_llama.generate(ids[:, :3], **arguments), plain)
    first = [call.answer.rows.visible for call in seen.calls if call.site.layer == 0]
    assert [int(rows.max()) for rows in first] == [3, 4, 5, 6]


def test_case_8_a_window_has_w_keys_also_with_a_cache(collect: Any) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=31,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=29,
        sliding_window=4,
    )
    model = MistralForCausalLM(config).eval()
    seen = collect()
    with observe(model, seen):
        model.generate(torch.arange(3, 13)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert seen.calls[0].site.window == 4
    assert seen.calls[0].answer.rows.visible[0, 0].tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert [call.answer.rows.visible[0, 0].tolist() for call in seen.calls[1:]] == [[4], [4]]


def test_albert_calls_keep_their_ordinals(tiny_albert: nn.Module, ids: Tensor, collector: Any) -> None:
    with torch.no_grad(), observe(tiny_albert, collector):
        tiny_albert(ids)
        tiny_albert(ids)
    assert [(call.forward, call.site.key.call, call.site.layer) for call in collector.calls] == [
        (forward, call, call) for forward in (0, 1) for call in (0, 1, 2)
    ]
    assert len({call.block.module for call in collector.calls}) == 1


def test_an_interrupted_pass_does_not_shift_ordinals(tiny_albert: nn.Module, ids: Tensor, collector: Any) -> None:
    discover(tiny_albert)

    def stop(module: Any, args: Any, output: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), observe(tiny_albert, collector):
        handle = tiny_albert.encoder.albert_layer_groups[0].albert_layers[0].ffn.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            tiny_albert(ids)
        handle.remove()
        tiny_albert(ids)
    assert [call.site.key.call for call in collector.calls] == [0, 0, 1, 2]


def test_threads_have_passes_of_their_own(tiny_albert: nn.Module, ids: Tensor, collector: Any) -> None:
    discover(tiny_albert)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(5):
                    tiny_albert(ids)
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    with observe(tiny_albert, collector):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    passes: dict[int, list[int]] = {}
    for call in collector.calls:
        passes.setdefault(call.forward, []).append(call.site.key.call)
    assert sorted(passes) == list(range(15))
    assert all(calls == [0, 1, 2] for calls in passes.values())


def test_dropout_in_train_mode_is_the_models_own_and_rows_are_before_it(ids: Tensor, collect: Any) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=31, hidden_size=20, num_hidden_layers=1, num_attention_heads=4, intermediate_size=23)
    model = BertModel(config).train()
    seen = collect(Wanted(rows=True, weights=True))
    discover(model)
    torch.manual_seed(3)
    plain = model(ids).last_hidden_state
    torch.manual_seed(3)
    with observe(model, seen):
        assert torch.equal(model(ids).last_hidden_state, plain)
    call = seen.calls[0]
    torch.testing.assert_close(call.answer.weights.sum(-1), torch.ones(2, 4, 7))
    assert not torch.allclose(call.answer.weights @ call.problem.v, call.z)
    assert torch.equal(call.answer.z, call.z)


def test_gradients_of_an_observed_model_equal_its_own(tiny_llama: nn.Module, ids: Tensor, collector: Any) -> None:
    tiny_llama(ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in tiny_llama.parameters()]
    tiny_llama.zero_grad()
    with observe(tiny_llama, collector):
        tiny_llama(ids, labels=ids).loss.backward()
    for parameter, gradient in zip(tiny_llama.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_an_observer_that_wants_nothing_changes_no_bit(tiny_llama: nn.Module, ids: Tensor) -> None:
    class Uninterested:
        def want(self, site: Any, problem: Any) -> None:
            return None

        def see(self, call: Any) -> None:
            raise AssertionError

    with torch.no_grad():
        plain = tiny_llama(ids).logits
        with observe(tiny_llama, Uninterested()):
            assert torch.equal(tiny_llama(ids).logits, plain)


def test_nested_observers_both_see(tiny_llama: nn.Module, ids: Tensor, collect: Any) -> None:
    outer, inner = collect(), collect(Wanted(weights=True))
    with torch.no_grad(), observe(tiny_llama, outer), observe(tiny_llama.model, inner):
        tiny_llama(ids)
    assert [call.site.key.module for call in outer.calls] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert [call.site.key.module for call in inner.calls] == [f"layers.{i}.self_attn" for i in range(2)]
    assert inner.calls[0].answer.weights is not None
    assert outer.calls[0].answer.rows is not None


def test_output_attentions_of_an_eager_model_stay(ids: Tensor, collector: Any) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=31,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=23,
        attn_implementation="eager",
    )
    model = BertModel(config).eval()
    with torch.no_grad():
        plain = model(ids, output_attentions=True)
        with observe(model, collector), gate(model, {"encoder.layer.0": [1]}, scale=1.0):
            seen = model(ids, output_attentions=True)
    assert len(seen.attentions) == 2
    for left, right in zip(seen.attentions, plain.attentions, strict=True):
        assert torch.equal(left, right)


def test_a_forced_backend(tiny_llama: nn.Module, ids: Tensor, collect: Any) -> None:
    for backend in ("reference", "eager", "tiled"):
        seen = collect()
        with torch.no_grad(), observe(tiny_llama, seen, backend=backend):
            tiny_llama(ids)
        assert {call.choice.backend for call in seen.calls} == {backend}


def test_half_precision_models(tiny_llama: nn.Module, ids: Tensor, collector: Any) -> None:
    model = tiny_llama.to(torch.bfloat16)
    with torch.no_grad(), observe(model, collector):
        assert model(ids).logits.dtype == torch.bfloat16
    assert collector.calls[0].answer.rows.entropy.dtype == torch.float32
    assert collector.calls[0].z.dtype == torch.bfloat16


def test_heads_that_changed_since_discovery_are_refused(tiny_bert: nn.Module, ids: Tensor, collector: Any) -> None:
    discover(tiny_bert)
    attention = tiny_bert.encoder.layer[0].attention
    with torch.no_grad():
        for name in ("query", "key", "value"):
            linear = getattr(attention.self, name)
            linear.weight = nn.Parameter(linear.weight[:15].clone())
            linear.bias = nn.Parameter(linear.bias[:15].clone())
        attention.output.dense.weight = nn.Parameter(attention.output.dense.weight[:, :15].clone())
    message = "layout says 4 query and 4 key-value heads, the call has 3 and 3"
    with pytest.raises(ModelError, match=message), torch.no_grad(), observe(tiny_bert, collector):
        tiny_bert(ids)


def test_a_call_that_discovery_did_not_meet_is_refused(ids: Tensor, collector: Any) -> None:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=31,
        embedding_size=8,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=23,
    )
    model = AlbertModel(config).eval()
    discover(model)
    model.encoder.config.num_hidden_layers = 3
    message = "made attention call 2, which the model did not make"
    with pytest.raises(UnsupportedError, match=message), torch.no_grad(), observe(model, collector):
        model(ids)


def test_something_that_is_no_model() -> None:
    with pytest.raises(InputError, match="got str"), observe("bert"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_observer_sees_a_checkpointed_call_once(
    tiny_llama: nn.Module, ids: Tensor, collect: Any, reentrant: bool
) -> None:
    """And a second time, marked, when it asks for that."""
    discover(tiny_llama)
    tiny_llama.train()
    tiny_llama.activation_checkpointing_enable({"use_reentrant": reentrant})
    for sees in (False, True):
        seen = collect()
        seen.sees_recomputed = sees
        tiny_llama.zero_grad()
        with observe(tiny_llama, seen):
            tiny_llama(ids, labels=ids).loss.backward()
        first = [call.site.layer for call in seen.calls if not call.recomputed]
        again = [call.site.layer for call in seen.calls if call.recomputed]
        assert first == [0, 1]
        assert again == ([1, 0] if sees else [])
        assert {call.forward for call in seen.calls} == {0}

"""A GPT written in plain torch, in seven ways: measured, watched, observed and gated like any other model."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch_models
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_models import WAYS, lecture_gpt, small_gpt, some_ids

import headwise as hw
from headwise.errors import UnsupportedError
from headwise.kernels import Wanted
from headwise.models import discover, observe, output_weight

IDS = {"input_ids": some_ids()}


def true_patterns(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """What the layers say their weights are, in float64, in order."""
    truth = copy.deepcopy(model).double()
    patterns: list[Tensor] = []
    for part in truth.modules():
        if hasattr(part, "patterns"):
            part.patterns = patterns
    with torch.no_grad():
        truth(ids)
    return patterns


def check_rows(model: nn.Module, ids: Tensor, collect: Any, entropies: Any) -> list[Any]:
    seen = collect()
    with torch.no_grad(), observe(model, seen):
        model(ids)
    patterns = true_patterns(model, ids)
    assert len(seen.calls) == len(patterns)
    for call, pattern in zip(seen.calls, patterns, strict=True):
        pattern = pattern if pattern.ndim == 4 else pattern[:, None]
        rows = call.answer.rows
        torch.testing.assert_close(rows.entropy.double(), entropies(pattern), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rows.max_weight.double(), pattern.amax(-1), rtol=1e-5, atol=1e-6)
        assert torch.equal(rows.argmax, pattern.argmax(-1))
        assert torch.equal(rows.visible.expand(rows.entropy.shape), (pattern > 0).sum(-1))
    return seen.calls


@pytest.mark.parametrize("way", WAYS)
def test_heads_are_found(way: str) -> None:
    layout = discover(small_gpt(way), IDS)
    assert [str(site.key) for site in layout.sites] == ["layers.0.attention", "layers.1.attention"]
    assert all(site.causal and site.key.kind == "self" and site.key.stack == "decoder" for site in layout.sites)
    block = layout.blocks["layers.0.attention"]
    assert (block.query_heads, block.kv_heads, block.d_k, block.d_v) == (3, 3, 5, 5)
    assert block.o_path == "layers.0.attention.out"
    assert block.q is not None  # also where queries are scaled before anyone sees them: gradients tell
    assert layout.uncovered == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 7, 11])
def test_rows_equal_the_models_own_weights_in_float64(way: str, length: int, collect: Any, entropies: Any) -> None:
    model = small_gpt(way)
    discover(model, IDS)
    check_rows(model, some_ids(3, length), collect, entropies)


@pytest.mark.parametrize("way", WAYS)
def test_case_26_a_gate_equals_zeroed_columns(way: str) -> None:
    model = small_gpt(way)
    layout = discover(model, IDS)
    ids = some_ids(3, 5)
    for site in layout.sites:
        for head in range(3):
            changed = copy.deepcopy(model)
            with torch.no_grad():
                output_weight(changed, layout.block_of(site.key))[head] = 0
                with hw.gate(model, {site.key: [head]}):
                    gated = model(ids)
                assert (gated - changed(ids)).abs().max() <= 1e-6
                assert (gated - model(ids)).abs().max() > 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_watch_and_scan(way: str, entropies: Any) -> None:
    model = small_gpt(way)
    ids = some_ids(2, 6)
    patterns = true_patterns(model, ids)
    expected = torch.stack([entropies(pattern).mean((0, 2)) for pattern in patterns]).flatten()
    with torch.no_grad(), hw.watch(hw.wrap(model, example=IDS)) as watched:
        model(ids)
    scanned = hw.scan(hw.wrap(model, example=IDS), inputs=[{"input_ids": ids}])
    for table in (watched.table, scanned):
        assert len(table) == 6
        assert torch.allclose(torch.tensor(table["entropy"]).double(), expected, atol=1e-5)


def test_scan_takes_its_example_from_the_inputs() -> None:
    assert len(hw.scan(small_gpt("softmax"), inputs=[{"input_ids": some_ids()}])) == 6


def test_scan_of_texts_with_a_tokenizer() -> None:
    model = hw.wrap(small_gpt("is_causal"), lambda text: [ord(letter) % 31 for letter in text], example=IDS)
    table = hw.scan(model, ["shorter", "longer text"], batch_size=2)
    alone = hw.scan(model, ["shorter", "longer text"], batch_size=1)
    assert table.count("entropy").tolist() == alone.count("entropy").tolist() == [18] * 6


@pytest.mark.parametrize("way", ["is_causal", "boolean mask"])
def test_grouped_heads(way: str, collect: Any, entropies: Any) -> None:
    """Case 11: query head h reads key-value head h // 2, whether torch repeats them or the model does."""
    model = small_gpt(way, heads=4, groups=2)
    block = discover(model, IDS).blocks["layers.0.attention"]
    assert (block.query_heads, block.kv_heads, block.kv_map) == (4, 2, (0, 0, 1, 1))
    calls = check_rows(model, some_ids(), collect, entropies)
    assert calls[0].problem.k.shape[1] == 2


def test_heads_in_modules_of_their_own(collect: Any, entropies: Any) -> None:
    model = lecture_gpt()
    layout = discover(model, IDS)
    assert [str(site.key) for site in layout.sites][:3] == [f"layers.0.attention.heads.{i}" for i in range(3)]
    block = layout.blocks["layers.0.attention.heads.1"]
    assert (block.query_heads, block.d_k, block.o) == (1, 5, None)
    assert "columns 5 to 9 of what layers.0.attention.out reads" in dict(block.unknown)["o"]
    check_rows(model, some_ids(), collect, entropies)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.layers[0].attention.out.weight[:, 5:10] = 0
        with hw.gate(model, {"layers.0.attention.heads.1": [0]}):
            torch.testing.assert_close(model(IDS["input_ids"]), changed(IDS["input_ids"]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_in_train_mode_is_the_models_own(way: str, collect: Any, entropies: Any) -> None:
    """Case 6: rows are those before dropout, and the output is bit for bit what the model gives by itself."""
    model = small_gpt(way)
    discover(model, IDS)
    patterns = true_patterns(model, IDS["input_ids"])
    model.train()
    torch.manual_seed(5)
    expected = model(IDS["input_ids"])
    seen = collect()
    torch.manual_seed(5)
    with observe(model, seen):
        given = model(IDS["input_ids"])
    assert torch.equal(given, expected)
    assert model.training
    torch.testing.assert_close(seen.calls[0].answer.rows.entropy.double(), entropies(patterns[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_reach_gates(way: str) -> None:
    model = small_gpt(way)
    scale = torch.ones(3, requires_grad=True)
    discover(model, IDS)
    with hw.gate(model, {"layers.1.attention": [0, 1, 2]}, scale=scale):
        loss = model(IDS["input_ids"]).square().sum()
    (gradient,) = torch.autograd.grad(loss, scale)
    step = 1e-2
    for head in range(3):
        moved = []
        for sign in (1, -1):
            values = torch.ones(3)
            values[head] += sign * step
            with torch.no_grad(), hw.gate(model, {"layers.1.attention": [0, 1, 2]}, scale=values):
                moved.append(model(IDS["input_ids"]).square().sum())
        assert abs((moved[0] - moved[1]) / (2 * step) - gradient[head]) <= 1e-3 * gradient.abs().max()


@pytest.mark.parametrize("way", ["is_causal", "softmax"])
def test_sessions_nest(way: str, collect: Any) -> None:
    model = small_gpt(way)
    discover(model, IDS)
    with torch.no_grad():
        with hw.gate(model, {"layers.0.attention": [1]}, scale=0.25):
            expected = model(IDS["input_ids"])
        seen = collect()
        with (
            hw.gate(model, {"layers.0.attention": [1]}, scale=0.5),
            observe(model, seen),
            hw.gate(model, {"layers.0.attention": [1]}, scale=0.5),
        ):
            given = model(IDS["input_ids"])
        torch.testing.assert_close(given, expected)
        assert len(seen.calls) == 2
        ratio = seen.calls[0].z[:, 1] / seen.calls[0].answer.z[:, 1]
        torch.testing.assert_close(ratio, torch.full_like(ratio, 0.25))


@pytest.mark.parametrize("way", ["is_causal", "softmax"])
def test_other_threads_are_seen(way: str, collect: Any) -> None:
    model = small_gpt(way)
    discover(model, IDS)
    seen = collect()
    with observe(model, seen):
        with torch.no_grad():
            expected = model(IDS["input_ids"])
        given: list[Tensor] = []

        def work() -> None:
            with torch.no_grad():
                given.append(model(IDS["input_ids"]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(seen.calls) == 4
    torch.testing.assert_close(given[0], expected)


@pytest.mark.parametrize("way", ["is_causal", "softmax"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpointed_layer_is_gated_when_it_is_computed_again(way: str, reentrant: bool) -> None:
    class Checkpointed(torch_models.Layer):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    gradients = []
    for kind in (torch_models.Layer, Checkpointed):
        model = small_gpt(way)
        for layer in model.layers:
            layer.__class__ = kind
        discover(model, IDS)
        with hw.gate(model, {"layers.0.attention": [1]}, scale=0.5):
            model(IDS["input_ids"]).square().sum().backward()
        gradients.append(model.tokens.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("way", ["is_causal", "softmax"])
def test_case_25_everything_is_as_before_after_an_error(way: str, collect: Any) -> None:
    model = small_gpt(way).train()
    model.layers[0].attention.q.weight.requires_grad = False
    discover(model, IDS)

    class StopError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StopError

    handle = model.layers[1].mix.register_forward_pre_hook(stop)
    with pytest.raises(StopError), observe(model, collect()):
        model(IDS["input_ids"])
    with pytest.raises(KeyboardInterrupt), observe(model, collect()):
        raise KeyboardInterrupt
    handle.remove()
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in model.modules())
    assert model.training
    assert not model.layers[0].attention.q.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch._C._len_torch_function_stack() == 0


def test_an_interrupt_inside_attention_leaves_nothing_behind(collect: Any, entropies: Any) -> None:
    model = small_gpt("softmax")
    discover(model, IDS)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    seen = collect()
    with observe(model, seen), torch.no_grad():
        handle = model.layers[0].attention.drop.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(IDS["input_ids"])
        handle.remove()
        model(IDS["input_ids"])
    assert [str(call.site.key) for call in seen.calls] == ["layers.0.attention", "layers.1.attention"]
    check_rows(model, some_ids(), collect, entropies)


def test_a_copy_made_inside_a_session_is_free(collect: Any) -> None:
    model = small_gpt("is_causal")
    discover(model, IDS)
    seen = collect()
    with observe(model, seen), torch.no_grad():
        copied = copy.deepcopy(model)
        copied(IDS["input_ids"])
    assert seen.calls == []


def test_the_top_left_corner_of_is_causal(collect: Any) -> None:
    """Case 5: torch hangs the triangle from the top left; what is measured is what torch computes."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(6, 6, bias=False) for _ in range(4))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            q, k, v = (
                part(one).unflatten(-1, (2, 3)).transpose(1, 2)
                for part, one in ((self.q, x), (self.k, memory), (self.v, memory))
            )
            z = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(z.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Crossed().eval()
    discover(model, {"x": torch.randn(2, 5, 6), "memory": torch.randn(2, 3, 6)})
    for queries, keys, visible in ((2, 5, [1, 2]), (1, 5, [1]), (5, 2, [1, 2, 2, 2, 2])):
        seen = collect(Wanted(rows=True, weights=True))
        with torch.no_grad(), observe(model, seen):
            model(torch.randn(1, queries, 6), torch.randn(1, keys, 6))
        (call,) = seen.calls
        assert call.answer.rows.visible.expand(1, 2, queries)[0, 0].tolist() == visible
        q, k = call.problem.q, call.problem.k
        seen_QK = torch.ones(queries, keys, dtype=torch.bool).tril()
        expected = (q @ k.mT * 3**-0.5).masked_fill(~seen_QK, -torch.inf).softmax(-1)
        torch.testing.assert_close(call.answer.weights, expected)


def test_a_call_that_was_not_there_when_the_heads_were_found(collect: Any) -> None:
    class Twice(torch_models.Attention):
        again = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return super().forward(x) if self.again else x

    torch.manual_seed(0)
    model = torch_models.SmallGPT(Twice("is_causal")).eval()
    discover(model, IDS)
    model.layers[0].attention.again = True
    words = r"layers.0.attention made attention call 1, which the model did not make"
    with torch.no_grad(), pytest.raises(UnsupportedError, match=words), observe(model, collect()):
        model(IDS["input_ids"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
            split = rows.unflatten(-1, [2, 3]).transpose(1, 2)
            functional.scaled_dot_product_attention(split, split, split)
            return self.out(x)

    with pytest.raises(UnsupportedError, match="Nested gives nested tensors to scaled_dot_product_attention"):
        discover(Nested(), {"x": torch.randn(2, 5, 6)})


def test_results_that_no_layer_reads_head_by_head_are_refused() -> None:
    class Scrambled(torch_models.Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            z = (q @ k.mT).softmax(-1) @ v
            return self.out(z.transpose(1, 2).flip(-1).flatten(2))

    with pytest.raises(UnsupportedError, match="Scrambled: no layer reads its results head by head, side by side"):
        discover(torch_models.SmallGPT(Scrambled("softmax")), IDS)


def test_a_model_without_config_needs_an_example() -> None:
    with pytest.raises(UnsupportedError, match=r"SmallGPT has no transformers config, .*--inputs FILE"):
        discover(small_gpt("softmax"))

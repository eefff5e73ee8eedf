"""Case 13: copying, pickling, saving, exporting, compiling, autocast and vmap."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from headwise.nn import MultiHeadAttention

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, rotary, bias": {"n_kv_heads": 2, "rotary": True, "bias": True},
    "window, softcap": {"window": 3, "softcap": 2.0},
    "qk_norm, sinks": {"qk_norm": True, "sinks": True},
    "mean": {"combine": "mean"},
    "summed": {"softmax": "summed"},
}


COMPILED = ["grouped, rotary, bias", "window, softcap"]


@pytest.fixture(params=list(VARIANTS))
def layer(request: pytest.FixtureRequest) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, **VARIANTS[request.param]).eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 7, 16)


def test_deepcopy_shares_nothing(layer, x):
    out = layer(x, causal=True)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x, causal=True), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(layer(x, causal=True), out)
    assert twin.heads[0].layer is twin


def test_pickle_gives_the_same_bits(layer, x):
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, causal=True), layer(x, causal=True))


def test_state_dict_has_plain_names_and_gives_the_same_bits(layer, x):
    state = layer.state_dict()
    known = {"W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "norm_Q", "norm_K", "sinks"}
    assert {"W_Q", "W_K", "W_V", "W_O"} <= state.keys() <= known
    torch.manual_seed(99)
    other = type(layer)(16, 4, **next(v for v in VARIANTS.values() if same_shape(v, layer))).eval()
    other.load_state_dict(state)
    assert torch.equal(other(x, causal=True), layer(x, causal=True))


def same_shape(options: dict[str, Any], layer: MultiHeadAttention) -> bool:
    return repr(MultiHeadAttention(16, 4, **options)) == repr(layer)


def test_safetensors_takes_the_state(layer, tmp_path):
    from safetensors.torch import load_file, save_file

    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    loaded = load_file(tmp_path / "layer.safetensors")
    assert all(torch.equal(value, loaded[name]) for name, value in layer.state_dict().items())


class Padded(nn.Module):
    """What is exported: the layer with a padding mask as its second input."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(x, causal=True, key_padding=mask)


def test_export_with_a_dynamic_length(layer):
    length = torch.export.Dim("length", min=3, max=9)
    x, mask = torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)
    exported = torch.export.export(Padded(layer), (x, mask), dynamic_shapes=({1: length}, {1: length})).module()
    for n in range(3, 10):
        x, ones = torch.randn(2, n, 16), torch.ones(2, n, dtype=torch.bool)
        left = ones.clone()
        left[0, :2] = False
        for mask in (ones, left):
            assert_close(exported(x, mask), layer(x, causal=True, key_padding=mask), atol=1e-6, rtol=1e-5)


def test_export_without_a_mask(layer):
    length = torch.export.Dim("length", min=3, max=9)
    exported = torch.export.export(Padded(layer), (torch.randn(2, 5, 16),), dynamic_shapes=({1: length},)).module()
    for n in (3, 5, 9):
        x = torch.randn(2, n, 16)
        assert_close(exported(x), layer(x, causal=True), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layer", COMPILED, indirect=True)
def test_compile_in_one_graph_for_every_length(layer):
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 7):
        x = torch.randn(2, n, 16)
        mask = torch.arange(n).expand(2, n) > 0
        assert_close(compiled(x, causal=True), layer(x, causal=True))
        assert_close(compiled(x, causal=True, key_padding=mask), layer(x, causal=True, key_padding=mask))


@pytest.mark.parametrize("layer", COMPILED, indirect=True)
def test_compile_trains_the_same(layer):
    torch._dynamo.reset()
    x = torch.randn(2, 5, 16)
    twin = copy.deepcopy(layer)
    torch.compile(twin, backend="aot_eager", fullgraph=True)(x, causal=True).square().sum().backward()
    layer(x, causal=True).square().sum().backward()
    for (name, a), b in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert_close(a.grad, b.grad, msg=name, atol=1e-5, rtol=1e-4)


def test_compile_decodes_with_a_cache_in_few_graphs(x):
    torch._dynamo.reset()
    layer = MultiHeadAttention(16, 4, n_kv_heads=2, rotary=True).eval()
    compiled, cache = torch.compile(layer, backend="aot_eager", fullgraph=True), layer.new_cache(2, 11)
    x = torch.randn(2, 11, 16)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        steps = [compiled(x[:, :5], cache=cache, update=True)]
        steps += [compiled(x[:, i : i + 1], cache=cache, update=True) for i in range(5, 11)]
    assert_close(torch.cat(steps, dim=1), layer(x, causal=True))
    assert cache.length == 11
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4  # not one for every length


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compile_with_inductor():
    torch._dynamo.reset()
    layer, x = MultiHeadAttention(16, 4, rotary=True).eval(), torch.randn(2, 7, 16)
    assert_close(torch.compile(layer)(x, causal=True), layer(x, causal=True), atol=1e-5, rtol=1e-5)


def test_autocast(layer, x):
    truth = layer(x, causal=True)
    mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, causal=True)
        masked = layer(x, mask=mask) if layer.window is None else out
    assert out.dtype == masked.dtype == torch.bfloat16
    assert_close(out.float(), truth, atol=3e-2, rtol=3e-2)
    assert_close(masked.float(), truth, atol=3e-2, rtol=3e-2)


def test_autocast_with_a_cache(x):
    layer = MultiHeadAttention(16, 4, rotary=True).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        cache = layer.new_cache(2, 7, dtype=torch.bfloat16)
        steps = [layer(x[:, i : i + 1], cache=cache, update=True) for i in range(7)]
        assert_close(torch.cat(steps, dim=1), layer(x, causal=True), atol=3e-2, rtol=3e-2)


def test_vmap_over_a_batch_of_gates(layer, x):
    gates = torch.randn(5, 4)
    mapped = torch.func.vmap(lambda g: layer(x, causal=True, gates=g))(gates)
    assert mapped.shape == (5, 2, 7, 16)
    for i in range(5):
        assert_close(mapped[i], layer(x, causal=True, gates=gates[i]), atol=1e-6, rtol=1e-5)
    per_example = torch.randn(5, 2, 4)
    mapped = torch.func.vmap(lambda g: layer(x, causal=True, gates=g))(per_example)
    assert_close(mapped[3], layer(x, causal=True, gates=per_example[3]), atol=1e-6, rtol=1e-5)


def test_gradient_of_gates_per_example_is_z_times_its_gradient(layer, x):
    """d loss / d gate = <z, d loss / d z>: one number per head and example, none of them mixed."""
    gates = torch.ones(2, 4, requires_grad=True)
    layer(x, causal=True, gates=gates)[0].square().sum().backward()
    assert bool((gates.grad[1] == 0).all())
    assert bool((gates.grad[0] != 0).all())
    step = 1e-3
    for head in range(4):
        nudged = torch.ones(2, 4)
        nudged[0, head] += step
        up = layer(x, causal=True, gates=nudged)[0].square().sum()
        nudged[0, head] -= 2 * step
        down = layer(x, causal=True, gates=nudged)[0].square().sum()
        assert_close(gates.grad[0, head], (up - down) / (2 * step), atol=2e-2, rtol=2e-2)


def test_moves_between_dtypes(layer, x):
    assert layer.double()(x.double(), causal=True).dtype == torch.float64
    assert layer.bfloat16()(x.bfloat16(), causal=True).dtype == torch.bfloat16

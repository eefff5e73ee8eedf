"""Nothing of size queries x keys is built unless the weights are asked for."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise.kernels import Problem, ScoreRule, Visible, Wanted, attention, run

N, HEADS = 2048, 8
ONE_WEIGHT_TENSOR = 134_217_728  # bytes, float32
ONE_HEAD = ONE_WEIGHT_TENSOR // HEADS


class Watch(TorchDispatchMode):
    """The largest tensor, the operators, and the live bytes of storage that operators make."""

    def __init__(self):
        super().__init__()
        self.largest, self.names, self.live, self.peak = 0, set(), {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.__name__)
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def inputs(d_v=64, groups=HEADS, grad=False):
    shapes = ((1, HEADS, N, 64), (1, groups, N, 64), (1, groups, N, d_v))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


PADDING = torch.ones(1, N, dtype=torch.bool)
PADDING[:, :100] = False


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 256},
        {"key_padding": PADDING},
        {"causal": True, "key_padding": PADDING},
        {"softcap": 20.0, "sinks": torch.zeros(HEADS)},
        {"bias": torch.linspace(0, 1, N).expand(1, HEADS, 1, N)},
    ],
)
@pytest.mark.parametrize("rows", [False, True])
def test_case_9_the_peak_is_below_a_quarter_of_one_weight_tensor(options, rows):
    assert ONE_WEIGHT_TENSOR == 4 * HEADS * N * N
    q, k, v = inputs()
    with Watch() as watch:
        attention(q, k, v, rows=rows, **options)
    assert watch.largest < ONE_HEAD
    assert watch.peak < ONE_WEIGHT_TENSOR / 4


@pytest.mark.parametrize("options", [{"d_v": 48}, {"groups": 2}])
def test_sdpa_never_takes_its_dense_road(options):
    for visible in (Visible(), Visible(causal=True), Visible(key_padding=PADDING)):
        q, k, v = inputs(**options)
        with Watch() as watch:
            run(Problem(q, k, v, visible), backend="sdpa")
        assert "_scaled_dot_product_flash_attention_for_cpu.default" in watch.names
        assert watch.largest < ONE_HEAD


def test_the_watch_sees_a_dense_road():
    q, k, v = inputs()
    with Watch() as watch:
        run(Problem(q, k, v), backend="eager")
    assert watch.largest >= ONE_WEIGHT_TENSOR
    with Watch() as watch:
        attention(q, k, v, weights=True)
    assert watch.largest >= ONE_WEIGHT_TENSOR


def test_backward_is_blockwise_too():
    q, k, v = inputs(grad=True)
    with Watch() as watch:
        answer = run(Problem(q, k, v, Visible(causal=True), ScoreRule(softcap=9.0)), Wanted(rows=True, distance=True))
        (answer.z.sum() + answer.rows.entropy.sum() + answer.rows.max_weight.sum()).backward()
    assert watch.largest < ONE_HEAD
    assert watch.peak < ONE_WEIGHT_TENSOR / 2


def test_memory_grows_with_length_and_not_with_its_square():
    peaks = []
    for n in (1024, 4096):
        q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
        with Watch() as watch:
            attention(q, k, v, causal=True, rows=True)
        peaks.append(watch.peak)
    assert peaks[1] <= 4 * peaks[0]

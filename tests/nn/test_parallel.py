"""Heads split over two processes on gloo: everything equals one process."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from headwise.errors import InputError
from headwise.nn import MultiHeadAttention

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"bias": True},
    "grouped, rotary": {"n_kv_heads": 2, "rotary": True, "bias": True},
    "qk_norm, sinks, window": {"n_kv_heads": 2, "qk_norm": True, "sinks": True, "window": 3},
    "mean": {"combine": "mean", "d_v": 3},
}


def build(name: str) -> MultiHeadAttention:
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 4, **OPTIONS[name]).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def inputs() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(2, 7, 8).double().requires_grad_(),
        "gates": torch.randn(2, 4).double().requires_grad_(),
        "bias": torch.randn(1, 4, 7, 7).double().requires_grad_(),
    }


def everything(layer: MultiHeadAttention) -> dict[str, torch.Tensor]:
    """Output, rows, weights, results, gradients and decoding, by name."""
    given = inputs()
    x, call = given.pop("x"), given
    out, rows, weights = layer(x, causal=True, rows=True, weights=True, **call)
    (out.square().sum() + rows.entropy.sum()).backward()
    found = {"out": out, "entropy": rows.entropy, "argmax": rows.argmax, "weights": weights}
    found |= {"plain out": layer(x, causal=True), "results": layer.results(x, causal=True)}
    found |= {"x.grad": x.grad, "gates.grad": call["gates"].grad, "bias.grad": call["bias"].grad}
    for name, parameter in layer.named_parameters():
        found[f"{name}.grad"] = parameter.grad
    with torch.no_grad():
        cache = layer.new_cache(2, 7)
        steps = [layer(x[:, :4], cache=cache, update=True)]
        steps += [layer(x[:, i : i + 1], cache=cache, update=True) for i in range(4, 7)]
    found["decoded"] = torch.cat(steps, dim=1)
    return {name: value.detach() for name, value in found.items()}


def one_rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import parallelize_module

        from headwise.nn import HeadParallel, split_heads

        mesh = init_device_mesh("cpu", (2,))
        for name in OPTIONS:
            whole = build(name)
            expected = everything(whole)
            layer = split_heads(build(name), mesh)
            assert isinstance(layer.W_Q, DTensor)
            assert layer.W_Q.to_local().shape[1] == whole.W_Q.shape[1] // 2
            for what, value in everything(layer).items():
                value = value.full_tensor() if isinstance(value, DTensor) else value
                assert_close(value, expected[what], msg=lambda m, at=f"{name}, {what}": f"{at}: {m}")
            assert layer.new_cache(1, 5).nbytes == whole.new_cache(1, 5).nbytes // 2
            mine = [head.index for head in layer.heads]
            assert mine == [[0, 1], [2, 3]][rank]
            assert torch.equal(layer.heads[mine[0]].W_Q, whole.heads[mine[0]].W_Q)
            assert torch.equal(layer.heads[mine[1]].W_K, whole.heads[mine[1]].W_K)
            assert torch.equal(layer.heads[mine[1]].W_O, whole.heads[mine[1]].W_O)
            state = layer.state_dict()
            assert torch.equal(state["W_Q"].full_tensor(), whole.W_Q)

        model = nn.Sequential(build("plain"))
        parallelize_module(model, mesh, {"0": HeadParallel()})
        assert_close(model(inputs()["x"]), build("plain")(inputs()["x"]))

        refusals(mesh, rank)
        Path(folder, f"rank{rank}").write_text("done")
    finally:
        dist.destroy_process_group()


def refusals(mesh: Any, rank: int) -> None:
    from headwise.nn import HeadParallel, split_heads

    cases = {
        "1 key-value heads cannot be split evenly over 2 ranks": MultiHeadAttention(8, 4, n_kv_heads=1),
        "3 query heads cannot be split evenly over 2 ranks": MultiHeadAttention(9, 3),
        "so they cannot be split": MultiHeadAttention(8, 4, softmax="summed"),
        "holds no headwise MultiHeadAttention": nn.Linear(3, 3),
        "split over ranks already": split_heads(MultiHeadAttention(8, 4), mesh),
    }
    for message, module in cases.items():
        with pytest.raises(InputError, match=message):
            split_heads(module, mesh)
    with pytest.raises(InputError, match="not Linear"):
        HeadParallel()._apply(nn.Linear(3, 3), mesh)
    layer = split_heads(MultiHeadAttention(8, 4), mesh)
    with pytest.raises(InputError, match="held by another rank"):
        layer.heads[3 if rank == 0 else 0]
    both = nn.ModuleList([MultiHeadAttention(8, 4), MultiHeadAttention(8, 4, n_kv_heads=1)])
    with pytest.raises(InputError, match="key-value heads"):
        split_heads(both, mesh)
    assert isinstance(both[0].W_Q, nn.Parameter)
    assert len(both[0].local_heads) == 4  # nothing was split


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_equal_one(tmp_path):
    mp.spawn(one_rank, args=(free_port(), str(tmp_path)), nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]

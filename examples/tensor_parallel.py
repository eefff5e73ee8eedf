"""Split the heads of a layer over two processes and check that nothing changes.

python examples/tensor_parallel.py                            # starts its own two processes, on gloo
torchrun --nproc-per-node 4 examples/tensor_parallel.py       # or as many as divide the key-value heads
"""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from headwise.nn import MultiHeadAttention, split_heads

RANKS = 2


def work() -> None:
    """What every rank does: the same layer whole and split, the same output, half the cache."""
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        whole = MultiHeadAttention(64, 8, n_kv_heads=4, rotary=True)
        split = MultiHeadAttention(64, 8, n_kv_heads=4, rotary=True)
        split.load_state_dict(whole.state_dict())
        split_heads(split, mesh)

        x = torch.randn(2, 16, 64)
        difference = (split(x, causal=True) - whole(x, causal=True)).abs().max().item()
        whole_bytes, split_bytes = (layer.new_cache(1, 1024).nbytes for layer in (whole, split))
        heads = split.local_heads
        print(
            f"rank {dist.get_rank()}: heads {heads.start} to {heads.stop - 1}, cache {split_bytes} of {whole_bytes} "
            f"bytes, largest difference {difference:.1e}",
            flush=True,
        )
        assert difference < 1e-5
    finally:
        dist.destroy_process_group()


def start(rank: int, port: int) -> None:
    """One of the processes that this script starts by itself."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    work()


def main() -> None:
    if "RANK" in os.environ:
        work()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    mp.spawn(start, args=(port,), nprocs=RANKS)


if __name__ == "__main__":
    main()

"""A whole scan against the plain forward pass of the same base model, in time and in memory.

    python -m benchmarks scan            ratio of times, SmolLM2 or (where it is not here) a random Llama of its shape

Answers are checked first: the scanned model's hidden states are those of the plain pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import headwise as hw
from benchmarks.pairs import Pairs, paired
from headwise.data import batches
from headwise.measures import PatternObserver
from headwise.models import Model
from headwise.trace import run

ROOT = Path(__file__).resolve().parents[1]
READY = Path(os.environ.get("HEADWISE_READY_MODELS", ROOT / ".models" / "ready"))


def smollm2() -> tuple[str, nn.Module]:
    """SmolLM2's base model, or a random Llama of the same shape."""
    folder = READY / "smollm2"
    if (folder / "config.json").is_file():
        return "SmolLM2-135M", hw.load(folder).module.base_model
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return "random Llama of SmolLM2's shape", LlamaModel(config).eval()


def scan_once(model: Model, ids: torch.Tensor, backend: str | None = None) -> PatternObserver:
    """One traced forward pass with every measure."""
    observer = PatternObserver()
    run(model, batches(model, [{"input_ids": ids}]), [observer], backend=backend)
    return observer


def plain_once(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One plain forward pass."""
    with torch.no_grad():
        state: torch.Tensor = module(input_ids=ids, use_cache=False).last_hidden_state
    return state


def check(model: Model, ids: torch.Tensor, measured: Callable[[], object] | None = None) -> None:
    """The measured pass, by default a scan, must compute the same hidden states."""
    states: list[torch.Tensor] = []
    hook = model.module.register_forward_hook(lambda _m, _a, out: states.append(out.last_hidden_state))
    try:
        scan_once(model, ids) if measured is None else measured()
    finally:
        hook.remove()
    expected = plain_once(model.module, ids)
    error = (states[-1] - expected).abs().max() / expected.abs().max()
    if not error < 1e-4:
        raise SystemExit(f"scan changed the hidden states by {error:.2e} of the largest: not timed")


def cases(full: bool) -> list[Pairs]:
    """Ratios of scan time to plain time at several lengths."""
    name, module = smollm2()
    model = hw.wrap(module)
    found = []
    for length in (512, 2048, 4096) if full else (512, 2048):
        ids = torch.randint(3, 40000, (1, length), generator=torch.Generator().manual_seed(1))
        check(model, ids)
        found.append(
            paired(
                f"scan / plain sdpa pass, {name}, {length} tokens",
                lambda ids=ids: scan_once(model, ids),
                lambda ids=ids: plain_once(module, ids),
                rounds=7 if length <= 2048 else 5,
            )
        )
    return found

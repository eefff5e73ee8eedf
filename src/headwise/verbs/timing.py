"""What a cut saves on this machine: passes of the original, of the original with gated heads, of the cut model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.layout import Block
from headwise.models import Model
from headwise.models.restore import unchanged
from headwise.surgery import gating, place_of

__all__ = ["LayerTime", "Timing", "check_timed", "timing"]


@dataclass(frozen=True)
class LayerTime:
    """Median seconds of one attention layer (projections included) in one pass.

    Attributes:
        block: path of its attention module.
        before, after: of the original and of the cut model.
    """

    block: str
    before: float
    after: float


@dataclass(frozen=True)
class Timing:
    """Median seconds of a pass.

    Attributes:
        batch, length: rows of the input and tokens in each.
        repeats: passes of each of the three, in turns, after one turn that is not counted; the original and the cut
            model take turns at being first.
        threads: that torch computed with.
        before, gated, after: the original, the original with the heads gated, the cut model.
        layers: the layers that were cut.
        ratios: of each turn, how many times as fast the cut model was: machines are faster in one minute than in the
            next, and two passes side by side see the same machine.
    """

    batch: int
    length: int
    repeats: int
    threads: int
    before: float
    gated: float
    after: float
    layers: tuple[LayerTime, ...]
    ratios: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """How many times as fast the cut model is as the original: the median of the turns."""
        return median(self.ratios)

    def to_document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def check_timed(model: Model) -> None:
    """Refuse now what :func:`timing` would refuse after a cut.

    Raises:
        UnsupportedError: the model takes something else than token ids.
    """
    _tokens(model, 1, 1)


def timing(
    original: Model,
    small: Model,
    *,
    removed: Mapping[str, tuple[int, ...]] | None = None,
    batch: int = 32,
    length: int = 128,
    repeats: int = 5,
) -> Timing:
    """Time a model and the same model without heads, on random tokens.

    Args:
        original: the model before.
        small: the model after.
        removed: for each block the heads of the original that it lacks; None: what its record says of the last cut.
        batch: rows of the input.
        length: tokens in each, at most as many as the model has positions for.
        repeats: passes of each.

    Raises:
        InputError: a number below 1, or ``small`` has no record of a cut.
        UnsupportedError: the model takes something else than token ids.
    """
    for name, value in (("batch", batch), ("length", length), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number, at least 1, and is {value!r}")
    if removed is None:
        if small.surgery is None:
            raise InputError("there is no record of a cut in this model, so there is nothing to time")
        removed = {one.module: one.removed for one in small.surgery.blocks}
    inputs = _tokens(original, batch, length)
    blocks = {path: original.layout.blocks[path] for path in removed}
    whole: dict[str, list[float]] = {"before": [], "gated": [], "after": []}
    parts: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    with unchanged(original.module), unchanged(small.module), ExitStack() as stack:
        for name, module in (("before", original.module), ("after", small.module)):
            stack.enter_context(_watched(module, blocks, parts[name]))
        for turn in range(repeats + 1):
            if turn == 1:
                parts["before"].clear()
                parts["after"].clear()
            pair = [("before", original.module), ("after", small.module)]
            found = {name: _pass(module, inputs) for name, module in (pair if turn % 2 else reversed(pair))}
            kept = {path: list(times) for path, times in parts["before"].items()}
            with gating(original.module, blocks, removed):
                found["gated"] = _pass(original.module, inputs)
            parts["before"].clear()
            parts["before"].update(kept)
            for name, seconds in found.items():
                if turn:
                    whole[name].append(seconds)
    layers = tuple(
        LayerTime(path, median(parts["before"][path]), median(parts["after"][path]))
        for path in blocks
        if parts["before"].get(path) and parts["after"].get(path)
    )
    middle = {name: median(seconds) for name, seconds in whole.items()}
    size = inputs["input_ids"].shape
    ratios = tuple(first / second for first, second in zip(whole["before"], whole["after"], strict=True))
    return Timing(size[0], size[1], repeats, torch.get_num_threads(), **middle, layers=layers, ratios=ratios)


def _tokens(model: Model, batch: int, length: int) -> dict[str, Any]:
    module: Any = model.module
    main = getattr(module, "main_input_name", "input_ids")
    vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
    if main != "input_ids" or not isinstance(vocabulary, int):
        raise UnsupportedError(
            f"{type(module).__name__} takes {main!r}; times are taken on random tokens, so only models of text can "
            "be timed"
        )
    positions = getattr(module.config, "max_position_embeddings", None)
    if isinstance(positions, int):
        length = min(length, positions)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (batch, length), generator=draw, device="cpu").to(model.device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(module.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


def _pass(module: nn.Module, inputs: Mapping[str, Any]) -> float:
    _wait()
    start = time.perf_counter()
    module(**inputs)
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _watched(module: nn.Module, blocks: Mapping[str, Block], times: dict[str, list[float]]) -> Iterator[None]:
    """Inside, every call of a layer adds its seconds to ``times``."""
    started: dict[str, float] = {}
    with ExitStack() as stack:
        for path, block in blocks.items():
            place = module.get_submodule(place_of(block))

            def begin(_module: Any, _args: Any, path: str = path) -> None:
                _wait()
                started[path] = time.perf_counter()

            def end(_module: Any, _args: Any, _output: Any, path: str = path) -> None:
                _wait()
                times.setdefault(path, []).append(time.perf_counter() - started[path])

            stack.callback(place.register_forward_pre_hook(begin).remove)
            stack.callback(place.register_forward_hook(end).remove)
        yield

"""What a decoded token waits for: reading the cache, or computing with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from headwise.kernels import attention
from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, MARKERS, ORANGE, RED, panels
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator
from headwise.nn import KVCache

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

HEADS, WIDTH = 32, 128
KV_HEADS: Final = (32, 8, 1)
CONTEXTS: Final = {"full": (512, 2048, 8192), "small": (256, 512)}
REPEATS: Final = {"full": 9, "small": 3}
BYTES = 4  # float32


def seconds(action: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def cache_bytes(kv_heads: int, context: int) -> int:
    """Bytes that one token waits for: keys and values of every KV head."""
    return 2 * kv_heads * context * WIDTH * BYTES


def flops(context: int) -> int:
    """Scores and mixing of one query of every head; a multiply-add counts as 2."""
    return 4 * HEADS * context * WIDTH


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One decode step's attention."""
    found: Tensor = attention(q, k, v)
    return found


def stream(k: Tensor, v: Tensor) -> Tensor:
    """Read K and V once, doing next to nothing with them."""
    return k.sum() + v.sum()


def peak_flops() -> float:
    """FLOPs per second of a large matrix product, the best of several."""
    a = torch.ones(1024, 1024)
    a @ a
    return 2 * 1024**3 / min(seconds(lambda: a @ a) for _ in range(5))


def times(kv_heads: int, context: int, repeats: int, seed: int) -> dict[str, list[float]]:
    """Seconds of decode steps and of reading the same cache, interleaved."""
    random = generator(seed)
    q = torch.randn(1, HEADS, 1, WIDTH, generator=random)
    k, v = (torch.randn(1, kv_heads, context, WIDTH, generator=random) for _ in range(2))
    decode(q, k, v)
    stream(k, v)
    found: dict[str, list[float]] = {"decode": [], "stream": []}
    for _ in range(repeats):
        found["decode"].append(seconds(lambda: decode(q, k, v)))
        found["stream"].append(seconds(lambda: stream(k, v)))
    return found


def measure(seed: int, size: str) -> Findings:
    """Every number of KV heads at every context."""
    found = Findings()
    contexts, repeats = CONTEXTS[size], REPEATS[size]
    with torch.no_grad():
        table = {(g, n): times(g, n, repeats, seed) for n in contexts for g in KV_HEADS}
        peak = peak_flops()
    longest = contexts[-1]
    median = {key: {name: statistics.median(values) for name, values in one.items()} for key, one in table.items()}
    real = KVCache(1, longest, n_kv_heads=8, d_k=WIDTH, d_v=WIDTH).nbytes
    found.add(
        "bytes_ratio",
        real / cache_bytes(8, longest),
        meaning="bytes of the real cache / 2 x KV heads x tokens x width x 4",
    )
    for g in KV_HEADS:
        one = table[g, longest]
        ratios = [a / b for a, b in zip(one["decode"], one["stream"], strict=True)]
        found.add(
            f"over_bound_{g}",
            statistics.median(ratios),
            meaning=f"decode time / time to read the cache, {g} KV heads, {longest} tokens",
        )
    for g in KV_HEADS[1:]:
        gain = median[HEADS, longest]["decode"] / median[g, longest]["decode"]
        found.add(
            f"share_of_gain_{g}", gain / (HEADS / g), meaning=f"speed-up from {HEADS} to {g} KV heads / {HEADS // g}"
        )
    bandwidth = cache_bytes(HEADS, longest) / median[HEADS, longest]["stream"]
    found.add("bandwidth", bandwidth / 1e9, "GB/s", "reading K and V once")
    found.add("peak", peak / 1e9, "GFLOP/s", "large float32 matrix product")
    found.add(
        "turning_group",
        BYTES / 2 * peak / bandwidth,
        "",
        "query heads per KV head at which FLOPs take as long as reading",
    )
    found.series = {
        "contexts": list(contexts),
        **{f"decode {g}": [median[g, n]["decode"] for n in contexts] for g in KV_HEADS},
        **{f"stream {g}": [median[g, n]["stream"] for n in contexts] for g in KV_HEADS},
        "compute": [flops(n) / peak for n in contexts],
    }
    found.finding = _finding(found, longest, median)
    return found


def _finding(found: Findings, longest: int, median: Mapping[tuple[int, int], Mapping[str, float]]) -> str:
    q = found.quantities
    ms = {g: 1e3 * median[g, longest]["decode"] for g in KV_HEADS}
    return (
        f"At {longest} cached tokens a step takes {ms[32]:.1f}, {ms[8]:.1f} and {ms[1]:.2f} ms with 32, 8 and 1 KV"
        f" heads: {q['over_bound_32'].mean:.2f}, {q['over_bound_8'].mean:.2f} and {q['over_bound_1'].mean:.1f} times"
        f" the time to read the cache once. From 32 to 8 KV heads the speed-up is {q['share_of_gain_8'].mean:.0%} of"
        f" the 4 that the bytes promise, to 1 {q['share_of_gain_1'].mean:.0%} of the 32. Each cached number serves 2"
        f" FLOPs per query head of its group, so reading and computing balance at about {q['turning_group'].mean:.0f}"
        f" query heads per KV head ({q['bandwidth'].mean:.0f} GB/s, {q['peak'].mean:.0f} GFLOP/s); beyond that the"
        " FLOPs, which are the same for every number of KV heads, set the pace."
    )


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """Time of a step against context, beside its two bounds."""
    left, right = panels(figure, 2, height=3.4)
    for g, colour, marker in zip(KV_HEADS, (RED, ORANGE, BLUE), MARKERS, strict=False):
        left.loglog(
            series["contexts"],
            [1e3 * t for t in series[f"decode {g}"]],
            marker + "-",
            base=2,
            color=colour,
            label=f"{g} KV heads",
        )
        left.loglog(series["contexts"], [1e3 * t for t in series[f"stream {g}"]], ":", base=2, color=colour)
    left.loglog(
        series["contexts"], [1e3 * t for t in series["compute"]], "--", base=2, color=GREY, label="FLOPs at peak"
    )
    left.set_yscale("log", base=10)
    left.set(title="One step (dotted: reading the cache once)", xlabel="cached tokens", ylabel="ms")
    left.legend()
    places = range(len(KV_HEADS))
    for offset, (key, colour, label) in enumerate(
        (("decode", BLUE, "decode step"), ("stream", ORANGE, "read the cache"), ("compute", GREEN, "FLOPs at peak"))
    ):
        values = [series[key if key == "compute" else f"{key} {g}"][-1] * 1e3 for g in KV_HEADS]
        right.bar([at + (offset - 1) * 0.27 for at in places], values, width=0.25, color=colour, label=label)
    right.set_yscale("log")
    right.set_xticks(places, [str(g) for g in KV_HEADS])
    right.set(title=f"At {series['contexts'][-1]} tokens", xlabel="KV heads", ylabel="ms")
    right.legend()


EXPERIMENT = Experiment(
    name="cache",
    method=(
        f"The attention of one decode step: {HEADS} query heads of width {WIDTH}, float32, with 32, 8 and 1 KV heads."
        " Its time is measured in turn with the time to read the same K and V once (a sum), and set against the time"
        " of its FLOPs at the rate of a large matrix product. Medians of interleaved calls. Times vary from machine"
        " to machine and with other load; the bytes do not."
    ),
    terms={
        "arithmetic intensity": (
            "FLOPs per byte read; in decoding, half the number of query heads per KV head in float32"
        ),
        "group": "the query heads that share a KV head",
    },
    rule=Rule(
        stated=(
            Threshold(
                "over_bound_1",
                "max",
                "<=",
                2.0,
                "with a single KV head too, a step takes at most twice the time to read the cache",
            ),
            Threshold("share_of_gain_1", "min", ">=", 0.5, "32 times fewer KV heads make it at least 16 times faster"),
        ),
        conditioned=(
            Threshold(
                "bytes_ratio", "max", "<=", 1.0, "the cache has the bytes of its KV heads, not of its query heads"
            ),
            Threshold(
                "over_bound_32",
                "max",
                "<=",
                2.0,
                "with as many KV heads as query heads a step takes at most twice the time to read the cache",
            ),
            Threshold("share_of_gain_8", "min", ">=", 0.5, "4 times fewer KV heads make it at least twice as fast"),
        ),
        condition="few query heads share a KV head, so that reading outweighs the FLOPs",
    ),
    measure=measure,
    draw=draw,
    caption=(
        "Left: time of a step, with the time to read its cache as a dotted line. Right: the two bounds beside the"
        " measured time at the longest context."
    ),
    lesson=(
        "Grouping heads pays in time until the group reaches the machine's balance of FLOPs to bytes; in memory it"
        " pays all the way."
    ),
    literature=(
        Literature(
            "decoder 46 microseconds per token with 8 heads' keys and values, 3.8 with one (12 times; TPUv2)",
            "Shazeer 2019, Fast Transformer Decoding, table 3",
            "share_of_gain_1",
        ),
    ),
)

"""What a decoded token waits for: reading the cache, or computing with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from headwise.costs import AttentionNumbers, attention_work, block_parameters, grid, site_cache
from headwise.kernels import attention
from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, MARKERS, ORANGE, RED, number_axis, panels
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


def site(kv_heads: int) -> AttentionNumbers:
    """The layer as the ledger knows it."""
    return grid(HEADS * WIDTH, HEADS, 1, kv_heads=kv_heads).attention[0]


def cache_bytes(kv_heads: int, context: int) -> int:
    """Bytes that one token waits for: keys and values of every KV head, by the ledger."""
    return int(site_cache(site(kv_heads), 1, context, 0, BYTES).bytes)


def weight_bytes(kv_heads: int) -> int:
    """Bytes of the layer's four projections, by the ledger."""
    block = block_parameters(site(kv_heads))
    return BYTES * (block.q + block.k + block.v + block.o)


def flops(context: int) -> int:
    """Scores and mixing of one query of every head, by the ledger; a multiply-add counts as 2."""
    work = attention_work(site(HEADS), 1, 1, context)
    return work.scores + work.mixing


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


def times(context: int, repeats: int, seed: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of decode steps and of reading the same cache, for every number of KV heads, all interleaved."""
    random = generator(seed)
    q = torch.randn(1, HEADS, 1, WIDTH, generator=random)
    caches = {g: [torch.randn(1, g, context, WIDTH, generator=random) for _ in range(2)] for g in KV_HEADS}
    found: dict[int, dict[str, list[float]]] = {g: {"decode": [], "stream": []} for g in KV_HEADS}
    for repeat in range(repeats + 1):
        for g, (k, v) in caches.items():
            one = {"decode": seconds(partial(decode, q, k, v)), "stream": seconds(partial(stream, k, v))}
            if repeat:  # the first round warms up
                for name, value in one.items():
                    found[g][name].append(value)
    return found


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Paired ratios."""
    return [a / b for a, b in zip(above, below, strict=True)]


def measure(seed: int, size: str) -> Findings:
    """Every number of KV heads at every context."""
    found = Findings()
    contexts, repeats = CONTEXTS[size], REPEATS[size]
    with torch.no_grad():
        table = {n: times(n, repeats, seed) for n in contexts}
        peak = peak_flops()
    longest = contexts[-1]
    last = table[longest]
    real = KVCache(1, longest, n_kv_heads=8, d_k=WIDTH, d_v=WIDTH).nbytes
    found.add("bytes_ratio", real / cache_bytes(8, longest), meaning="bytes of the real cache / bytes by the ledger")
    for g in KV_HEADS:
        over = ratios(last[g]["decode"], last[g]["stream"])
        found.add(
            f"over_bound_{g}", over, meaning=f"decode time / time to read the cache, {g} KV heads, {longest} tokens"
        )
    for g in KV_HEADS[1:]:
        gain = [ratio / (HEADS / g) for ratio in ratios(last[HEADS]["decode"], last[g]["decode"])]
        found.add(f"share_of_gain_{g}", gain, meaning=f"speed-up from {HEADS} to {g} KV heads / {HEADS // g}")
    bandwidth = [cache_bytes(HEADS, longest) / value for value in last[HEADS]["stream"]]
    found.add("bandwidth", [rate / 1e9 for rate in bandwidth], "GB/s", "reading K and V once")
    found.add("peak", peak / 1e9, "GFLOP/s", "large float32 matrix product")
    found.add(
        "turning_group",
        BYTES / 2 * peak / statistics.median(bandwidth),
        meaning="query heads per KV head at which FLOPs take as long as reading",
    )
    for g in (HEADS, 8):
        even = weight_bytes(g) / cache_bytes(g, 1)
        found.add(
            f"even_context_{g}",
            even,
            "tokens",
            f"at which the cache is as large as the layer's weights, {g} KV heads",
        )
    at_peak = flops(longest) / peak / statistics.median(last[1]["decode"])
    found.add(
        "share_of_peak_1",
        at_peak,
        meaning=f"time of the FLOPs at that rate / decode time, 1 KV head, {longest} tokens",
    )
    median = {g: {name: [statistics.median(table[n][g][name]) for n in contexts] for name in last[g]} for g in KV_HEADS}
    found.series = {"contexts": list(contexts), "compute": [flops(n) / peak for n in contexts]}
    for g in KV_HEADS:
        found.series.update({f"{name} {g}": values for name, values in median[g].items()})
    q = {name: quantity.over("median") for name, quantity in found.quantities.items()}
    found.headline = (
        f"decode time over reading time: {q['over_bound_32']:.2f}, {q['over_bound_8']:.2f} and"
        f" {q['over_bound_1']:.1f} with 32, 8 and 1 KV heads"
    )
    found.finding = _finding(q, longest, {g: 1e3 * median[g]["decode"][-1] for g in KV_HEADS})
    return found


def _finding(q: Mapping[str, float], longest: int, ms: Mapping[int, float]) -> str:
    return (
        f"At {longest} cached tokens a step takes {ms[32]:.1f}, {ms[8]:.1f} and {ms[1]:.2f} ms with 32, 8 and 1 KV"
        f" heads: {q['over_bound_32']:.2f}, {q['over_bound_8']:.2f} and {q['over_bound_1']:.1f} times the time to"
        f" read the cache once. From 32 to 8 KV heads the speed-up is {q['share_of_gain_8']:.0%} of the 4 that the"
        f" bytes promise, to 1 {q['share_of_gain_1']:.0%} of the 32. Each cached number serves 2 FLOPs per query head"
        f" of its group, so on paper reading and computing balance at {q['turning_group']:.0f} query heads per KV"
        f" head ({q['bandwidth']:.0f} GB/s, {q['peak']:.0f} GFLOP/s). With one KV head for 32 query heads neither"
        f" explains the step: reading takes {1 / q['over_bound_1']:.0%} of its time, the FLOPs at full rate, the same"
        f" for every number of KV heads, {q['share_of_peak_1']:.0%}. Below {q['even_context_32']:.0f} tokens (with 8"
        f" KV heads {q['even_context_8']:.0f}) the layer's weights, which every step reads too, are larger than its"
        " cache."
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
    number_axis(left.xaxis, series["contexts"])
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
        " of its FLOPs at the rate of a large matrix product. Medians of paired ratios of interleaved calls; behind"
        " ± is the spread over calls. Times vary from machine to machine and with other load; the bytes do not."
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
                "median",
                "<=",
                2.0,
                "with a single KV head too, a step takes at most twice the time to read the cache",
            ),
            Threshold(
                "share_of_gain_1", "median", ">=", 0.5, "32 times fewer KV heads make it at least 16 times faster"
            ),
        ),
        conditioned=(
            Threshold(
                "bytes_ratio", "max", "<=", 1.0, "the cache has the bytes of its KV heads, not of its query heads"
            ),
            Threshold(
                "over_bound_32",
                "median",
                "<=",
                2.0,
                "with as many KV heads as query heads a step takes at most twice the time to read the cache",
            ),
            Threshold("share_of_gain_8", "median", ">=", 0.5, "4 times fewer KV heads make it at least twice as fast"),
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

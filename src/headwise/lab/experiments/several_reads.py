"""Three reads at once: heads against width, at equal parameters and equal steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, ORANGE, panels
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator, seeds
from headwise.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

READS, ADDRESS, CONTENT = 3, 16, 8
D_MODEL, D_CONTEXT = READS * ADDRESS, ADDRESS + CONTENT
NAMES, KEYS, QUERIES, BATCH = 32, 16, 16, 16
HEAD_COUNTS = (1, 2, 3, 4, 8, 16, 24)
STEPS: Final = {"full": 400, "small": 150}
SEEDS: Final = {"full": 3, "small": 1}
SMALL_COUNTS = (1, 3)
RATE = 0.02

#: How a task uses the three contents: row r, column j is the factor of content j in the r-th third of the target.
USES: Final[dict[str, tuple[tuple[float, float, float], ...]]] = {
    "mix": ((1 / 2, 1 / 3, 1 / 6), (0, 0, 0), (0, 0, 0)),
    "signed": ((1, -2, 1), (0, 0, 0), (0, 0, 0)),
    "apart": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}


def floor(task: str, heads: int) -> float:
    """Share of the target's energy that no layer of ``heads`` heads can recover, however wide.

    Contents are independent, and a head applies one linear map to one mixture with weights >= 0 of what it reads: it
    can serve contents that are used through the same map with the same sign.
    """
    different_uses = {"mix": 1, "signed": 2, "apart": 3}[task]
    if heads >= different_uses:
        return 0.0
    return 1 / 3 if task == "signed" else 1 - heads / READS


def addresses(random: torch.Generator) -> Tensor:
    """A fixed random address of norm sqrt(ADDRESS) for every name."""
    vectors = torch.randn(NAMES, ADDRESS, generator=random)
    return functional.normalize(vectors, dim=-1) * math.sqrt(ADDRESS)


def examples(task: str, book: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, Q, 48) that name three keys each, keys with their contents (B, K, 32), and targets (B, Q, 48)."""
    names = torch.rand(BATCH, NAMES, generator=random).argsort(-1)[:, :KEYS]
    content = torch.randn(BATCH, KEYS, CONTENT, generator=random)
    context = torch.cat([book[names], content], -1)
    wanted = torch.rand(BATCH, QUERIES, KEYS, generator=random).argsort(-1)[..., :READS]
    row = torch.arange(BATCH)[:, None, None]
    queries = book[names[row, wanted]].flatten(2)
    use = torch.tensor(USES[task], dtype=torch.float32)
    targets = torch.einsum("rj,bqjc->bqrc", use, content[row, wanted]).flatten(2)
    return queries, context, targets


def read(layer: MultiHeadAttention, queries: Tensor, context: Tensor) -> Tensor:
    """What the layer writes into the channels that the target uses."""
    found: Tensor = layer(queries, context)[..., : READS * CONTENT]
    return found


def train(task: str, heads: int, seed: int, steps: int) -> float:
    """Share of the target's energy that a trained layer leaves, on fresh examples."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(D_MODEL, heads, d_context=D_CONTEXT)
    random = generator(seed)
    book = addresses(random)
    optimiser = torch.optim.Adam(layer.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in range(steps):
        queries, context, targets = examples(task, book, random)
        loss = (read(layer, queries, context) - targets).square().mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        left = energy = 0.0
        for _ in range(4):
            queries, context, targets = examples(task, book, random)
            left += float((read(layer, queries, context) - targets).square().sum())
            energy += float(targets.square().sum())
    return left / energy


def measure(seed: int, size: str) -> Findings:
    """Every task with every number of heads, several seeds each."""
    found = Findings()
    counts = HEAD_COUNTS if size == "full" else SMALL_COUNTS
    repeats = seeds(seed, SEEDS[size])
    left = {
        (task, heads): [train(task, heads, each, STEPS[size]) for each in repeats] for task in USES for heads in counts
    }
    layer = MultiHeadAttention(D_MODEL, 1, d_context=D_CONTEXT)
    words = {
        "mix": "mixed with weights 1/2, 1/3, 1/6",
        "signed": "added with factors 1, -2, 1",
        "apart": "kept apart",
    }
    for task, how in words.items():
        found.add(
            f"wide_{task}", left[task, 1], meaning=f"share of the target not recovered, one wide head, contents {how}"
        )
        found.add(f"three_{task}", left[task, 3], meaning=f"the same with 3 heads, contents {how}")
        found.series[task] = {
            "mean": [sum(left[task, heads]) / len(repeats) for heads in counts],
            "low": [min(left[task, heads]) for heads in counts],
            "high": [max(left[task, heads]) for heads in counts],
            "floor": [floor(task, heads) for heads in counts],
        }
    found.add("most_apart", left["apart", counts[-1]], meaning=f"the same with {counts[-1]} heads, kept apart")
    found.add(
        "parameters",
        layer.W_Q.numel() + layer.W_K.numel() + layer.W_V.numel() + layer.W_O.numel(),
        "",
        "in every layer",
    )
    found.series["heads"] = list(counts)
    q = found.quantities
    found.headline = (
        f"left of the target, 1 head against 3: kept apart {q['wide_apart'].mean:.2f} and"
        f" {q['three_apart'].mean:.2f}, averaged {q['wide_mix'].mean:.2f} and {q['three_mix'].mean:.2f}"
    )
    found.finding = (
        f"Where three contents must be kept apart, one wide head leaves {q['wide_apart'].text()} of the target (no"
        f" such layer can do better than {floor('apart', 1):.3f}) and three heads leave {q['three_apart'].text()}."
        f" With factors 1, -2, 1 it leaves {q['wide_signed'].text()} (bound {floor('signed', 1):.3f}), three heads"
        f" {q['three_signed'].text()}. But where the three are only averaged, with different weights, the wide head"
        f" manages: {q['wide_mix'].text()}. More heads stop helping when they become too narrow to tell 32 addresses"
        f" of 16 dimensions apart: at {counts[-1]} heads of width {D_MODEL // counts[-1]}, {q['most_apart'].text()}"
        " is left."
    )
    return found


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """What is left against the number of heads, one panel per task, with the bound."""
    titles = {"apart": "Kept apart", "signed": "Added with factors 1, -2, 1", "mix": "Averaged: 1/2, 1/3, 1/6"}
    places = range(len(series["heads"]))
    for axes, (task, title), colour in zip(panels(figure, 3), titles.items(), (BLUE, GREEN, ORANGE), strict=True):
        one = series[task]
        axes.plot(
            places, one["floor"], color=GREY, linestyle=":", drawstyle="steps-mid", label="no layer can do better"
        )
        axes.plot(places, one["mean"], "o-", color=colour, label="trained, mean of seeds")
        axes.vlines(places, one["low"], one["high"], color=colour, linewidth=3, alpha=0.4)
        axes.set_xticks(places, [str(heads) for heads in series["heads"]])
        axes.set(title=title, xlabel="heads (equal parameters)", ylim=(-0.02, 0.75))
        axes.legend()
    figure.axes[0].set_ylabel("share of the target not recovered")


EXPERIMENT = Experiment(
    name="several-reads",
    method=(
        f"A single cross-attention layer with d_model {D_MODEL}. Each query names three of {KEYS} keys by their"
        f" addresses; each key carries a random content of {CONTENT} numbers. The target uses the three contents in"
        f" one of three ways. Layers with 1 to {HEAD_COUNTS[-1]} heads have the same parameters and take the same"
        f" {STEPS['full']} steps of Adam; the error is taken on fresh examples, as a share of the target's energy."
        " The bound follows from what a head is: one linear map applied to one mixture with weights >= 0."
    ),
    terms={
        "used in different ways": (
            "through different maps (here: written to different channels), or with factors of different sign"
        )
    },
    rule=Rule(
        stated=(
            Threshold(
                "wide_mix", "min", ">=", 0.25, "the wide head cannot mix three reads with different weights either"
            ),
        ),
        conditioned=(
            Threshold("wide_apart", "min", ">=", 0.5, "the wide head cannot keep three reads apart"),
            Threshold("three_apart", "mean", "<=", 0.1, "three heads can"),
            Threshold("wide_signed", "min", ">=", 0.25, "the wide head cannot add one read and subtract another"),
            Threshold("three_signed", "mean", "<=", 0.1, "three heads can"),
        ),
        condition=(
            "the reads are used in different ways (other maps or other signs); an average of several positions needs"
            " one head only"
        ),
    ),
    measure=measure,
    draw=draw,
    caption="Error against the number of heads; bars span the seeds, the dotted line is the bound.",
    lesson=(
        "Count the different uses, not the positions: that is how many heads a step needs. A few more make training"
        " reliable; many more make each too narrow to find anything."
    ),
    literature=(
        Literature(
            "translation EN-DE: 24.9 BLEU with 1 head, 25.5 with 4, 25.8 with 8 and with 16, 25.4 with 32, at equal"
            " computation",
            "Vaswani et al. 2017, table 3, rows A",
            "most_apart",
        ),
    ),
)

"""Four numbers, two heads: the smallest example in which a split reads two things at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.kernels import attention
from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREY, ORANGE, RED, number_axis, panels
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator, normal, seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

#: The query of the worked example; key A is [1, 0 | 1, 0], key B is [0, 1 | 0, 1].
QUERY = (0.9, 0.1, 0.2, 0.8)
KEYS = ((1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0))
SHARPNESS = (1, 2, 4, 8, 16, 32, 64, 128)


def weights(heads: int, sharpness: float) -> Tensor:
    """The weights on A and B, (heads, 2), with the query multiplied by ``sharpness``."""
    q = torch.tensor(QUERY, dtype=torch.float64).mul(sharpness).view(1, 1, heads, -1).transpose(1, 2)
    k = torch.tensor(KEYS, dtype=torch.float64).view(1, 2, heads, -1).transpose(1, 2)
    _, pattern = attention(q, k, k, weights=True)
    found: Tensor = pattern[0, :, 0]
    return found


def separation(mixing: Tensor) -> float:
    """How well A and B can be told apart in what two slots read: the mixing matrix's smallest singular value.

    0 means that both slots hold the same mixture, 1 that one holds A and the other B.
    """
    two = mixing.expand(2, 2) if mixing.shape[0] == 1 else mixing
    return float(torch.linalg.svdvals(two)[-1])


def recovery_error(mixing: Tensor, seed: int) -> float:
    """Share of the energy of random values of A and B that no W_O brings back from the two slots."""
    values = normal(generator(seed), 2, 4096)
    two = mixing.expand(2, 2) if mixing.shape[0] == 1 else mixing
    read = two @ values
    back = values @ read.T @ torch.linalg.pinv(read @ read.T, rtol=1e-9)
    return float((values - back @ read).square().sum() / values.square().sum())


def measure(seed: int, size: str) -> Findings:
    """The example at sharpness 1, then sharper."""
    found = Findings()
    two, one = weights(2, 1), weights(1, 1)
    repeats = seeds(seed, 5 if size == "full" else 2)
    found.add("head_1_on_A", float(two[0, 0]), meaning="weight of head 1 on A")
    found.add("head_2_on_B", float(two[1, 1]), meaning="weight of head 2 on B")
    found.add("single_on_favourite", float(one.max()), meaning="weight of the single head on its favourite")
    found.add("separation_two", separation(two), meaning="smallest singular value of what two heads mix")
    found.add("separation_one", separation(one), meaning="the same for a single head")
    found.add(
        "lost_two",
        [recovery_error(two, each) for each in repeats],
        meaning="share of A's and B's values lost, two heads",
    )
    found.add("lost_one", [recovery_error(one, each) for each in repeats], meaning="the same, a single head")
    sharp = [(weights(2, s), weights(1, s)) for s in SHARPNESS]
    found.add(
        "best_separation_one", max(separation(pair[1]) for pair in sharp), meaning="single head, at any sharpness"
    )
    found.series = {
        "weights": {"head 1": two[0].tolist(), "head 2": two[1].tolist(), "single": one[0].tolist()},
        "sharpness": list(SHARPNESS),
        "head 1 on A": [float(pair[0][0, 0]) for pair in sharp],
        "head 2 on B": [float(pair[0][1, 1]) for pair in sharp],
        "single on A": [float(pair[1][0, 0]) for pair in sharp],
    }
    q = found.quantities
    found.headline = (
        f"weights {q['head_1_on_A'].mean:.3f} on A and {q['head_2_on_B'].mean:.3f} on B; the single head"
        f" {q['single_on_favourite'].mean:.3f} and {1 - q['single_on_favourite'].mean:.3f}"
    )
    found.finding = (
        f"Head 1 puts {q['head_1_on_A'].mean:.3f} on A, head 2 puts {q['head_2_on_B'].mean:.3f} on B; the single head"
        f" gives {q['single_on_favourite'].mean:.3f} to A and the rest to B in every channel. From the two heads W_O"
        f" recovers both values exactly (lost: {q['lost_two'].over('max'):.0e}); from the single head half of their"
        f" energy is gone ({q['lost_one'].text()}). Sharper scores do not help it: at 128 times the query it reads A"
        f" alone ({found.series['single on A'][-1]:.3f}), so it blurs or chooses, but never keeps the two apart."
    )
    return found


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """The weights of the example, and what sharper scores do."""
    left, right = panels(figure, 2)
    names = list(series["weights"])
    for offset, (key, colour) in enumerate((("A", BLUE), ("B", ORANGE))):
        left.bar(
            [at + (offset - 0.5) * 0.36 for at in range(len(names))],
            [series["weights"][name][offset] for name in names],
            width=0.34,
            color=colour,
            label=f"on {key}",
        )
    left.set_xticks(range(len(names)), names)
    left.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    left.set(title="Weights of the worked example", ylabel="weight", ylim=(0, 1))
    left.legend(ncols=2)
    for name, colour, line in (
        ("head 1 on A", BLUE, "o-"),
        ("head 2 on B", ORANGE, "s-"),
        ("single on A", RED, "^--"),
    ):
        right.semilogx(series["sharpness"], series[name], line, base=2, color=colour, label=name)
    number_axis(right.xaxis, series["sharpness"])
    right.set(title="Sharper: the single head chooses", xlabel="query multiplied by", ylabel="weight", ylim=(0.4, 1.02))
    right.legend()


EXPERIMENT = Experiment(
    name="worked-split",
    method=(
        "Two keys, A = [1, 0 | 1, 0] and B = [0, 1 | 0, 1], and the query [0.9, 0.1 | 0.2, 0.8]. Two heads of width 2"
        " score the halves apart (scale 1/sqrt(2)); a single head of width 4 scores the sum (scale 1/sqrt(4)). What"
        " the slots of z hold of A and B is a 2 x 2 mixing matrix; W_O can recover both values exactly when its"
        " smallest singular value is not 0. A single head mixes all its channels alike. The values of A and B are"
        " random (several seeds); the weights are not."
    ),
    terms={"mixing matrix": "row i says how much of A and of B slot i of z holds"},
    rule=Rule(
        (
            Threshold("head_1_on_A", "min", ">=", 0.55, "head 1 prefers A"),
            Threshold("head_2_on_B", "min", ">=", 0.55, "head 2 prefers B"),
            Threshold("single_on_favourite", "max", "<=", 0.55, "the single head hardly prefers either"),
            Threshold("lost_two", "max", "<=", 1e-9, "both values come back from two heads"),
            Threshold("lost_one", "min", ">=", 0.25, "a good part of them does not come back from a single head"),
        )
    ),
    measure=measure,
    draw=draw,
    caption="Left: the weights. Right: the same with the query multiplied, so that the softmax gets sharper.",
    lesson=(
        "Two softmaxes can hold two preferences at the same time. Even soft ones are enough for W_O to keep the two"
        " values apart."
    ),
)

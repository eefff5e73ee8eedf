"""Redundant is not useless: scores of single heads against costs of sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from headwise.kernels import attention
from headwise.lab.covariance import RemovalCost
from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, panels
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator, normal, seeds
from headwise.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

D_MODEL, HEADS, TOKENS = 64, 8, 32
SEQUENCES: Final = {"full": 64, "small": 16}
COPY, USELESS = (0, 1), 7
#: Heads 2 and 3 read what head 4 reads, plus and minus something of their own: head 4 is free, but not the one to take.
TRAP = (4, 2, 3)
FREE = 0.01
REMOVED = 3
CRITERIA = ("norm of W_O", "gate gradient", "alone, no repair", "alone, repaired", "greedy, repaired", "best set")


def plant_copy(layer: MultiHeadAttention, random: torch.Generator) -> None:
    """Head 1 becomes a copy of head 0 (up to 1 % noise) that writes elsewhere; head 7 writes almost nothing."""
    first, second = (layer.heads[head] for head in COPY)
    for name in ("W_Q", "W_K", "W_V"):
        source: Tensor = getattr(first, name)
        noise = normal(random, *source.shape, std=0.01 * float(source.std()))
        getattr(second, name).copy_(source + noise)
    layer.heads[USELESS].W_O.mul_(0.05)


def plant_trap(layer: MultiHeadAttention, random: torch.Generator) -> None:
    """Two heads around a third: z_2 = z_4 + e, z_3 = z_4 - e, all read with the same pattern."""
    centre, plus, minus = (layer.heads[head] for head in TRAP)
    own = normal(random, *centre.W_V.shape, std=0.3 * float(centre.W_V.std()))
    for head, sign in ((plus, 1), (minus, -1)):
        head.W_Q.copy_(centre.W_Q)
        head.W_K.copy_(centre.W_K)
        head.W_V.copy_(centre.W_V + sign * own)


def build(seed: int, planted: str) -> tuple[MultiHeadAttention, Tensor]:
    """A random layer with what is planted in it, and its input."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(D_MODEL, HEADS, dtype=torch.float64)
    random = generator(seed)
    with torch.no_grad():
        layer.W_Q.mul_(2)  # logits of spread 2: patterns that differ
        if planted == "copy":
            plant_copy(layer, random)
        elif planted == "trap":
            plant_trap(layer, random)
    return layer, random_input(random)


def random_input(random: torch.Generator, size: str = "full") -> Tensor:
    """Unit-normal tokens."""
    return normal(random, SEQUENCES[size], TOKENS, D_MODEL)


def outputs(layer: MultiHeadAttention, x: Tensor) -> Tensor:
    """z of every head, (rows, H, d_v)."""
    with torch.no_grad():
        z = attention(*layer.project(x))
    found: Tensor = z.permute(0, 2, 1, 3).flatten(0, 1)
    return found


def gate_gradients(layer: MultiHeadAttention, x: Tensor, seed: int) -> list[float]:
    """Michel et al. (2019): mean over sequences of |d loss / d gate|, for a random linear loss of the output."""
    gates = torch.ones(len(x), HEADS, dtype=x.dtype, requires_grad=True)
    target = normal(generator(seed + 1), len(x), TOKENS, D_MODEL)
    (layer(x, gates=gates) * target).sum().backward()
    assert gates.grad is not None
    return gates.grad.abs().mean(0).tolist()


def lowest(scores: list[float], count: int) -> tuple[int, ...]:
    """The heads with the lowest scores."""
    return tuple(sorted(range(len(scores)), key=scores.__getitem__)[:count])


def choices(layer: MultiHeadAttention, x: Tensor, seed: int) -> tuple[RemovalCost, dict[str, Any]]:
    """For each criterion a function from a number of heads to the heads that it removes."""
    z = outputs(layer, x)
    W_O = layer.W_O.detach()
    cost = RemovalCost(z, W_O)
    plain = RemovalCost(z, W_O, repaired=False)
    norms = [float(head.W_O.detach().norm()) for head in layer.heads]
    scores = dict(zip(CRITERIA[:4], (norms, gate_gradients(layer, x, seed), plain.alone(), cost.alone()), strict=True))
    chosen = {name: [lowest(values, count) for count in range(HEADS)] for name, values in scores.items()}
    chosen["greedy, repaired"] = [cost.greedy(count) for count in range(HEADS)]
    chosen["best set"] = [cost.best(count) for count in range(HEADS)]
    return cost, chosen


def lost(seed: int, planted: str, size: str) -> dict[str, Any]:
    """What each criterion's sets cost after the repair, and how many heads are free alone and together."""
    layer, x = build(seed, planted)
    cost, chosen = choices(layer, x[: SEQUENCES[size]], seed)
    return {
        "lost": {name: [cost(heads) for heads in sets] for name, sets in chosen.items()},
        "free_alone": sum(value <= FREE for value in cost.alone()),
        "free_together": cost.most_within(FREE),
    }


def excess(run: Mapping[str, Any], criterion: str, count: int) -> float:
    """What a criterion's set of ``count`` heads costs over the cheapest set."""
    return float(run["lost"][criterion][count] / max(run["lost"]["best set"][count], 1e-12))


def measure(seed: int, size: str) -> Findings:
    """Three layers over seeds: nothing planted, a pair of copies, a trap for greedy choice."""
    found = Findings()
    repeats = seeds(seed, 8 if size == "full" else 2)
    runs = {planted: [lost(each, planted, size) for each in repeats] for planted in ("none", "copy", "trap")}
    alone = "alone, repaired"
    counts = f"sets of {REMOVED} of {HEADS} heads"
    found.add(
        "excess_none",
        [excess(run, alone, REMOVED) for run in runs["none"]],
        meaning=f"cost of the heads with the lowest scores / cost of the cheapest set, no copies, {counts}",
    )
    found.add(
        "excess_copy",
        [excess(run, alone, REMOVED) for run in runs["copy"]],
        meaning="the same with a planted pair of copies",
    )
    found.add(
        "greedy_copy",
        [excess(run, "greedy, repaired", REMOVED) for run in runs["copy"]],
        meaning="greedy choice, planted copies",
    )
    found.add(
        "michel_copy",
        [excess(run, "gate gradient", REMOVED) for run in runs["copy"]],
        meaning="gate gradients, planted copies",
    )
    found.add(
        "greedy_trap",
        [excess(run, "greedy, repaired", 2) for run in runs["trap"]],
        meaning="greedy choice, planted trap, 2 heads",
    )
    found.add(
        "free_alone",
        [run["free_alone"] for run in runs["copy"]],
        "heads",
        f"can go at a cost of {FREE:.0%} or less, each on its own",
    )
    found.add("free_together", [run["free_together"] for run in runs["copy"]], "heads", "can go together at that cost")
    for planted in ("none", "copy"):
        found.series[planted] = {
            name: [sum(run["lost"][name][count] for run in runs[planted]) / len(repeats) for count in range(HEADS)]
            for name in CRITERIA
        }
    q = found.quantities
    found.headline = (
        f"cost of the {REMOVED} lowest scores over the cheapest set: {q['excess_copy'].text()} with copies,"
        f" {q['excess_none'].text()} without"
    )
    found.finding = (
        f"With a planted pair of copies, {q['free_alone'].mean:.0f} heads are free one at a time,"
        f" {q['free_together'].mean:.0f} of them together. Taking the {REMOVED} lowest scores, even exact ones with"
        f" repair, costs {q['excess_copy'].text()} times as much as the cheapest {REMOVED}; greedy choice, which"
        f" looks again after each removal, {q['greedy_copy'].text()} times; gate gradients, which do not see that"
        f" copies can stand in for each other, {q['michel_copy'].text()} times. Without copies the lowest scores are"
        f" nearly the cheapest set ({q['excess_none'].text()}). Greedy choice has its own trap: where the freest head"
        f" is the one that two others could have been rebuilt from, it pays {q['greedy_trap'].text()} times the best."
    )
    return found


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """What is lost against how many heads are removed, by criterion, without and with copies."""
    axes_of = panels(figure, 2, height=3.5)
    colours = (SKY, ORANGE, PURPLE, RED, GREEN, BLUE)
    lines = ("P:", "s-.", "^:", "D-", "v--", "o-")
    for axes, planted, title in zip(
        axes_of, ("none", "copy"), ("Independent heads", "A planted pair of copies, one useless head"), strict=True
    ):
        for name, colour, line in zip(CRITERIA, colours, lines, strict=True):
            axes.semilogy(
                range(1, HEADS),
                [max(value, 1e-6) for value in series[planted][name][1:]],
                line,
                color=colour,
                label=name,
            )
        axes.axhline(FREE, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(title=title, xlabel="heads removed", ylabel="share of the output's variance lost")
    axes_of[1].legend(loc="lower right")


EXPERIMENT = Experiment(
    name="redundancy",
    method=(
        f"Random layers of d_model {D_MODEL} and {HEADS} heads. Head 1 is made a copy of head 0 (1 % noise in its"
        " weights, another W_O), head 7 writes almost nothing. The cost of a set is what is lost of the layer's"
        " output after W_O of the kept heads has been refitted by least squares: a Schur complement of the"
        " covariance of z. Criteria: norm of W_O, gate gradients, removal of each head alone without and with that"
        " repair, greedy choice, and the cheapest of all sets. In the trap, z_2 = z_4 + e and z_3 = z_4 - e."
    ),
    terms={
        "free": f"costs {FREE:.0%} of the output's variance or less",
        "repair": "least-squares refit of the kept heads' W_O, with an intercept",
        "gate gradient": "mean absolute derivative of a loss by a factor on the head's output",
    },
    rule=Rule(
        stated=(
            Threshold(
                "excess_copy", "mean", "<=", 1.2, "with copies, the lowest scores are within 20 % of the cheapest set"
            ),
        ),
        conditioned=(Threshold("excess_none", "mean", "<=", 1.2, "without copies they are"),),
        condition="no head can stand in for another",
    ),
    measure=measure,
    draw=draw,
    caption="Variance lost after repair, mean over seeds; the dotted line is the limit for free.",
    lesson=(
        "How many heads can go is a property of the set, not of the heads. A head with a low score may be low because"
        " another one does its work."
    ),
    literature=(
        Literature(
            "between 20 % and 40 % of the heads removed by gate gradients without a noticeable loss (BERT, WMT)",
            "Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 4",
        ),
        Literature(
            "38 of 48 encoder heads removed at 0.15 BLEU, chosen together by learned gates",
            "Voita et al. 2019, section 6",
        ),
    ),
)

"""A head that looks everywhere: what it returns, and what can stand in for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from headwise.kernels import attention
from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, ORANGE, panels
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator, normal, seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

TOKENS, WIDTH = 64, 32
PASSAGES: Final = {"full": 96, "small": 48}
SPREADS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
#: The spread of the logits that counts as nearly uniform.
NEARLY = 0.1


@dataclass(frozen=True)
class Setting:
    """Where the head works.

    Attributes:
        topic: share of a value's variance that all tokens of a passage have in common.
        causal: whether a query sees only what came before.
    """

    topic: float
    causal: bool


SETTINGS: Final = {
    "plain": Setting(topic=0.0, causal=False),
    "topics": Setting(topic=0.5, causal=False),
    "causal": Setting(topic=0.0, causal=True),
}


def read(setting: Setting, spread: float, passages: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values (P, N, D) of unit variance, what the head reads of them, and its row entropies (P, N)."""
    random = generator(seed)
    topic = normal(random, passages, 1, WIDTH, std=setting.topic**0.5)
    values = topic + normal(random, passages, TOKENS, WIDTH, std=(1 - setting.topic) ** 0.5)
    q = normal(random, passages, TOKENS, WIDTH) * spread
    k = normal(random, passages, TOKENS, WIDTH)
    z, rows = attention(q[:, None], k[:, None], values[:, None], causal=setting.causal, rows=True)
    return values, z[:, 0], rows.entropy[:, 0]


def stand_ins(setting: Setting, values: Tensor, z: Tensor) -> dict[str, Tensor]:
    """What could replace the head: one constant, and the mean of the values that each query sees."""
    seen = values.cumsum(1) / torch.arange(1, TOKENS + 1)[:, None] if setting.causal else values.mean(1, keepdim=True)
    return {"constant": z.mean((0, 1)).expand_as(z), "mean": seen.expand_as(z)}


def errors(setting: Setting, spread: float, passages: int, seed: int) -> dict[str, float]:
    """Squared error of each stand-in per channel, with values of variance 1; and how far from uniform the rows are."""
    values, z, entropy = read(setting, spread, passages, seed)
    found = {name: float((z - other).square().mean()) for name, other in stand_ins(setting, values, z).items()}
    visible = torch.arange(1, TOKENS + 1).double() if setting.causal else torch.full((TOKENS,), float(TOKENS))
    found["deficit"] = float((visible.log() - entropy).mean())
    several = visible > 1
    found["normalised"] = float((entropy[:, several] / visible[several].log()).mean())
    return found


def measure(seed: int, size: str) -> Findings:
    """Stand-ins at every spread, in every setting."""
    found = Findings()
    repeats = seeds(seed, 5 if size == "full" else 2)
    found.series["spread"] = list(SPREADS)
    nearly: dict[str, list[dict[str, float]]] = {}
    for name, setting in SETTINGS.items():
        runs = {s: [errors(setting, s, PASSAGES[size], each) for each in repeats] for s in {*SPREADS, NEARLY}}
        nearly[name] = runs[NEARLY]
        for key in ("constant", "mean", "deficit", "normalised"):
            found.series[f"{name} {key}"] = [sum(run[key] for run in runs[s]) / len(repeats) for s in SPREADS]
        words = {"plain": "no topics", "topics": "half of the variance shared by a passage", "causal": "causal"}[name]
        found.add(
            f"constant_{name}",
            [run["constant"] for run in nearly[name]],
            meaning=f"error of a constant, {words}, in variances of a value",
        )
        found.add(
            f"mean_{name}",
            [run["mean"] for run in nearly[name]],
            meaning=f"error of the mean of the visible values, {words}",
        )
    every = [run for runs_of in nearly.values() for run in runs_of]
    found.add(
        "deficit",
        [run["deficit"] for run in every],
        "nats",
        "log(visible keys) - entropy of the rows, nearly uniform",
    )
    found.add(
        "mean_any", [run["mean"] for run in every], meaning="error of the mean of the visible values, every setting"
    )
    long = 4096
    found.add(
        "seen_at_0.9",
        long**-0.1,
        meaning=f"share of {long} keys that exp(entropy) amounts to at a normalised entropy of 0.9",
    )
    q = found.quantities
    found.headline = (
        f"error of a constant {q['constant_plain'].mean:.3f}, causal {q['constant_causal'].mean:.3f}, with topics"
        f" {q['constant_topics'].mean:.3f} of a value's variance; of the mean of visible values at most"
        f" {q['mean_any'].over('max'):.0e}"
    )
    found.finding = (
        f"With logits of spread {NEARLY} (rows {q['deficit'].mean:.4f} nats below uniform) the mean of the visible"
        f" values replaces the head with an error of at most {q['mean_any'].over('max'):.1e} of a value's variance,"
        " everywhere. A constant does so only where passages share no topic and every query sees many keys: its"
        f" error is {q['constant_plain'].text()} (1/n = {1 / TOKENS:.4f}), but {q['constant_causal'].text()} under a"
        f" causal mask, whose early rows average few values, and {q['constant_topics'].text()} where half of the"
        f" variance is the passage's own. Normalised entropy misleads on long inputs: 0.9 at {long} keys is a head"
        f" that uses {q['seen_at_0.9'].mean:.0%} of them."
    )
    return found


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """Error of the two stand-ins against how far the rows are from uniform."""
    left, right = panels(figure, 2)
    for axes, key, title in (
        (left, "constant", "Replaced by a constant"),
        (right, "mean", "Replaced by the mean of visible values"),
    ):
        for name, colour, line, label in (
            ("topics", ORANGE, "s-", "passages have topics"),
            ("causal", GREEN, "^-", "causal"),
            ("plain", BLUE, "o-", "neither"),
        ):
            axes.loglog(series[f"{name} deficit"], series[f"{name} {key}"], line, color=colour, label=label)
        axes.axhline(0.05, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(title=title, xlabel="nats below uniform", ylabel="error / variance of a value", ylim=(1e-5, 2))
    left.legend()


EXPERIMENT = Experiment(
    name="uniform-head",
    method=(
        f"One head on passages of {TOKENS} tokens with random values of variance 1. The spread of the logits goes"
        " from 0.05 (nearly uniform) to 4. Three settings: no structure; half of the variance common to the tokens"
        " of a passage; a causal mask. Two stand-ins: the best constant, and the mean of the values that the query"
        " can see (under a causal mask a running mean)."
    ),
    terms={
        "nats below uniform": (
            "log of the number of visible keys minus the row's entropy, which is the KL divergence of the row from"
            " uniform"
        ),
        "normalised entropy": "the entropy divided by that logarithm",
    },
    rule=Rule(
        stated=(
            Threshold("constant_topics", "max", "<=", 0.05, "a constant replaces it where passages have topics"),
            Threshold("constant_causal", "max", "<=", 0.05, "a constant replaces it under a causal mask"),
        ),
        conditioned=(
            Threshold("deficit", "max", "<=", 0.01, "the head is nearly uniform"),
            Threshold("mean_any", "max", "<=", 0.05, "it is the mean of the visible values, in every setting"),
            Threshold("constant_plain", "max", "<=", 0.05, "a constant replaces it where neither is the case"),
        ),
        condition=(
            "the values have no mean that differs between passages, and each query sees many keys (1/n is small)"
        ),
    ),
    measure=measure,
    draw=draw,
    caption="Error against distance from uniform; the dotted line is the threshold of 5 % of a value's variance.",
    lesson=(
        "Before a uniform head is folded into a bias, measure how much its output varies between passages. A running"
        " mean is a cheap stand-in that always fits, but it still has to read the values."
    ),
    literature=(
        Literature(
            "attention patterns replaced by constant ones in pretrained models: little or no drop for half of them, 8"
            " % on average over six tasks for all of them",
            "Hassid et al. 2022, How Much Does Attention Actually Attend?, abstract",
        ),
    ),
)

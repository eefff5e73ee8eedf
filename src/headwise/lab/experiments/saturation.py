"""When a softmax saturates: what gradient still reaches W_Q and W_K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, ORANGE, RED, panels
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator, normal, seeds
from headwise.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

D_MODEL, HEADS, TOKENS = 64, 8, 64
ADVANTAGES = (0.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0)
#: The last two features of x: 1 everywhere, and 1 for token 0 only. They carry the logits that saturate a softmax.
EVERYWHERE, FIRST = D_MODEL - 2, D_MODEL - 1
ARMS = ("wide", "one head", "spread", "every head")


def saturated_heads(arm: str) -> int:
    """How many of the heads get a favourite key."""
    return {"wide": 1, "one head": 1, "spread": HEADS, "every head": HEADS}[arm]


def build(arm: str, advantage: float, seed: int) -> MultiHeadAttention:
    """A random layer in which token 0 has a lead of ``advantage`` nats in the softmaxes of the arm.

    The first column of each head's W_Q and W_K reads only the two extra features, so the rest of the layer is the
    same in every arm and at every advantage. ``spread`` divides the product that saturates the wide head evenly.
    """
    torch.manual_seed(seed)
    layer = MultiHeadAttention(D_MODEL, 1 if arm == "wide" else HEADS, dtype=torch.float64)
    width = D_MODEL // HEADS
    lead = advantage / layer.scale if arm != "spread" else advantage * D_MODEL**0.5 / HEADS
    with torch.no_grad():
        for W in (layer.W_Q, layer.W_K):
            W[EVERYWHERE:] = 0
            W[:, ::width] = 0
        for head in range(saturated_heads(arm)):
            layer.W_Q[EVERYWHERE, head * width] = lead**0.5
            layer.W_K[FIRST, head * width] = lead**0.5
    return layer


def gradients(layer: MultiHeadAttention, seed: int) -> dict[str, float]:
    """Norms of the gradients of a random linear loss, over the weights that the lead does not use."""
    random = generator(seed)
    x = normal(random, 4, TOKENS, D_MODEL)
    x[..., EVERYWHERE:] = 0
    x[..., EVERYWHERE] = 1
    x[:, 0, FIRST] = 1
    target = normal(random, 4, TOKENS, D_MODEL)
    layer.zero_grad()
    (layer(x) * target).sum().backward()
    free = torch.ones(D_MODEL, dtype=torch.bool)
    free[:: D_MODEL // HEADS] = False

    def norm(W: Tensor, columns: Tensor) -> float:
        assert W.grad is not None
        return float(W.grad[:EVERYWHERE, columns].norm())

    everything = torch.ones_like(free)
    return {"q": norm(layer.W_Q, free), "k": norm(layer.W_K, free), "v": norm(layer.W_V, everything)}


def retained(arm: str, seed: int) -> dict[str, list[float]]:
    """Gradient at each advantage, relative to none."""
    norms = [gradients(build(arm, advantage, seed), seed) for advantage in ADVANTAGES]
    return {name: [norm[name] / norms[0][name] for norm in norms] for name in norms[0]}


def measure(seed: int, size: str) -> Findings:
    """Every arm over seeds."""
    found = Findings()
    repeats = seeds(seed, 5 if size == "full" else 2)
    runs = {arm: [retained(arm, each) for each in repeats] for arm in ARMS}
    for arm, words in zip(
        ARMS, ("one wide head", "one of 8 heads", "the same spread over 8 heads", "all 8 heads"), strict=True
    ):
        key = arm.replace(" ", "_")
        for what in ("q", "k"):
            values = [run[what][-1] for run in runs[arm]]
            found.add(
                f"{key}_{what}", values, meaning=f"gradient at W_{what.upper()} that is left at a lead of 20, {words}"
            )
        found.series[arm] = [sum(run["q"][i] for run in runs[arm]) / len(repeats) for i in range(len(ADVANTAGES))]
    found.add("wide_v", [run["v"][-1] for run in runs["wide"]], meaning="the same at W_V, one wide head")
    found.series["advantage"] = list(ADVANTAGES)
    q = found.quantities
    found.headline = (
        f"gradient left at W_Q: {q['wide_q'].mean:.0e} in one wide head, {q['one_head_q'].text()} with 1 of 8 heads"
        f" saturated, {q['every_head_q'].mean:.0e} with all 8"
    )
    found.finding = (
        f"With a lead of 20 nats for one key, {q['wide_q'].mean:.1e} of the gradient at W_Q and"
        f" {q['wide_k'].mean:.1e} of that at W_K are left in the wide head (at W_V {q['wide_v'].text()}: only Q and K"
        f" freeze). If the lead sits in one of 8 heads, {q['one_head_q'].text()} is left: exactly what the other"
        " seven had. The same product spread over all heads gives each a lead that is sqrt(8) smaller, and"
        f" {q['spread_q'].text()} is left. If every head has its own lead of 20, {q['every_head_q'].mean:.1e} is"
        " left: heads do not protect from saturation as such, they keep it apart."
    )
    return found


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """Gradient at W_Q that is left, against the lead."""
    (axes,) = panels(figure, 1, height=3.3)
    labels = {
        "wide": "one wide head",
        "one head": "8 heads, one saturated",
        "spread": "8 heads, the same product spread over all",
        "every head": "8 heads, each saturated",
    }
    for arm, colour, line in zip(ARMS, (RED, BLUE, GREEN, ORANGE), ("o-", "s-", "D-", "^--"), strict=True):
        axes.semilogy(series["advantage"], series[arm], line, color=colour, label=labels[arm])
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(
        title="Gradient that still reaches W_Q",
        xlabel="lead of one key in a saturated softmax (nats)",
        ylabel="relative to no lead",
    )
    axes.legend()


EXPERIMENT = Experiment(
    name="saturation",
    method=(
        f"Layers of d_model {D_MODEL} with one head or {HEADS}, the same random weights, {TOKENS} tokens, float64."
        " One key gets a lead in the logits through weights reserved for it. The gradient of a random linear loss is"
        " taken at the other weights of W_Q and W_K, and divided by its value without a lead."
    ),
    terms={"lead": "how many nats one key's logit is above where it would be; 20 nats are odds of 5e8 to 1"},
    rule=Rule(
        stated=(Threshold("every_head_q", "min", ">=", 0.5, "heads keep the gradient even if all of them saturate"),),
        conditioned=(
            Threshold("wide_q", "max", "<=", 0.01, "a saturated wide head passes almost no gradient to W_Q"),
            Threshold("wide_k", "max", "<=", 0.01, "nor to W_K"),
            Threshold("one_head_q", "min", ">=", 0.5, "8 heads keep most of it at W_Q when one saturates"),
            Threshold("one_head_k", "min", ">=", 0.5, "and at W_K"),
        ),
        condition="what saturates is confined to some of the heads, or is shared out among them",
    ),
    measure=measure,
    draw=draw,
    caption="Gradient norm at the weights of W_Q that do not make the lead, relative to a lead of 0.",
    lesson=(
        "Splitting puts a fire wall between heads. It does not make any single softmax less likely to saturate: that"
        " is what 1/sqrt(d_k), QK-norm and soft caps are for."
    ),
    literature=(
        Literature(
            'no number: large dot products push "the softmax function into regions where it has extremely small'
            ' gradients"',
            "Vaswani et al. 2017, section 3.2.1",
            "wide_q",
        ),
    ),
)

"""The number of heads as a dial: what turns with it and what does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, ORANGE, RED, number_axis, panels
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator, normal, seeds, slope
from headwise.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

D_MODEL, TOKENS = 512, 128
HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = tuple(D_MODEL // heads for heads in HEAD_COUNTS)


def scale(d_k: int) -> float:
    """The factor on q.k that is on trial."""
    return 1 / math.sqrt(d_k)


def costs(heads: int) -> dict[str, float]:
    """Parameters, counted FLOPs of all matrix products, and exponentials, of one layer on one sequence."""
    layer = MultiHeadAttention(D_MODEL, heads)
    x = torch.zeros(1, TOKENS, D_MODEL)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x, backend="eager")
    return {
        "parameters": sum(parameter.numel() for parameter in layer.parameters()),
        "flops": counter.get_total_flops(),
        "exponentials": heads * TOKENS**2,
    }


def fixed_input(d_k: int, seed: int) -> dict[str, float]:
    """Spread of logits for unit-normal q and k, without and with the factor, and the logit of a key k = q."""
    random = generator(seed)
    q, k = normal(random, 1024, d_k), normal(random, 1024, d_k)
    raw = float((q @ k.T).std())
    return {"raw": raw, "scaled": raw * scale(d_k), "match": float(q.square().sum(-1).mean()) * scale(d_k)}


def at_initialisation(heads: int, seed: int) -> float:
    """Spread of the logits of a freshly initialised layer on unit-normal tokens."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(D_MODEL, heads)
    with torch.no_grad():
        q, k, _ = layer.project(normal(generator(seed), 1, 256, D_MODEL).float())
    return float((q @ k.mT).std() * scale(layer.d_k))


def blindness(heads: int, seed: int) -> tuple[float, float]:
    """Two keys that differ only outside one head's subspace: largest change of its scores, and of the other heads'.

    Both relative to that head's spread of scores.
    """
    torch.manual_seed(seed)
    layer = MultiHeadAttention(D_MODEL, heads, dtype=torch.float64)
    random = generator(seed)
    x = normal(random, 1, 64, D_MODEL)
    with torch.no_grad():
        W_K = layer.heads[0].W_K
        step = normal(random, 1, 64, D_MODEL)
        hidden = step - (step @ torch.linalg.pinv(W_K.T).mT.T) @ W_K.T if heads > 1 else torch.zeros_like(step)
        q, k, _ = layer.project(x)
        _, moved, _ = layer.project(x + hidden)
        change: Tensor = (q @ (moved - k).mT).abs().amax((0, 2, 3)) / (q @ k.mT)[:, 0].std()
    return float(change[0]), float(change[1:].min()) if heads > 1 else 0.0


def measure(seed: int, size: str) -> Findings:
    """Costs at every head count, spreads over seeds."""
    found = Findings()
    repeats = seeds(seed, 5 if size == "full" else 2)
    found.series = {"heads": list(HEAD_COUNTS), "d_k": list(WIDTHS)}
    _add_costs(found)
    _add_logits(found, repeats)
    blind = [blindness(8, each) for each in repeats]
    found.add(
        "blind_change",
        [one for one, _ in blind],
        meaning="change of a head's scores by a step outside its subspace, relative",
    )
    found.add(
        "others_change", [other for _, other in blind], meaning="smallest change that another head sees, relative"
    )
    _tell(found)
    return found


def _add_costs(found: Findings) -> None:
    counted = [costs(heads) for heads in HEAD_COUNTS]
    for key, name in (("parameters", "parameter_change"), ("flops", "flop_change")):
        values = [one[key] for one in counted]
        found.add(
            name,
            max(values) / min(values) - 1,
            meaning=f"largest relative change of {key}, h = 1 to {HEAD_COUNTS[-1]}",
        )
    found.add(
        "exponentials",
        counted[-1]["exponentials"] / counted[0]["exponentials"],
        meaning="softmax work and score memory, h = 64 over h = 1",
    )
    found.series.update({key: [one[key] / counted[0][key] for one in counted] for key in counted[0]})


def _add_logits(found: Findings, repeats: Sequence[int]) -> None:
    fixed = [[fixed_input(d_k, each) for d_k in WIDTHS] for each in repeats]
    slopes = {key: [slope(WIDTHS, [one[key] for one in run]) for run in fixed] for key in ("raw", "scaled", "match")}
    found.add(
        "slope_scaled",
        [abs(value) for value in slopes["scaled"]],
        meaning="|exponent of d_k| in the spread of logits, with the factor",
    )
    found.add("slope_raw", slopes["raw"], meaning="exponent of d_k in the spread of logits, without it")
    found.add(
        "slope_match",
        [abs(value) for value in slopes["match"]],
        meaning="|exponent of d_k| in the logit of a matching key, with it",
    )
    starts = [[at_initialisation(heads, each) for heads in HEAD_COUNTS] for each in repeats]
    found.add(
        "slope_start",
        [abs(slope(WIDTHS, run)) for run in starts],
        meaning="|exponent of d_k| in a fresh layer's spread",
    )
    for key in slopes:
        found.series[key] = [sum(run[i][key] for run in fixed) / len(fixed) for i in range(len(WIDTHS))]
    found.series["start"] = [sum(run[i] for run in starts) / len(starts) for i in range(len(WIDTHS))]


def _tell(found: Findings) -> None:
    q = found.quantities
    found.headline = (
        f"parameters change by {q['parameter_change'].mean:.0%}; spread of logits d_k^{q['slope_scaled'].mean:.2f}"
        f" for independent keys, d_k^{q['slope_match'].mean:.2f} for a matching key"
    )
    found.finding = (
        f"From 1 to {HEAD_COUNTS[-1]} heads parameters and counted FLOPs change by {q['parameter_change'].mean:.0%}"
        f" and {q['flop_change'].mean:.0%}; exponentials and score memory grow {q['exponentials'].mean:.0f}-fold, in"
        f" proportion to h. For independent q and k the spread of q.k grows as d_k^{q['slope_raw'].mean:.2f}, and"
        f" 1/sqrt(d_k) takes that away (exponent at most {q['slope_scaled'].over('max'):.2f}; fresh layer"
        f" {q['slope_start'].over('max'):.2f}). For a key that matches its query it does not: that logit still grows"
        f" as d_k^{q['slope_match'].mean:.2f}, so wide heads are sharper once they have learned. A step outside a"
        f" head's subspace changes its scores by {q['blind_change'].over('max'):.0e}; every other head sees it (at"
        f" least {q['others_change'].mean:.1f} standard deviations): with 8 heads each is blind to 7/8 of the"
        " directions."
    )


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """Costs against h, logits against d_k."""
    left, right = panels(figure, 2, height=3.3)
    for key, colour, line, label in (
        ("exponentials", RED, "^-", "exponentials, score memory"),
        ("flops", BLUE, "o-", "FLOPs of matrix products"),
        ("parameters", ORANGE, "s--", "parameters"),
    ):
        left.loglog(series["heads"], series[key], line, base=2, color=colour, label=label)
    number_axis(left.xaxis, series["heads"])
    number_axis(left.yaxis, series["heads"])
    left.set(title=f"Costs at d_model = {D_MODEL}", xlabel="heads h", ylabel="relative to one head")
    left.legend()
    for key, colour, line, label in (
        ("match", GREEN, "D-", "matching key, q·q / √d_k"),
        ("raw", RED, "^:", "spread of q·k"),
        ("scaled", BLUE, "o-", "spread of q·k / √d_k"),
        ("start", ORANGE, "s--", "spread in a fresh layer"),
    ):
        right.loglog(series["d_k"], series[key], line, base=2, color=colour, label=label)
    number_axis(right.xaxis, series["d_k"])
    number_axis(right.yaxis, (1, 2, 4, 8, 16))
    right.axvspan(64, 128, color=GREY, alpha=0.12, linewidth=0)
    right.text(66, 1.1, "usual d_k", color=GREY, fontsize=8)
    right.set(title="Logits", xlabel="width of a head d_k", ylabel="nats")
    right.legend()


EXPERIMENT = Experiment(
    name="head-count",
    method=(
        f"Layers of d_model {D_MODEL} with 1 to {HEAD_COUNTS[-1]} heads: parameters by counting, FLOPs by torch's own"
        " counter on the eager backend. Logits: standard deviation of q.k for unit-normal q and k of width d_k"
        " (fixed input scale), in a freshly initialised layer on unit-normal tokens, and the logit of a key equal to"
        " its query. Blindness: all keys are moved in directions that one head's W_K maps to 0."
    ),
    terms={
        "spread of the logits": (
            "their standard deviation over queries and keys, in nats: about 1 is soft, 10 is nearly a hard choice"
        ),
        "exponent": "slope of a straight line in the double logarithmic plot",
    },
    rule=Rule(
        stated=(
            Threshold("slope_match", "max", "<=", 0.1, "the logit of a matching key does not depend on d_k either"),
        ),
        conditioned=(
            Threshold("parameter_change", "max", "<=", 0, "parameters stay the same"),
            Threshold("flop_change", "max", "<=", 0, "FLOPs of the matrix products stay the same"),
            Threshold("slope_scaled", "max", "<=", 0.1, "with 1/sqrt(d_k) the spread of logits does not depend on d_k"),
            Threshold("slope_start", "max", "<=", 0.1, "nor does it in a fresh layer"),
        ),
        condition="queries and keys are independent of each other, as they are at initialisation",
    ),
    measure=measure,
    draw=draw,
    caption=(
        "Left: costs relative to one head. Right: logits against the width of a head; the grey band marks d_k = 64 to"
        " 128."
    ),
    lesson=(
        "The dial is free in parameters and matrix products, not in softmax work. 1/sqrt(d_k) fits the first step of"
        " training; for what comes later, 1/d_k would be the scale-free choice."
    ),
    literature=(
        Literature(
            "q.k of independent unit components has variance d_k: exponent 0.5",
            "Vaswani et al. 2017, section 3.2.1, note 4",
            "slope_raw",
        ),
        Literature(
            "1/d_k instead of 1/sqrt(d_k), since q and k become correlated in training",
            "Yang et al. 2022, Tensor Programs V (muP), section 4",
            "slope_match",
        ),
    ),
)

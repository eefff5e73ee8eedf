"""What each product can span: the ranks of scores, patterns and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, number_axis, panels
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import generator, normal, seeds
from headwise.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

D_MODEL, HEADS = 48, 4
D_K = D_MODEL // HEADS
LENGTHS = (6, 12, 24, 48, 96, 192)
FIT_TOKENS = 32
FIT_RANKS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 31)
FIT_STEPS = {"full": 400, "small": 40}


def rank(matrix: Tensor) -> int:
    """Numerical rank in float64: singular values above max(shape) * eps * the largest."""
    return int(torch.linalg.matrix_rank(matrix))


def build(seed: int, combine: str) -> MultiHeadAttention:
    """A random layer in float64."""
    torch.manual_seed(seed)
    return MultiHeadAttention(D_MODEL, HEADS, combine=combine, dtype=torch.float64)


def ranks(seed: int, tokens: int) -> dict[str, float]:
    """Ranks at one length, largest over heads where there are several."""
    x = normal(generator(seed), 1, tokens, D_MODEL)
    concat, mean = build(seed, "concat"), build(seed, "mean")
    with torch.no_grad():
        q, k, _ = concat.project(x)
        _, pattern = concat(x, weights=True)
        terms = concat.results(x)
        return {
            "scores": max(rank(one) for one in (q @ k.mT)[0]),
            "pattern": max(rank(one) for one in pattern[0]),
            "head": max(rank(one) for one in terms[0]),
            "concat": rank(concat(x)[0]),
            "mean": rank(mean(x)[0]),
        }


def targets(seed: int) -> Tensor:
    """Two patterns to imitate: a random dense one (log-weights of spread 2), and a random permutation."""
    random = generator(seed)
    dense = normal(random, FIT_TOKENS, FIT_TOKENS, std=2.0).softmax(-1)
    permutation = torch.eye(FIT_TOKENS, dtype=torch.float64)[torch.randperm(FIT_TOKENS, generator=random)]
    return torch.stack([dense, permutation])


def misfit(target: Tensor, steps: int) -> list[float]:
    """Smallest mean KL divergence (nats) of ``target`` from a softmax of scores of each rank.

    Starts at the truncated SVD of the centred log-weights and is refined with Adam; every rank at once.
    """
    log_target = target.clamp(min=1e-300).log()
    centred = log_target - log_target.mean(-1, keepdim=True)
    U, S, Vh = torch.linalg.svd(centred)
    keep = torch.tensor([[i < r for i in range(FIT_TOKENS)] for r in FIT_RANKS], dtype=torch.float64)
    left = (U * S.sqrt()).expand(len(FIT_RANKS), -1, -1) * keep[:, None, :]
    right = (S.sqrt()[:, None] * Vh).expand(len(FIT_RANKS), -1, -1) * keep[:, :, None]
    left, right = left.clone().requires_grad_(), right.clone().requires_grad_()
    optimiser = torch.optim.Adam([left, right], lr=0.02)
    best = torch.full((len(FIT_RANKS),), math.inf, dtype=torch.float64)
    entropy = -(target * log_target).sum(-1).mean()
    for _ in range(steps):
        scores = (left * keep[:, None, :]) @ (right * keep[:, :, None])
        each = -(target * scores.log_softmax(-1)).sum(-1).mean(-1) - entropy
        best = torch.minimum(best, each.detach())
        optimiser.zero_grad()
        each.sum().backward()
        optimiser.step()
    # A higher rank can do whatever a lower one does.
    return torch.cummin(best.clamp(min=0), 0).values.tolist()


def circle(target: Tensor) -> float:
    """Mean weight on the right key of a permutation, from scores of rank 2: keys on a circle, queries at their keys."""
    angle = torch.arange(FIT_TOKENS, dtype=torch.float64) * (2 * math.pi / FIT_TOKENS)
    keys = torch.stack([angle.cos(), angle.sin()], -1)
    queries = 1000 * keys[target.argmax(-1)]
    scores = queries @ keys.T
    assert rank(scores) == 2
    return float((scores.softmax(-1) * target).sum(-1).mean())


def measure(seed: int, size: str) -> Findings:
    """Ranks at every length, and how well low ranks imitate two patterns."""
    found = Findings()
    repeats = seeds(seed, 5 if size == "full" else 2)
    table = {tokens: [ranks(each, tokens) for each in repeats] for tokens in LENGTHS}
    longest = table[LENGTHS[-1]]
    found.add(
        "score_rank",
        [run["scores"] / D_K for run in longest],
        meaning=f"rank of a head's scores / d_k, n = {LENGTHS[-1]}",
    )
    found.add(
        "concat_rank",
        [run["concat"] / D_MODEL for run in longest],
        meaning="rank of the layer's write / d_model, same n",
    )
    found.add(
        "mean_rank",
        [run["mean"] / D_K for run in longest],
        meaning="rank of the averaged write / (d_model / h), same n",
    )
    short = [run["concat"] / tokens for tokens in LENGTHS if tokens < D_MODEL for run in table[tokens]]
    found.add("short_rank", short, meaning="rank of the layer's write / n, at every n < d_model")
    found.add(
        "pattern_rank", [run["pattern"] / LENGTHS[-1] for run in longest], meaning="rank of a pattern / n, same n"
    )
    found.series = {"tokens": list(LENGTHS), "fit_ranks": list(FIT_RANKS)}
    for key in longest[0]:
        found.series[key] = [sum(run[key] for run in table[n]) / len(repeats) for n in LENGTHS]
    fits = [
        [misfit(target, FIT_STEPS[size]) for target in targets(each)] for each in repeats[: 3 if size == "full" else 1]
    ]
    for at, name in enumerate(("dense", "permutation")):
        found.series[f"fit {name}"] = [sum(fit[at][i] for fit in fits) / len(fits) for i in range(len(FIT_RANKS))]
        needed = [next((r for r, kl in zip(FIT_RANKS, fit[at], strict=True) if kl < 0.01), FIT_TOKENS) for fit in fits]
        found.add(
            f"needed_{name}",
            needed,
            meaning=f"smallest tried rank that imitates the {name} pattern to 0.01 nats, n = {FIT_TOKENS}",
        )
    found.add(
        "circle",
        [circle(targets(each)[1]) for each in repeats],
        meaning="weight on the right key, rank 2, keys on a circle",
    )
    q = found.quantities
    found.headline = (
        f"scores {longest[0]['scores']:.0f} of d_k = {D_K}, write {longest[0]['concat']:.0f} of d_model = {D_MODEL},"
        f" mean of heads {longest[0]['mean']:.0f} of {D_K}"
    )
    found.finding = (
        f"At n = {LENGTHS[-1]} the caps are kept and reached: scores {longest[0]['scores']:.0f} (d_k = {D_K}), layer"
        f" {longest[0]['concat']:.0f} (d_model = {D_MODEL}), mean of heads {longest[0]['mean']:.0f} (d_model / h ="
        f" {D_K}). Below d_model positions the layer's write always has rank n, so d_model is no constraint there."
        f" The softmax lifts the rank: patterns have {q['pattern_rank'].mean:.0%} of n. What low-rank scores cost"
        f" depends on the pattern: a random dense pattern of {FIT_TOKENS} tokens needs rank"
        f" {q['needed_dense'].text()} to come within 0.01 nats, while a permutation needs rank 2 and large scores"
        f" ({q['circle'].mean:.3f} on the right key)."
    )
    return found


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """Ranks against length; misfit against rank."""
    left, right = panels(figure, 2, height=3.4)
    lines = (
        ("pattern", PURPLE, "^-", "pattern of a head"),
        ("concat", BLUE, "o-", "layer's write"),
        ("mean", ORANGE, "s-", "write of the mean of heads"),
        ("scores", RED, "D--", "scores of a head"),
    )
    for key, colour, line, label in lines:
        left.loglog(series["tokens"], series[key], line, base=2, color=colour, label=label)
    number_axis(left.xaxis, series["tokens"])
    number_axis(left.yaxis, series["tokens"])
    for cap, label in ((D_K, "d_k = d_model / h"), (D_MODEL, "d_model")):
        left.axhline(cap, color=GREY, linewidth=0.8, linestyle=":")
        left.text(series["tokens"][-1], cap * 0.78, label, color=GREY, fontsize=8, ha="right")
    left.set(title="Rank against the number of positions", xlabel="positions n", ylabel="numerical rank")
    left.legend()
    right.semilogy(
        series["fit_ranks"],
        [max(v, 1e-6) for v in series["fit dense"]],
        "o-",
        color=BLUE,
        label="random dense pattern",
    )
    right.semilogy(
        series["fit_ranks"],
        [max(v, 1e-6) for v in series["fit permutation"]],
        "s-",
        color=GREEN,
        label="random permutation",
    )
    right.set(
        title=f"Imitating a pattern of {FIT_TOKENS} tokens",
        xlabel="rank of the scores",
        ylabel="KL divergence (nats)",
    )
    right.legend()


EXPERIMENT = Experiment(
    name="rank",
    method=(
        f"Random layers of d_model {D_MODEL} and {HEADS} heads (d_k = d_v = {D_K}) on random inputs of 6 to 192"
        " positions, in float64; numerical rank by singular values. The mean of heads goes through one shared W_O."
        " On the right, scores of a given rank are fitted (SVD, then Adam) to imitate two given patterns."
    ),
    terms={
        "write": "what the layer adds to the residual stream, an n x d_model matrix",
        "KL divergence": "extra nats per query for believing the imitation instead of the pattern",
    },
    rule=Rule(
        (
            Threshold("score_rank", "max", "<=", 1, "no head's scores exceed rank d_k"),
            Threshold("concat_rank", "max", "<=", 1, "the write does not exceed rank d_model"),
            Threshold("concat_rank", "min", ">=", 1, "and reaches it"),
            Threshold("mean_rank", "max", "<=", 1, "the mean of heads does not exceed rank d_model / h"),
            Threshold("short_rank", "min", ">=", 1, "with fewer than d_model positions the cap d_model is not felt"),
        )
    ),
    measure=measure,
    draw=draw,
    caption=(
        "Left: ranks, largest over heads. Right: how well scores of a given rank imitate a pattern; the permutation"
        " can be had at rank 2 with scores too large for this fit to find."
    ),
    lesson=(
        "d_k limits which score matrices a head can make, not how peaked it can look. Averaging heads instead of"
        " concatenating them throws away all but d_model / h directions of the write."
    ),
    literature=(
        Literature(
            "d_k >= n is enough for every positive pattern; for d_k < n there are patterns out of reach",
            "Bhojanapalli et al. 2020, Low-Rank Bottleneck in Multi-head Attention Models, theorem 1",
            "needed_dense",
        ),
    ),
)

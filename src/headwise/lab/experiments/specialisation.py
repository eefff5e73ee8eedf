"""Specialisation emerges: what the heads of a small transformer learn, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from headwise.kernels import Problem, Visible, Wanted, run
from headwise.lab.decoder import D_MODEL, HEADS, LAYERS, Block, Transformer
from headwise.lab.experiment import Experiment, Findings
from headwise.lab.figures import BLUE, GREEN, GREY, ORANGE, RED, panels
from headwise.lab.language import ROLES, Passages, passages
from headwise.lab.outcome import Literature
from headwise.lab.rule import Rule, Threshold
from headwise.lab.sampling import seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

TOKENS, BATCH = 48, 24
RATE = 5e-3
STEPS: Final = {"full": 700, "small": 20}
SEEDS: Final = {"full": 3, "small": 1}
LOOKS = 18
#: A head has a job when this share of its weight, on the job's queries, goes to the right key.
JOB = 0.5


@torch.no_grad()
def look(model: Transformer, text: Passages) -> tuple[Tensor, Tensor]:
    """Each head's mean weight on each role's key, (P, L * H), and the patterns (L, B, H, N, N)."""
    x = model.embed(text.tokens)
    scores, patterns = [], []
    wanted = Wanted(pairs=text.targets, weights=True)
    for block in model.blocks:
        assert isinstance(block, Block)
        q, k, v = block.attention.project(block.norm_attention(x))
        answer = run(Problem(q, k, v, Visible(causal=True)), wanted)
        assert answer.rows is not None
        assert answer.rows.pairs is not None
        assert answer.weights is not None
        there = (text.targets >= 0)[:, :, None, :]
        scores.append((answer.rows.pairs * there).sum((1, 3)) / there.sum((1, 3)))
        patterns.append(answer.weights)
        x = block(x)
    return torch.cat(scores, 1), torch.stack(patterns)


@torch.no_grad()
def losses(model: Transformer, text: Passages, gates: Tensor | None = None) -> list[float]:
    """Mean loss (nats) of the token after each role's queries; of every token for ``previous``."""
    logits = model(text.tokens[:, :-1], gates)
    each = functional.cross_entropy(logits.flatten(0, 1), text.tokens[:, 1:].flatten(), reduction="none")
    each = each.view(text.tokens.shape[0], -1)
    return [float(each[target[:, :-1] >= 0].mean()) for target in text.targets]


def divergence(p: Tensor, q: Tensor) -> float:
    """Mean Jensen-Shannon divergence of two heads' rows, in nats: 0 the same, log 2 nothing in common."""
    middle = (p + q) / 2
    entropies = [-torch.special.entr(x).sum(-1) for x in (p, q, middle)]
    return float(((entropies[0] + entropies[1]) / 2 - entropies[2]).clamp(min=0).mean())


@dataclass
class History:
    """What was seen in one training run.

    Attributes:
        steps: when it was looked at.
        scores: (P, L * H) at each look.
        losses: per role at each look.
        patterns: (L, B, H, N, N) at the end.
        without: (P, P): rise of each role's loss (columns) when the best head of a role (rows) is switched off.
    """

    steps: list[int] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    patterns: Tensor = field(default_factory=lambda: torch.empty(0))
    without: list[list[float]] = field(default_factory=list)


def train(seed: int, steps: int) -> History:
    """Train one model and watch its heads."""
    torch.manual_seed(seed)
    model = Transformer()
    text = passages(48, TOKENS, seed=seed * 1_000_003 + 999_999)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=max(steps, 2), pct_start=0.1)
    history = History()
    every = max(1, steps // LOOKS)
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            history.steps.append(step)
            history.scores.append(look(model, text)[0])
            history.losses.append(losses(model, text))
        if step == steps:
            break
        tokens = passages(BATCH, TOKENS, seed=seed * 1_000_003 + step).tokens
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    _, history.patterns = look(model, text)
    for scores in history.scores[-1]:
        gates = torch.ones(LAYERS * HEADS)
        gates[int(scores.argmax())] = 0
        off = losses(model, text, gates.view(LAYERS, HEADS))
        history.without.append([after - before for after, before in zip(off, history.losses[-1], strict=True)])
    return history


def first_step(history: History, role: int) -> float:
    """The first look at which some head has the job, or NaN."""
    return next(
        (float(step) for step, scores in zip(history.steps, history.scores, strict=True) if scores[role].max() >= JOB),
        float("nan"),
    )


def closest(history: History) -> float:
    """Smallest divergence between two heads of a layer."""
    return min(
        divergence(layer[:, a], layer[:, b]) for layer in history.patterns for a, b in combinations(range(HEADS), 2)
    )


def measure(seed: int, size: str) -> Findings:
    """Train several models; count jobs and who has them."""
    found = Findings()
    runs = [train(each, STEPS[size]) for each in seeds(seed, SEEDS[size])]
    last = [history.scores[-1] for history in runs]
    jobs = [scores >= JOB for scores in last]
    found.add(
        "emerged", [float(one.any(1).sum()) for one in jobs], "jobs", f"of {len(ROLES)} that some head has at the end"
    )
    found.add(
        "start",
        [float(history.scores[0].max()) for history in runs],
        meaning="largest share at any job before training",
    )
    for at, role in enumerate(ROLES):
        found.add(
            f"best_{role}", [float(scores[at].max()) for scores in last], meaning=f"largest share at the end, {role}"
        )
    heads = LAYERS * HEADS
    found.add(
        "jobless", [float((~one.any(0)).sum()) for one in jobs], "heads", f"of {heads} that have none of the jobs"
    )
    found.add(
        "sharing",
        [float((one.sum(1) - 1).clamp(min=0).sum()) for one in jobs],
        "heads",
        "beyond the first that have the same job",
    )
    found.add("several", [float((one.sum(0) > 1).sum()) for one in jobs], "heads", "that have more than one job")
    _add_uses(found, runs)
    found.series = {
        "steps": runs[0].steps,
        **{
            role: [[float(scores[at].max()) for scores in history.scores] for history in runs]
            for at, role in enumerate(ROLES)
        },
        "final": last[0].tolist(),
        "losses": runs[0].losses,
    }
    q = found.quantities
    found.headline = (
        f"{q['emerged'].mean:.3g} of {len(ROLES)} jobs find a head; of {LAYERS * HEADS} heads"
        f" {q['jobless'].text().removesuffix(' heads')} without a job, {q['sharing'].text().removesuffix(' heads')}"
        " with another head's"
    )
    found.finding = _finding(found)
    return found


def _add_uses(found: Findings, runs: Sequence[History]) -> None:
    """What the model loses without a head, how alike heads are, and when jobs were first done."""
    induction = ROLES.index("induction")
    found.add(
        "needs_previous",
        [history.without[ROLES.index("previous")][induction] for history in runs],
        "nats",
        "rise of the loss on repeated tokens when the best previous-token head is switched off",
    )
    found.add(
        "needs_induction",
        [history.without[induction][induction] for history in runs],
        "nats",
        "the same for the best induction head",
    )
    found.add(
        "loss_induction",
        [history.losses[-1][induction] for history in runs],
        "nats",
        "loss on repeated tokens at the end",
    )
    found.add(
        "closest",
        [closest(history) for history in runs],
        "nats",
        "smallest Jensen-Shannon divergence of two heads of a layer",
    )
    for role in ("previous", "induction"):
        values = [first_step(history, ROLES.index(role)) for history in runs]
        found.add(f"step_{role}", values, "steps", f"until some head has the job {role}")


def _finding(found: Findings) -> str:
    q = found.quantities
    best = ", ".join(f"{role} {q[f'best_{role}'].text()}" for role in ROLES)
    count = {name: q[name].text().removesuffix(" heads") for name in ("jobless", "sharing", "several")}
    return (
        f"Before training no head gives more than {q['start'].over('max'):.2f} of its weight to any job's key; after"
        f" {found.series['steps'][-1]} steps {q['emerged'].text()} have a head (largest shares: {best})."
        " Previous-token and induction heads come late and together, first seen at step"
        f" {q['step_previous'].mean:.0f} and {q['step_induction'].mean:.0f}. They are used: without the best"
        " previous-token head, whose job lies in the first copy of a block, the loss on the second copy rises by"
        f" {q['needs_previous'].text()}, from {q['loss_induction'].text()}, as it must if an induction head a layer"
        f" above reads what it wrote; without the best induction head it rises by {q['needs_induction'].text()}."
        " Specialisation emerges, then, seen from the jobs; seen from the heads it does not: of"
        f" {LAYERS * HEADS} heads {count['jobless']} have none of the four jobs, {count['sharing']} have a job that"
        f" another one already has, and {count['several']} have more than one."
    )


def draw(figure: Figure, series: Mapping[str, Any]) -> None:
    """Jobs over training, and who has them at the end."""
    left, right = panels(figure, 2, height=3.5)
    for role, colour in zip(ROLES, (GREY, ORANGE, GREEN, BLUE), strict=True):
        for number, line in enumerate(series[role]):
            left.plot(
                series["steps"],
                line,
                color=colour,
                linewidth=1.4 if number else 2.2,
                alpha=0.5 if number else 1,
                label=None if number else role,
            )
    left.axhline(JOB, color=RED, linewidth=0.8, linestyle=":")
    left.set(
        title="Best head at each job, one line per seed",
        xlabel="training steps",
        ylabel="share of weight on the right key",
        ylim=(0, 1),
    )
    left.legend()
    final = series["final"]
    right.imshow(final, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, values in enumerate(final):
        for column, value in enumerate(values):
            right.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="black" if value > 0.6 else "white",
            )
    right.grid(False)
    right.set_yticks(range(len(ROLES)), ROLES)
    right.set_xticks(range(LAYERS * HEADS), [f"{at // HEADS}.{at % HEADS}" for at in range(LAYERS * HEADS)])
    right.set(title="Who does what at the end (first seed)", xlabel="layer.head")


EXPERIMENT = Experiment(
    name="specialisation",
    method=(
        f"A decoder of {LAYERS} layers with {HEADS} heads each (d_model {D_MODEL}, rotary positions) learns to"
        " predict the next token of a synthetic language: random letters with blocks that come twice, brackets whose"
        " type has to be named after they close (nested up to 2), and one rare token per passage that has to be"
        f" repeated when asked for. {STEPS['full']} steps of Adam, {SEEDS['full']} seeds. The measure of a job is a"
        " head's mean weight on the key that the job names, over the queries that have one, on passages never"
        " trained on; it comes from the same kernels as a scan's pattern measures. Then single heads are switched"
        " off with a gate."
    ),
    terms={
        "job": f"a rule that names one key per query; a head has it from a mean weight of {JOB} on",
        "previous": "within the first copy of a block: the token before",
        "partner": "at a closing bracket: its opening bracket",
        "rare": "at the asking token: the passage's rare token",
        "induction": "within the second copy of a block: the token that followed this one in the first copy",
    },
    rule=Rule(
        stated=(
            Threshold("start", "max", "<=", 0.25, "before training no head does any of the jobs"),
            Threshold("emerged", "min", ">=", 3, "after it at least 3 of the 4 jobs have a head, in every seed"),
            Threshold(
                "needs_previous",
                "min",
                ">=",
                0.1,
                "the model needs the head it has: without it, repeats are predicted worse",
            ),
            Threshold("jobless", "max", "<=", 0, "every head has one of the jobs"),
            Threshold("sharing", "max", "<=", 0, "no two heads have the same job"),
        ),
    ),
    measure=measure,
    draw=draw,
    caption="Left: the largest share over heads, step by step. Right: all heads of the first seed after training.",
    lesson=(
        "Look for the jobs of a model, and then for all heads that have a part in them. Removing one of two heads"
        " that share a job tells little about it."
    ),
    changed=(
        "The first rule called the outcome 'holds under a condition' where jobs find heads but heads have no job of"
        " their own. That is another claim, not a condition of this one, so it now counts against it. The thresholds"
        " are the same."
    ),
    literature=(
        Literature(
            "induction heads form in a sudden phase early in training, in models of two layers and more, after a"
            " previous-token head in an earlier layer",
            "Olsson et al. 2022, In-context Learning and Induction Heads",
            "step_induction",
        ),
        Literature(
            "heads of the same layer often behave alike (clusters by Jensen-Shannon divergence)",
            "Clark et al. 2019, section 6",
            "closest",
        ),
        Literature(
            "positional, syntactic and rare-token heads; the other heads can mostly go",
            "Voita et al. 2019, section 5",
            "jobless",
        ),
    ),
)

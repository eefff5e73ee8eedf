"""The reference page of measures, made from what the measures say about themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwise.heads import MeasureInfo
from headwise.measures.conformance import CHECKS
from headwise.measures.importance import ABLATIONS, LOSSES, NextToken, ablation_info, gradient_infos
from headwise.measures.registry import GROUPS

__all__ = ["reference_page"]

_INTRODUCTION = """# Measures

This page is generated from the measures themselves (`headwise.measures.reference_page`).

A number per head has a unit, a range and, where one end is better, a direction. Beside the mean stand the population
standard deviation and the number of rows. A *row* is a query row of a passage for the measures of a scan, and an
example for importance. Where a measure means nothing at a site, it is absent there and the table says why. A *pooled*
number depends on all rows together; tables that have one cannot be merged.

`hw.scan(model, texts, measures=[...])` and `headwise scan --measures NAMES` take names of measures, names of groups,
and (in Python) measures of your own."""

_GROUP_WORDS = {
    "pattern": "what a head looks at and how much it writes. The default of a scan",
    "rank": "what its weights and its scores can span. Singular values come from the factors in float64",
    "replaceable": "how much of its output something simpler could replace",
    "spread": "how far its logits lie apart. A second product of queries and keys, in blocks: as dear as attention",
}

_IMPORTANCE = """## Importance

`hw.importance(model, texts, method=..., loss=...)`, `headwise importance`. One number per head and example; the loss
of an example is summed over its tokens (`per="token"`: averaged). `gate_gradient` and `fisher` come from one backward
pass with a gate of 1 per head and example. Ablation replaces one head at a time and runs the model from its layer on;
what lies below is taken from the unchanged pass."""

_LOSSES = """### Losses

`loss="auto"` takes `labels` where the inputs bring them, else what the model was made for (`next_token`,
`masked_token`, `target`), else `fidelity_cosine` for ablation and `projection` for gradients. `"module:function"` or
a function `(outputs, batch) -> (batch,)` is a loss of your own.

| name | unit | what |
|---|---|---|
"""

_STATISTICS = """## Covariances

`hw.statistics(model, texts)`, `headwise statistics`: for every layer the mean and the centred covariance C of its
concatenated head outputs, in float64, over all rows but padding; with `gradients=True` also G = E[g g^T], g the loss
gradient at the layer's output; and the mean squared norm of the residual stream at the layer's input. One safetensors
file (docs/format.md). Two files of different data merge exactly."""

_REDUNDANCY = """## Redundancy

`hw.redundancy(model, texts)`, `headwise redundancy`, for every two heads:

| what | range | how |
|---|---|---|
| `js` | 0 alike, 1 disjoint | Jensen-Shannon distance of patterns |
| `cka` | 0 unrelated, 1 alike | linear CKA of outputs (Kornblith et al. 2019) |

The Jensen-Shannon distance is the square root of the mean divergence, in bits, over query rows drawn from every passage
(four by default); only heads of one stack and kind have one. CKA is exact within a layer, from C; across layers it is
that of outputs projected onto random directions, the same for all heads of a width, and exact where all directions are
kept. Clusters are by average linkage; the map is classical scaling (Clark et al. 2019, section 6)."""

_CONFORMANCE = """## A measure of your own

A frozen dataclass derived from `RowMeasure` (a number per query row), `PooledMeasure` (a number from sums) or
`WeightMeasure` (a number from weights), with a `__call__`:

```python
from dataclasses import dataclass
import headwise as hw
from headwise.measures import RowMeasure

@dataclass(frozen=True, kw_only=True)
class Perplexity(RowMeasure):
    name: str = "pattern_perplexity"
    unit: str = "keys"
    low: float | None = 1.0
    description: str = "exp(entropy): how many keys a uniform row of the same entropy would see."

    def __call__(self, look):
        return look.rows.entropy.exp()

hw.check_measure(Perplexity())
table = hw.scan(model, texts, measures=["entropy", Perplexity()])
```

`hw.check_measure` tries it on tiny models (causal with grouped heads, bidirectional, encoder-decoder):

| check | what must hold |
|---|---|
"""


def reference_page() -> str:
    """docs/reference/measures.md.

    Example:
        >>> "| `entropy` |" in reference_page()
        True
    """
    return "\n\n".join(part.strip("\n") for part in _parts()) + "\n"


def _parts() -> Iterator[str]:
    yield _INTRODUCTION
    for name, group in GROUPS.items():
        yield f"## Group `{name}`\n\n{_capital(_GROUP_WORDS.get(name, 'further measures'))}.\n"
        yield _table(measure.info for measure in group)
    yield _IMPORTANCE
    loss = NextToken()
    infos = [*gradient_infos(loss), *(ablation_info(loss, kind) for kind in ABLATIONS)]
    yield _table(infos, unit={"nats": "of the loss", "(nats)^2": "of the loss, squared"}, cut=f" Loss: {loss.said}.")
    yield _LOSSES + "\n".join(
        f"| `{name}` | {loss.unit} | {_first_sentence(type(loss).__doc__)} |" for name, loss in LOSSES.items()
    )
    yield _STATISTICS
    yield _REDUNDANCY
    yield _CONFORMANCE + "\n".join(f"| `{name}` | {_first_sentence(check.__doc__)} |" for name, check in CHECKS.items())


def _table(infos: Iterable[MeasureInfo], unit: dict[str, str] | None = None, cut: str = "") -> str:
    lines = ["| measure | unit | range | better | what | source |", "|---|---|---|---|---|---|"]
    for info in infos:
        said = info.description.replace(cut, "") if cut else info.description
        pooled = " *Pooled.*" if info.pooled else ""
        cells = [
            f"`{info.name}`",
            (unit or {}).get(info.unit, info.unit),
            _range(info),
            info.better or "-",
            said + pooled,
            info.source or "-",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _range(info: MeasureInfo) -> str:
    low = "" if info.low is None else f"{info.low:g}"
    high = "" if info.high is None else f"{info.high:g}"
    if low and high:
        return f"{low} to {high}"
    return f"at least {low}" if low else f"at most {high}" if high else "any"


def _first_sentence(text: str | None) -> str:
    whole = " ".join((text or "").split("\n\n")[0].split())
    return whole.rstrip(".").replace("|", "\\|") + "."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

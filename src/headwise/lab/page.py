"""The results page: every claim with its verdict, its number, its figure and its rule.

The page and its figures are made from ``results.json`` alone, so that they can be checked for freshness without running
anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from headwise.errors import RunError
from headwise.lab.catalogue import CATALOGUE, find
from headwise.lab.experiment import Experiment
from headwise.lab.figures import save_figure
from headwise.lab.outcome import Outcome
from headwise.lab.rule import Check, Rule, Verdict
from headwise.lab.running import definition

__all__ = ["page_text", "read_results", "write_page", "write_results"]

RESULTS: Final = "results.json"
PAGE: Final = "README.md"
FIGURES: Final = "figures"
FORMAT: Final = "headwise-lab"
VERSION: Final = 1

_INTRODUCTION: Final = """\
# The lab: what is said about attention heads, and what we measured

Each claim below is an experiment that can come out either way. A rule with thresholds, written down before the run,
turns what was measured into one of three verdicts: **holds**, **holds under a condition** (which is named), **does not
hold as stated**. Where a rule was changed after a first look at results, its section says so. Numbers are means over
seeds, with the standard deviation over seeds behind ±. Run them with `headwise lab`, or one with `headwise lab NAME`;
both take `--seed`.

Symbols: n positions, d_model the width of the residual stream, h heads, d_k and d_v the widths of a head's queries and
keys and of its values, W_Q, W_K, W_V, W_O the projections, z what a head reads (its weights times its values).
"""


def write_page(
    folder: str | Path, outcomes: Sequence[Outcome] | None = None, facts: dict[str, Any] | None = None
) -> Path:
    """Write README.md and the figures into ``folder``; returns the page's path.

    Args:
        folder: made if it does not exist.
        outcomes: results to save first as ``results.json`` (they replace those of the same experiments that are
            already there); None: only the saved ones are used.
        facts: what the run was made with, saved beside new outcomes; None: versions and cores of this process.

    Raises:
        RunError: nothing saved in ``folder`` and nothing given, a saved file that cannot be read, or no matplotlib.
    """
    folder = Path(folder)
    if outcomes is not None:
        write_results(folder, outcomes, facts)
    saved, made_with = read_results(folder)
    for outcome in saved:
        save_figure(definition(outcome.name), outcome.series, folder / FIGURES / f"{outcome.name}.svg")
    page = folder / PAGE
    page.write_text(page_text(saved, made_with), encoding="utf-8")
    return page


def write_results(folder: Path, outcomes: Sequence[Outcome], facts: dict[str, Any] | None = None) -> Path:
    """Save outcomes as ``results.json``, beside those of other experiments that are there."""
    path = folder / RESULTS
    known = {outcome.name: outcome for outcome in (read_results(folder)[0] if path.exists() else [])}
    known.update({outcome.name: outcome for outcome in outcomes})
    document = {
        "format": FORMAT,
        "version": VERSION,
        "made_with": facts or _facts(),
        "outcomes": [known[entry.name].to_dict() for entry in CATALOGUE if entry.name in known],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read_results(folder: str | Path) -> tuple[list[Outcome], dict[str, Any]]:
    """Saved outcomes in the order of the catalogue, and what they were made with.

    Raises:
        RunError: the file is missing, is no results file, or is damaged.
    """
    path = Path(folder) / RESULTS
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path} does not exist; run the experiments first: headwise lab --page {folder}") from error
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}); run the experiments again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise RunError(
            f"{path} is not a results file of the lab (format {FORMAT!r}, version {VERSION}); run the experiments again"
        )
    outcomes = [Outcome.from_dict(item) for item in document.get("outcomes", [])]
    order = [entry.name for entry in CATALOGUE]
    for outcome in outcomes:
        find(outcome.name)
    return sorted(outcomes, key=lambda outcome: order.index(outcome.name)), dict(document.get("made_with", {}))


def _facts() -> dict[str, Any]:
    import os
    from datetime import date

    return {
        "headwise": metadata.version("headwise"),
        "torch": metadata.version("torch"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "date": date.today().isoformat(),
    }


def page_text(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    """The page as Markdown."""
    lines = [_INTRODUCTION, "| claim | verdict | what we measured |", "|---|---|---|"]
    for outcome in outcomes:
        entry = find(outcome.name)
        lines.append(f"| [{entry.title}](#{outcome.name}) | {_verdict(outcome)} | {outcome.headline} |")
    lines += [*(_section(number, outcome) for number, outcome in enumerate(outcomes, 1)), _footer(outcomes, facts)]
    return "\n".join(lines)


def _verdict(outcome: Outcome) -> str:
    """The verdict in bold, with its condition."""
    words = f"**{outcome.verdict.value}**"
    if outcome.verdict is Verdict.CONDITION:
        words += f": {definition(outcome.name).rule.condition}"
    return words


def _section(number: int, outcome: Outcome) -> str:
    entry, experiment = find(outcome.name), definition(outcome.name)
    parts = [
        f'\n<a id="{outcome.name}"></a>\n\n## {number}. {entry.title}\n',
        f"**Verdict: {outcome.verdict.value}**" + _condition(outcome, experiment.rule) + "\n",
        f"> {entry.claim}\n",
        f"{outcome.finding}\n",
        f"![{entry.title}]({FIGURES}/{outcome.name}.svg)\n",
        f"*{experiment.caption}*\n",
        f"**What follows.** {experiment.lesson}\n",
        f"**How it was measured.** {experiment.method}\n",
    ]
    if experiment.terms:
        parts.append("\n".join(f"- *{term}*: {meaning}." for term, meaning in experiment.terms.items()) + "\n")
    if experiment.changed:
        parts.append(f"**Changed after a first look.** {experiment.changed}\n")
    parts += [_rule(outcome), _numbers(outcome), _literature(outcome, experiment)]
    return "\n".join(part for part in parts if part)


def _condition(outcome: Outcome, rule: Rule) -> str:
    return f", namely that {rule.condition}." if outcome.verdict is Verdict.CONDITION else "."


def _rule(outcome: Outcome) -> str:
    """The rule with what came out."""
    lines = ["**The rule.**", "", "| | threshold | measured | kept |", "|---|---|---|---|"]
    lines += [_row(check) for check in (*outcome.conditioned, *outcome.stated)]
    every, some = len(outcome.stated) + len(outcome.conditioned), len(outcome.conditioned)
    whole = "both" if every == 2 else f"all {every}"
    if some:
        part = "the first is" if some == 1 else f"the first {some} are"
        lines.append(f"\nThe claim holds if {whole} are kept, and under the condition if only {part}.\n")
    else:
        lines.append(f"\nThe claim holds if {whole} are kept.\n" if every > 1 else "\nThe claim holds if it is kept.\n")
    return "\n".join(lines)


def _row(check: Check) -> str:
    return (
        f"| {check.threshold.says} | {check.threshold.text()} | {check.value:.3g} |"
        f" {'yes' if check.kept else '**no**'} |"
    )


def _numbers(outcome: Outcome) -> str:
    lines = ["<details><summary>All numbers</summary>", "", "| quantity | value | what it is |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {quantity.text()} | {_cell(quantity.meaning)} |" for name, quantity in outcome.quantities.items()
    ]
    return "\n".join([*lines, "", "</details>\n"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _literature(outcome: Outcome, experiment: Experiment) -> str:
    if not experiment.literature:
        return ""
    lines = ["**Beside the literature.**", "", "| published | source | here |", "|---|---|---|"]
    for item in experiment.literature:
        ours = f"`{item.ours}` {outcome.quantities[item.ours].text()}" if item.ours else "not measured here"
        lines.append(f"| {item.theirs} | {item.source} | {ours} |")
    return "\n".join(lines) + "\n"


def _footer(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    seconds = sum(outcome.seconds for outcome in outcomes)
    words = ", ".join(f"{key} {value}" for key, value in facts.items())
    small = [outcome.name for outcome in outcomes if outcome.size != "full"]
    warning = f" **Not a full run: {', '.join(small)}.**" if small else ""
    seeds = sorted({outcome.seed for outcome in outcomes})
    return (
        f"\n---\n\nGenerated by `headwise lab --page` from `{RESULTS}` ({words}; seed {', '.join(map(str, seeds))};"
        f" {seconds:.0f} s in all).{warning}\n"
    )

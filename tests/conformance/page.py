"""docs/models.md, from what the conformance run found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import transformers
from judging import Verdict
from pruning import Pruned
from pruning_page import COLUMNS, by_type, cells, section

__all__ = ["page_of"]

_SEAMS = {
    "interface": "`AttentionInterface`",
    "torch": "`scaled_dot_product_attention`",
    "softmax": "its own softmax",
}
#: (verdict, heading, what it means), in the order of the page.
_REST = (
    (
        "WRONG",
        "Measured wrongly",
        "Do not use headwise with these: its numbers are not the model's.",
    ),
    (
        "FAILED",
        "Failed",
        "Headwise ended in an error that it should have put into words.",
    ),
    (
        "as set",
        "Measured, but without a second opinion",
        "Neither transformers' own eager attention nor torch's fused attention written out gives the numbers of the "
        "implementation that these are set to, so there is nothing to compare with. What is measured is what they "
        "compute as set; every call is compared with the model's own attention function when the heads are found.",
    ),
    (
        "refused",
        "Refused",
        "Headwise says so and why, before anything is changed.",
    ),
    (
        "no example",
        "No example input",
        "Headwise could not make an input by itself. With `hw.wrap(model, example={...})` it finds the heads or "
        "refuses.",
    ),
    (
        "not built",
        "Not built small",
        "The run could not build a small model from the config, so nothing is known about these.",
    ),
)


def page_of(verdicts: Sequence[Verdict], pruned: Sequence[Pruned] = ()) -> str:
    """The page as Markdown; the same bytes for the same verdicts."""
    cut = by_type(pruned)
    counts = Counter(verdict.verdict for verdict in verdicts)
    exact = [verdict for verdict in verdicts if verdict.verdict == "exact"]
    return "\n".join(
        [
            "# Which models work",
            "",
            "<!-- Written by tools/conformance.py. Do not edit: run it again. -->",
            "",
            f"Every model type of transformers {transformers.__version__} that has a model class was built small with "
            f"random weights (torch {torch.__version__.split('+')[0]}, CPU), its heads were found, every attention row "
            "was measured, without padding and with padding on the left, and one head of every kind of attention was "
            "switched off.",
            "",
            *_table(
                ("what came out", "types"),
                [
                    ("measured exactly", counts["exact"]),
                    ("measured, without a second opinion", counts["as set"]),
                    ("measured wrongly", counts["WRONG"] + counts["FAILED"]),
                    ("refused, with the reason", counts["refused"]),
                    ("no example input", counts["no example"]),
                    ("not built small", counts["not built"]),
                    ("in all", len(verdicts)),
                ],
            ),
            "",
            "*Exactly* means: the number of visible keys of every row is that of the weights which the model itself "
            "computes with eager attention in float64, and the row's entropy and largest weight agree with theirs to "
            "1e-4 absolute beside 1e-4 relative (where the model's own float32 is further off than that, with its "
            "float32 to 1e-5; where a row without a visible key is something else to eager attention than to torch's "
            "fused attention, with the fused attention written out); and a gate on the last head of every kind of "
            "attention gives the output of the model whose output projection has zeros for that head, to 2e-5 of the "
            "largest output.",
            "",
            "A model that is not listed, or is written in plain torch, is judged when its heads are found: every "
            "attention call of a small forward pass is computed twice, by the model and by headwise, and a model whose "
            "calls disagree is refused.",
            "",
            "## Measured exactly",
            "",
            "*Seen through*: how its attention reaches headwise. *Masks*: `compact` models build no mask of queries "
            "times keys under headwise; `dense` models compute with theirs. *Gate*: `=` where it equals zeroed columns "
            "of W_O; `z` where something stands between the heads and W_O, so that the gate acts on the heads and "
            "nothing was compared. *Elsewhere*: modules whose attention is not measured; "
            "`hw.wrap(model).layout.uncovered` names them.",
            "",
            *_table(
                (
                    *("model type", "attention layers of the small model", "seen through", "masks", "gate"),
                    *("elsewhere", *COLUMNS),
                ),
                [(*_row(verdict), *cells(cut.get(verdict.model_type))) for verdict in exact],
            ),
            *section(pruned),
            *[line for part in _REST for line in _section(verdicts, *part)],
            "",
        ]
    )


def _row(verdict: Verdict) -> tuple[object, ...]:
    seam = " and ".join(_SEAMS[part] for part in verdict.seam.split("+"))
    gate = "=" if verdict.gate == "equal" else "z"
    return f"`{verdict.model_type}`", verdict.sites, seam, verdict.masks, gate, verdict.uncovered or ""


def _section(verdicts: Sequence[Verdict], kind: str, heading: str, meaning: str) -> list[str]:
    chosen = [verdict for verdict in verdicts if verdict.verdict == kind]
    if not chosen:
        return []
    rows = [(f"`{verdict.model_type}`", _cell(verdict.reason)) for verdict in chosen]
    return ["", f"## {heading}", "", meaning, "", *_table(("model type", "why"), rows)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]

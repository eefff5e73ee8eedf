"""What docs/models.md says of pruning: columns of its table, and a section of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pruning import PLANS, Pruned

__all__ = ["COLUMNS", "by_type", "cells", "section"]

COLUMNS = ("pruned", "saved as", "generates")
_SHORT = {"head": "h", "group": "g", "uneven": "u", "uniform": "e", "layer": "l"}


def cells(found: Pruned | None) -> tuple[str, str, str]:
    """The cells of one type under :data:`COLUMNS`."""
    if found is None or not found.plans:
        return "", "", ""
    exact = [_SHORT[name] for name in PLANS if found.plans.get(name) == "exact"]
    saved = "stock" if "stock" in found.saved.values() else "own" if found.saved else ""
    generates = "=" if found.generate.startswith("exact") else ""
    return "".join(exact) or "no", saved, generates


def section(found: Sequence[Pruned]) -> list[str]:
    """What the columns mean, the counts, and why heads of some types cannot be cut out."""
    if not found:
        return []
    counts = Counter(one.verdict for one in found)
    pruned = [one for one in found if one.plans]
    rows = [("every plan exact", counts["exact"]), ("some plans, the others refused", counts["partly"])]
    rows += [("refused", counts["refused"]), ("pruned wrongly", counts["WRONG"] + counts["FAILED"])]
    generating = [one for one in pruned if one.generate not in ("", "-") and not one.generate.startswith("not by")]
    generate = sum(one.generate.startswith("exact") for one in generating)
    stock = sum("stock" in one.saved.values() for one in pruned)
    lines = [
        "",
        "## Pruned",
        "",
        "Every type whose heads were found was also pruned, with random weights in every parameter. *pruned* says "
        "which plans were exact: `h` one head, `g` a whole group, `u` an uneven choice in two layers, `e` the same "
        "number in every layer, `l` all heads of a layer. *Exact* means: every layer equals the original's with those "
        "heads gated to 1e-5 of its largest output, the model as a whole equals the gated one, a process that never "
        "saw the original loads the saved folder and gives the same bits, and plain `from_pretrained` either gives the "
        "same bits (*saved as* `stock`) or fails (`own`). *generates*: `=` where the tokens are those of the gated "
        "original with a dynamic, a static (where the type takes one) and no cache. What is not exact is refused by "
        "name, the model untouched.",
        "",
        "| what came out | types |",
        "| --- | --- |",
        *(f"| {name} | {number} |" for name, number in rows),
        "",
        f"Of {len(generating)} types that generate, {generate} give the tokens of the gated original and the others "
        f"are refused; {stock} types come out as a stock checkpoint where the counts are uniform.",
        "",
        "### Not every plan",
        "",
        "| model type | exact | why not the others |",
        "| --- | --- | --- |",
    ]
    for one in pruned:
        if one.verdict in ("partly", "refused"):
            lines.append(f"| `{one.model_type}` | {cells(one)[0]} | {_cell(one.reason)} |")
    return lines


def by_type(found: Sequence[Pruned]) -> Mapping[str, Pruned]:
    """Looked up by model type."""
    return {one.model_type: one for one in found}


def _cell(text: str) -> str:
    text = text if len(text) <= 200 else text[:197] + "..."
    return text.replace("|", "\\|").replace("<", "&lt;")

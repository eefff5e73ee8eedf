"""The model card: what was removed and what was measured, in the words of the record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise.models.handle import Model
    from headwise.models.surgery_record import SurgeryRecord

__all__ = ["model_card"]


def model_card(model: Model, *, why_not_stock: str | None) -> str:
    """The README.md of a saved folder; ``why_not_stock`` is None where transformers loads it by itself."""
    record = model.surgery
    name = "the model" if record is None else record.model
    lines = ["---", "library_name: headwise", "tags:", "- headwise", "- pruned-attention-heads", "---", ""]
    if record is None:
        return "\n".join(
            [*lines, f"# {model.name}", "", "Saved by headwise; no head was removed.", "", *_how(why_not_stock)]
        )
    heads = sum(one.query_heads[0] - one.query_heads[1] for one in record.blocks)
    before, after = record.parameters
    lines += [
        f"# {name}, {heads} attention heads removed",
        "",
        f"{heads} query heads of {len(record.blocks)} attention blocks were cut out of `{name}` "
        f"(weights `{record.weight_hash[:16]}`), which leaves {after:,} of {before:,} parameters.",
        "",
        *_how(why_not_stock),
        "",
        *_table(record),
        *_means(record),
        "",
        *_proof(record),
        "",
        *_repair(record),
        *_heal(record),
    ]
    if record.earlier:
        lines += [
            "",
            f"Heads had been removed before, in {_steps(len(record.earlier))}; see `surgery.earlier` in headwise.json.",
        ]
    return "\n".join(lines) + "\n"


def _how(why_not_stock: str | None) -> list[str]:
    lines = ["```python", "import headwise as hw", "", 'model = hw.load("PATH")', "```", ""]
    if why_not_stock is None:
        return [*lines, "The folder is also a plain transformers checkpoint: `from_pretrained` loads it."]
    return [
        *lines,
        f"`from_pretrained` finds no weights here, since transformers' config cannot say it: {why_not_stock}.",
    ]


def _table(record: SurgeryRecord) -> list[str]:
    rows = ["| block | heads removed | query heads | key-value heads |", "|---|---|---|---|"]
    for one in record.blocks:
        query, kv = (f"{left} -> {right}" for left, right in (one.query_heads, one.kv_heads))
        rows.append(f"| `{one.module}` | {', '.join(map(str, one.removed))} | {query} | {kv} |")
    return rows


def _means(record: SurgeryRecord) -> list[str]:
    found = [(one.module, one.averaged, len(one.means)) for one in record.blocks if one.means]
    lines = [
        f"- `{module}`: the mean of the values that a query sees stands in the place of the heads "
        f"{', '.join(map(str, heads))}; {carriers} of them stay, without a query, to put it out."
        for module, heads, carriers in found
    ]
    return ["", *lines] if lines else []


def _proof(record: SurgeryRecord) -> list[str]:
    proof = record.proof
    worst = max((one.difference / one.largest for one in proof.layers if one.largest), default=0.0)
    noise = "" if proof.noise is None else f" (the original's own eager attention differs by {proof.noise:.2g})"
    return [
        f"Before the repair every layer was compared with the original's, the removed heads gated, on the same input: "
        "largest "
        f"difference {worst:.2g} of the largest output, where {proof.bound:g} is allowed. End to end "
        f"{proof.end_to_end:.2g} "
        f"where values reach {proof.largest:.3g}{noise}."
    ]


def _heal(record: SurgeryRecord) -> list[str]:
    heal = record.repair.get("heal")
    if heal is None:
        return []
    return [
        "",
        f"Every weight was then trained for {heal['steps']} steps to give what the original gives ({heal['loss']}: "
        f"{heal['first']:.4g} before, {heal['last']:.4g} after).",
    ]


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _repair(record: SurgeryRecord) -> list[str]:
    method = record.repair.get("method")
    if method == "none":
        heads = record.repair.get("constants", 0)
        if heads:
            who = "the removed head" if heads == 1 else f"{heads} removed heads"
            return [
                f"The mean output of {who} stays, in biases; otherwise the weights are the original's, not repaired."
            ]
        return ["The remaining weights are the original's; nothing was repaired."]
    layers = record.repair.get("layers", [])
    rows = max((one["rows"] for one in layers), default=0)
    words = {
        "least_squares": "by least squares with an intercept",
        "least_squares_no_bias": "by least squares without an intercept",
        "bias": "by a bias",
    }
    said = f"The output projections were then repaired {words.get(str(method), method)}, from {rows:,} rows."
    turned = record.repair.get("config")
    if not turned:
        return [said]
    named = ", ".join(f"`{name}` = `{value}`" for name, value in turned.items())
    return [f"{said} The config gives the intercept a place by {named}; other biases that come with that are zero."]

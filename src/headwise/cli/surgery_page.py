"""What the command line says of a cut model: what went, the proof, what the repair was worth, what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.cli.sink import Sink
    from headwise.models import Model
    from headwise.surgery import Proof, SurgeryRecord, Verification
    from headwise.verbs.timing import Timing

__all__ = ["tell_pruned", "tell_verified"]


def tell_pruned(sink: Sink, small: Model, folder: Path, measured: Timing | None = None) -> None:
    """The record of a surgery, and what it saves where that was measured, to stdout."""
    record = small.surgery
    assert record is not None
    files = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    if sink.json:
        times = None if measured is None else measured.to_document()
        sink.document({"folder": str(folder), "file_bytes": files, "surgery": record.to_document(), "timing": times})
        return
    console = sink.console()
    heads = sum(len(one.removed) for one in record.blocks)
    console.print(f"{counted(heads, 'head')} of {counted(len(record.blocks), 'block')} removed{_averaged(record)}\n")
    console.print(_blocks(record), crop=False)
    lines = [
        *_proof(record.proof),
        *_repair(record),
        *_saved(record, files),
        *_timed(measured),
        _stock(small),
        str(folder),
    ]
    print("\n".join(lines), file=sink.stdout)


def tell_verified(sink: Sink, found: Verification, measured: Timing | None = None) -> None:
    """What a verification found, to stdout."""
    if not found.recorded:
        sink.note("note: the record of PRUNED does not name the weights of ORIGINAL; it was compared all the same")
    if sink.json:
        times = {} if measured is None else {"timing": measured.to_document()}
        sink.document({**found.to_document(), **times})
        return
    heads = sum(map(len, found.removed.values()))
    lines = [
        f"{counted(heads, 'head')} of {counted(len(found.removed), 'block')} {'is' if heads == 1 else 'are'} gone, "
        f"{counted(found.unchanged, 'other weight')} the same bit for bit",
        *_proof(found.proof),
    ]
    means = [one for several in found.means.values() for one in several]
    if means:
        lines.append(
            f"running means stand in the place of {counted(sum(map(len, means)), 'head')}, put out by {len(means)}"
        )
    if found.healed:
        lines.append(f"healed: {counted(found.healed, 'other weight')} trained after the cut, taken over as well")
    if found.repaired:
        lines.append(f"repaired: {counted(len(found.repaired), 'output projection')}, taken over into the comparison")
    print("\n".join([*lines, *_timed(measured)]), file=sink.stdout)


def counted(number: int, thing: str) -> str:
    """``1 head``, ``2 heads``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def size(count: int) -> str:
    """Bytes for people.

    >>> size(90_868_376), size(512)
    ('90.9 MB', '512 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def _averaged(record: SurgeryRecord) -> str:
    means = [one for block in record.blocks for one in block.means]
    if not means:
        return ""
    return f", {counted(sum(map(len, means)), 'head')} replaced by running means, which {len(means)} stay to put out"


def _blocks(record: SurgeryRecord) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    longest = max((len(one.module) for one in record.blocks), default=0)
    table.add_column("block", no_wrap=True, overflow="fold", min_width=longest)
    table.add_column("removed", overflow="fold", min_width=8)
    grouped = any(one.query_heads != one.kv_heads for one in record.blocks)
    for name in ("heads", *(["kv heads"] if grouped else []), "parameters", "off by"):
        table.add_column(name, justify="right", no_wrap=True)
    worst = _worst(record)
    for one in record.blocks:
        counts = [one.query_heads, one.kv_heads] if grouped else [one.query_heads]
        removed = " ".join(map(str, one.removed))
        if one.means:
            removed = f"{removed} (mean: {' '.join(map(str, one.averaged))})".strip()
        cells = (f"{left} -> {right}" for left, right in counts)
        table.add_row(one.module, removed, *cells, f"{-one.parameters:,}", f"{worst[one.module]:.1e}")
    return table


def _worst(record: SurgeryRecord) -> dict[str, float]:
    """For each block the largest difference of its calls, as a part of their largest output."""
    found: dict[str, float] = {}
    for block in record.blocks:
        found[block.module] = max((part(one) for one in record.proof.layers if one.block == block.module), default=0.0)
    return found


def part(one: Any) -> float:
    """A difference as a part of the largest output."""
    return float(one.difference / one.largest) if one.largest else float(one.difference)


def _proof(proof: Proof) -> Sequence[str]:
    worst = max(map(part, proof.layers), default=0.0)
    lines = [
        "",
        f"removed equals gated: {counted(len(proof.layers), 'layer call')} on the same input, off by {worst:.1e} of "
        f"the largest output at most (allowed: {proof.bound:g})",
    ]
    if proof.identical:
        return [*lines, "end to end: the same bit for bit"]
    noise = (
        "it has one attention only" if proof.noise is None else f"the original, eager against as set: {proof.noise:.1e}"
    )
    return [*lines, f"end to end: off by {proof.end_to_end:.1e} where values reach {proof.largest:.3g} ({noise})"]


def _repair(record: SurgeryRecord) -> Sequence[str]:
    repair = record.repair
    layers = repair.get("layers", [])
    heal = repair.get("heal")
    trained = (
        []
        if heal is None
        else [f"healed: {heal['steps']} steps, {heal['loss']} {heal['first']:.4g} -> {heal['last']:.4g}"]
    )
    if not layers:
        heads = repair.get("constants", 0)
        kept = f"; the mean output of {counted(heads, 'head')} stays, as a bias" if heads else ""
        return [f"repair: none{kept}", *trained]
    lost, left = (sum(one[name] for one in layers) / len(layers) for name in ("lost", "left"))
    rows = max(one["rows"] for one in layers)
    method = str(repair["method"]).replace("_", " ")
    return [
        f"repair: {method}, learned from {rows:,} rows; the square of what a layer's output is off by, of its "
        f"variance: {lost:.1%} without it, {left:.1%} with it",
        *trained,
    ]


def _timed(measured: Timing | None) -> Sequence[str]:
    if measured is None:
        return []
    before, after = (sum(getattr(one, name) for one in measured.layers) for name in ("before", "after"))
    return [
        f"time of a pass of {measured.batch} x {measured.length} tokens here ({counted(measured.threads, 'thread')}): "
        f"{measured.before * 1e3:.1f} ms -> {measured.after * 1e3:.1f} ms; side by side {measured.speedup:.2f} times "
        f"as fast (median of {counted(measured.repeats, 'turn')}, {min(measured.ratios):.2f} to "
        f"{max(measured.ratios):.2f})",
        f"attention layers that were cut: {before * 1e3:.1f} ms -> {after * 1e3:.1f} ms; a pass with the same heads "
        f"gated: {measured.gated * 1e3:.1f} ms",
    ]


def _stock(small: Model) -> str:
    """Whether transformers loads the folder by itself."""
    from headwise.models import expressible

    why = expressible(small.module)
    if why is None:
        return "loaded by: hw.load, and from_pretrained of plain transformers"
    return f"loaded by: hw.load; not by from_pretrained of plain transformers: {why}"


def _saved(record: SurgeryRecord, files: int) -> Sequence[str]:
    before, after = record.parameters
    bytes_before, bytes_after = record.bytes
    return [
        f"parameters: {before:,} -> {after:,} ({after / before - 1:+.1%})",
        f"weights: {size(bytes_before)} -> {size(bytes_after)}; file: {size(files)}",
        f"gating the same heads saves nothing: all {before:,} parameters stay and are computed with",
    ]

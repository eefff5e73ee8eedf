"""``headwise verify``: prove again that one model is another without certain heads."""

from __future__ import annotations

from typing import Any

import click

from headwise.cli.options import Settings, output_options
from headwise.cli.sink import Sink

__all__ = ["command"]


@click.command("verify", short_help="Prove that a pruned model is the original without heads.", no_args_is_help=True)
@click.argument("original", metavar="ORIGINAL")
@click.argument("pruned", metavar="PRUNED")
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """Prove that PRUNED is ORIGINAL without certain heads, and otherwise the same.

    Every weight that is left must be ORIGINAL's bit for bit, but for output projections that were repaired; and every
    layer must give what ORIGINAL's gives with those heads gated, on the same input. Exit status 1 where it is not so.

    \b
    headwise verify ./my-model ./my-model-small
    """
    from headwise.verbs.verify import verify

    sink = Sink(settings)
    with sink.warnings_as_notes():
        found = verify(options["original"], options["pruned"])
    if not found.recorded:
        sink.note("note: the record of PRUNED does not name the weights of ORIGINAL; it was compared all the same")
    if sink.json:
        sink.document(found.to_document())
        return
    heads = sum(map(len, found.removed.values()))
    worst = max((one.difference / one.largest for one in found.proof.layers if one.largest), default=0.0)
    lines = [
        f"proved: {heads} heads of {len(found.removed)} blocks are gone, and {found.unchanged} weights are unchanged",
        f"layers: {len(found.proof.layers)} calls compared, largest difference {worst:.2g} of the largest output "
        f"(allowed: {found.proof.bound:g})",
        f"whole model: difference {found.proof.end_to_end:.2g} where values reach {found.proof.largest:.3g}"
        + ("" if found.proof.noise is None else f" (eager against the attention that is set: {found.proof.noise:.2g})"),
    ]
    if found.repaired:
        lines.append(f"repaired: {len(found.repaired)} output projections, taken over into the comparison")
    if found.proof.identical:
        lines.append("the outputs are the same bit for bit")
    print("\n".join(lines), file=sink.stdout)

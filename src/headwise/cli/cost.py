"""``headwise cost``: what heads cost in parameters, operations and bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headwise.cli.options import Settings, output_options
from headwise.cli.sink import PLAIN_WIDTH, Sink

if TYPE_CHECKING:
    from headwise.costs import Ledger, ModelNumbers, Sweep

__all__ = ["command"]

POSITIVE = click.IntRange(min=1)
NUMBER = click.FloatRange(min=0, min_open=True)
#: Options that describe a model by numbers; none of them goes with MODEL.
NEEDED = ("d_model", "heads", "layers")
PLAIN = (*NEEDED, "kv_heads", "head_dim", "window", "d_ff", "vocab", "tied", "bias", "encoder", "mlp")
#: Width of the table per layer where there is no terminal, so that no number is cut.
WIDE = 200
#: What one sweep takes and the others do not.
ONLY = {"contexts": "context", "input_rms": "heads", "init_std": "heads"}
UNITS = {"B/S": 1.0, "KB/S": 1e3, "MB/S": 1e6, "GB/S": 1e9, "TB/S": 1e12}


class Bandwidth(click.ParamType[float | str]):
    """Bytes per second, written ``50GB/s``, or the word ``measure``."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Bytes per second, or ``"measure"``."""
        if isinstance(value, float) or value == "measure":
            return "measure" if value == "measure" else value
        match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", str(value), re.IGNORECASE)
        if match is None or match[2].upper() not in UNITS:
            self.fail(f"{value!r} is no bandwidth; write it with its unit, as 50GB/s, or measure", param, ctx)
        rate = float(match[1]) * UNITS[match[2].upper()]
        if not 0 < rate < math.inf:
            self.fail(f"{value!r} must be positive", param, ctx)
        return rate


class Scale(click.ParamType[float | str]):
    """A positive number, or the word ``measure``."""

    name = "scale"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """The number, or ``"measure"``."""
        return "measure" if value == "measure" else NUMBER.convert(value, param, ctx)


class Contexts(click.ParamType[list[int]]):
    """Lengths, written ``128,1024,8192``."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The lengths as integers."""
        if isinstance(value, list):
            return value
        parts = str(value).replace("_", "").split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of positive lengths; write for example 128,1024,8192", param, ctx)
        return [int(part) for part in parts]


def check(options: dict[str, Any]) -> None:
    """Refuse combinations of options that cannot be meant.

    Raises:
        click.UsageError: what does not go together, and what does.
    """
    plain = [name for name in PLAIN if options[name] not in (None, False)]
    if options["model"] is not None and plain:
        raise click.UsageError(f"--{_option(plain[0])} describes a model by numbers and does not go with MODEL.")
    if options["model"] is None:
        missing = [name for name in NEEDED if options[name] is None]
        if missing:
            what = "give MODEL, or a model by numbers:" if not plain else "a model by numbers needs"
            raise click.UsageError(f"{what} {', '.join('--' + _option(name) for name in missing)}.")
        for name in ("revision", "trust_remote_code"):
            if options[name]:
                raise click.UsageError(f"--{_option(name)} is about a model on disk and needs MODEL.")
    if options["plot"] is not None and options["sweep"] is None:
        raise click.UsageError("--plot draws a sweep: give --sweep heads, --sweep kv-heads or --sweep context.")
    if options["input_rms"] == "measure" and options["model"] is None:
        raise click.UsageError("--input-rms measure runs a model and needs MODEL.")
    for name, over in ONLY.items():
        if options[name] is not None and options["sweep"] != over:
            raise click.UsageError(f"--{_option(name)} belongs to --sweep {over}.")
    if options["per_layer"] and options["sweep"] is not None:
        raise click.UsageError("--per-layer and --sweep are two different tables; choose one.")


def _option(name: str) -> str:
    return name.replace("_", "-")


def _dtype(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from headwise.costs import dtype_name

    return _usage(ctx, param, value, dtype_name)


def _known_sweep(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from headwise.costs import check_sweep

    _usage(ctx, param, value, check_sweep)
    return value


def _usage(
    ctx: click.Context, param: click.Parameter, value: str | None, check: Callable[[str], str | None]
) -> str | None:
    """What ``check`` makes of an option's value; a name that it does not know is wrong usage."""
    from headwise.errors import InputError

    try:
        return None if value is None else check(value)
    except InputError as error:
        raise click.BadParameter(str(error), ctx=ctx, param=param) from None


@click.command("cost", short_help="What heads cost: parameters, FLOPs, cache bytes.", no_args_is_help=True)
@click.argument("model", metavar="[MODEL|CONFIG]", required=False)
@click.option("--batch", type=POSITIVE, default=1, show_default=True, help="Sequences.")
@click.option(
    "--context",
    type=POSITIVE,
    default=2048,
    show_default=True,
    help="Tokens of each; while decoding, what the new token sees.",
)
@click.option(
    "--source", type=POSITIVE, help="Tokens on the encoder's side.  [default: as the model fixes it, or --context]"
)
@click.option("--dtype", callback=_dtype, help="Of weights and activations.  [default: the model's own, or bfloat16]")
@click.option("--cache-dtype", callback=_dtype, help="Of the key-value cache.  [default: --dtype]")
@click.option("--phase", type=click.Choice(["both", "prefill", "decode"]), default="both", show_default=True)
@click.option(
    "--bandwidth",
    type=Bandwidth(),
    metavar="RATE",
    help="Of memory, as 50GB/s, or measure: the least time of a decode step.",
)
@click.option("--per-layer", is_flag=True, help="List every attention layer.")
@click.option(
    "--sweep",
    callback=_known_sweep,
    metavar="WHAT",
    help="heads, kv-heads or context: what changes along it, and what does not.",
)
@click.option("--contexts", type=Contexts(), metavar="N,N,...", help="Lengths of --sweep context.")
@click.option(
    "--input-rms",
    type=Scale(),
    metavar="NUMBER",
    help="Scale of what attention reads, for --sweep heads; measure loads MODEL and runs it once.  [default: 1]",
)
@click.option("--init-std", type=NUMBER, help="Spread of the weights as drawn, for --sweep heads.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the sweep to .png, .svg or .pdf.")
@click.option("--d-model", type=POSITIVE, help="A model by numbers: width of the residual stream.")
@click.option("--heads", type=POSITIVE, help="Query heads per layer.")
@click.option("--kv-heads", type=POSITIVE, help="Key-value heads per layer.  [default: --heads]")
@click.option("--layers", type=POSITIVE, help="Number of layers.")
@click.option("--head-dim", type=POSITIVE, help="Width of a head.  [default: d-model / heads]")
@click.option("--window", type=POSITIVE, help="Sliding window of every layer.")
@click.option("--d-ff", type=POSITIVE, help="Width of the feed-forward layers.")
@click.option("--mlp", type=click.Choice(["gated", "plain"]), help="Three matrices or two.  [default: gated]")
@click.option("--vocab", type=POSITIVE, help="Size of the vocabulary.")
@click.option("--tied", is_flag=True, help="The output matrix is the embedding table.")
@click.option("--bias", is_flag=True, help="The projections have biases.")
@click.option("--encoder", is_flag=True, help="Every token sees every token; nothing is cached.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Run the code that comes with the model.")
@output_options
@click.pass_obj
def command(settings: Settings, /, **options: Any) -> None:
    """What the heads of a model cost: parameters, FLOPs, cache bytes, memory traffic.

    The model is a folder with config.json (weights are not read), the id of a model in the local
    cache, or plain numbers. A multiply and an add count as two.

    \b
    headwise cost ./my-model --context 8192 --batch 4
    headwise cost --d-model 4096 --heads 32 --kv-heads 8 --layers 32
    headwise cost ./my-model --sweep kv-heads --bandwidth measure
    """
    check(options)
    sink = Sink(settings)
    with sink.warnings_as_notes():
        if options["sweep"] is not None:
            _tell_sweep(sink, _sweep(options), options["plot"])
        else:
            _tell_ledger(sink, _ledger(options), per_layer=options["per_layer"])


def _numbers(options: dict[str, Any]) -> ModelNumbers:
    """The model in numbers; torch and transformers are imported only for a model on disk."""
    if options["model"] is not None:
        from headwise.verbs.cost import numbers

        return numbers(options["model"], revision=options["revision"], trust_remote_code=options["trust_remote_code"])
    from headwise.costs import grid

    return grid(
        options["d_model"],
        options["heads"],
        options["layers"],
        kv_heads=options["kv_heads"],
        head_dim=options["head_dim"],
        window=options["window"],
        causal=not options["encoder"],
        bias=options["bias"],
        d_ff=options["d_ff"],
        gated=options["mlp"] != "plain",
        vocab=options["vocab"],
        tied=options["tied"],
    )


def _common(options: dict[str, Any]) -> dict[str, Any]:
    bandwidth = options["bandwidth"]
    if bandwidth == "measure":
        from headwise.verbs.bandwidth import measure_bandwidth

        bandwidth = measure_bandwidth()
    names = ("batch", "context", "source", "dtype", "cache_dtype", "phase")
    return {**{name: options[name] for name in names}, "bandwidth": bandwidth}


def _ledger(options: dict[str, Any]) -> Ledger:
    from headwise.costs import ledger

    return ledger(_numbers(options), **_common(options))


def _sweep(options: dict[str, Any]) -> Sweep:
    from headwise.costs import sweep

    extra = {name: options[name] for name in ONLY if options[name] is not None}
    if extra.get("input_rms") == "measure":
        extra["input_rms"] = _measured_scale(options)
    return sweep(_numbers(options), options["sweep"], **extra, **_common(options))


def _measured_scale(options: dict[str, Any]) -> float:
    from headwise.models import load
    from headwise.verbs.cost import numbers
    from headwise.verbs.input_scale import input_rms

    model = load(options["model"], revision=options["revision"], trust_remote_code=options["trust_remote_code"])
    return input_rms(model, numbers(model))


def _tell_ledger(sink: Sink, book: Ledger, *, per_layer: bool) -> None:
    for note in book.notes:
        sink.note(f"note: {note}")
    if sink.json:
        sink.document(book.to_document())
        return
    from headwise.cli.cost_tables import layer_page, ledger_page

    console = sink.console(WIDE if per_layer else PLAIN_WIDTH)
    console.print(layer_page(book) if per_layer else ledger_page(book), crop=False)


def _tell_sweep(sink: Sink, table: Sweep, plot: Path | None) -> None:
    for note in table.notes:
        sink.note(f"note: {note}")
    if plot is not None:
        from headwise.cli.cost_plot import draw

        draw(table, plot)
        sink.note(f"plot: {plot}")
    if sink.json:
        sink.document(table.to_document())
        return
    from headwise.cli.cost_tables import sweep_page

    console = sink.console()
    console.print(sweep_page(table, console.width), crop=False)

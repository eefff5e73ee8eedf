"""Account for the heads of a model: the verb behind ``hw.cost`` and ``headwise cost``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from headwise.costs import AttentionNumbers, Ledger, ModelNumbers, Sweep, ledger
from headwise.costs import sweep as sweep_numbers
from headwise.costs.ledger import Phase
from headwise.errors import InputError, ModelError, UnsupportedError
from headwise.layout import HeadLayout
from headwise.models import Model, as_model
from headwise.verbs.bandwidth import measure_bandwidth
from headwise.verbs.cost_config import skeleton, skeleton_of_config
from headwise.verbs.cost_model import keeps_cache, numbers_of
from headwise.verbs.cost_notes import in_code_of_its_own
from headwise.verbs.input_scale import input_rms

__all__ = ["cost", "numbers", "sweep"]

Bandwidth = float | Literal["measure"] | None


def cost(
    model_or_config: Any,
    batch: int = 1,
    context: int = 2048,
    dtype: object = None,
    phase: Phase = "both",
    *,
    source: int | None = None,
    cache_dtype: object = None,
    bandwidth: Bandwidth = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Ledger:
    """What a model costs: parameters, operations, cache bytes, and what a decode step must read.

    Args:
        model_or_config: a folder with config.json (weights are not read), its config.json, the id of a model in
            the local cache, a transformers config, a model in memory, or :class:`headwise.costs.ModelNumbers`
            (:func:`headwise.costs.grid` makes them from plain numbers).
        batch: sequences.
        context: tokens of each: the prompt in prefill; while decoding what the new token sees, itself included.
        dtype: of weights and activations; None is the model's own.
        phase: ``"prefill"``, ``"decode"`` (one new token per sequence) or ``"both"``.
        source: tokens on the encoder's side; None is what the model fixes, else ``context``.
        cache_dtype: of the key-value cache; None is ``dtype``.
        bandwidth: of memory in bytes per second, for the time that a decode step takes at least;
            ``"measure"`` measures that of this machine.
        revision: of a model given by id.
        trust_remote_code: build a model whose code lies beside its config.

    Returns:
        The ledger; ``ledger.parameters.total``, ``ledger.cache.bytes``, ``ledger.prefill.full`` and so on.

    Raises:
        InputError: a number is out of range.
        ModelError: nothing is there, a config is damaged or lacks what decides the cost, or weights and
            config disagree.
        UnsupportedError: attention that is not understood; what was looked for is listed.

    Example:
        >>> from transformers import GPT2Config
        >>> from headwise.verbs import cost
        >>> book = cost(GPT2Config(), context=1024)
        >>> book.parameters.total, book.cache.token_bytes
        (124439808, 73728)
    """
    read = numbers(model_or_config, revision=revision, trust_remote_code=trust_remote_code)
    return ledger(
        read,
        batch=batch,
        context=context,
        source=source,
        dtype=dtype,
        cache_dtype=cache_dtype,
        phase=phase,
        bandwidth=measure_bandwidth() if bandwidth == "measure" else bandwidth,
    )


def sweep(model_or_config: Any, over: str, *, bandwidth: Bandwidth = None, **options: Any) -> Sweep:
    """What changes as heads, key-value heads or the context go up; see :func:`headwise.costs.sweep`.

    Args:
        model_or_config: as for :func:`cost`.
        over: ``"heads"``, ``"kv-heads"`` or ``"context"``. For ``"heads"`` the scale of what the attention layers read
            is measured where the model is in memory, by one small forward pass.
        bandwidth: as for :func:`cost`.
        options: as for :func:`headwise.costs.sweep`.
    """
    rate = measure_bandwidth() if bandwidth == "measure" else bandwidth
    read = numbers(model_or_config)
    if over == "heads" and options.get("input_rms") is None:
        live = _live(model_or_config)
        read = read if live is None else replace(read, input_rms=input_rms(live, read))
    return sweep_numbers(read, over, bandwidth=rate, **options)


def _live(given: Any) -> Model | None:
    """The model in memory, if one with weights was given."""
    if isinstance(given, Model):
        return given
    if isinstance(given, nn.Module) and not any(weight.is_meta for weight in given.parameters()):
        return as_model(given)
    return None


def numbers(model_or_config: Any, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelNumbers:
    """The numbers that a ledger is computed from; see :func:`cost` for what may be given."""
    from transformers import PreTrainedConfig

    given = model_or_config
    if isinstance(given, ModelNumbers):
        return given
    if isinstance(given, PreTrainedConfig):
        return _of_shapes(skeleton_of_config(given), _name(given))
    if isinstance(given, str | Path):
        module, notes = skeleton(given, revision=revision, trust_remote_code=trust_remote_code)
        read = _of_shapes(module, str(given))
        return replace(read, notes=(*read.notes, *notes))
    if isinstance(given, Model):
        return _of_model(given)
    if isinstance(given, nn.Module):
        if any(weight.is_meta for weight in given.parameters()):
            return _of_shapes(given)
        return _of_model(as_model(given))
    if isinstance(given, Mapping):
        raise InputError("a config was given as a mapping; give a transformers config, or the folder of config.json")
    raise InputError(
        "model_or_config must be a path, a hub id, a transformers config, a model or ModelNumbers, "
        f"not {type(given).__name__}"
    )


def _of_shapes(module: nn.Module, name: str | None = None) -> ModelNumbers:
    """A model without weights in memory: nothing can run, so what shapes do not tell is said."""
    read = numbers_of(module, name)
    return replace(read, notes=(*read.notes, *in_code_of_its_own(module, read.attention)))


def _name(config: Any) -> str:
    return config.name_or_path or next(iter(config.architectures or []), type(config).__name__)


def _of_model(model: Model) -> ModelNumbers:
    """Totals from the parameters, attention from the layout that a forward pass has shown."""
    read = numbers_of(model.module, model.name)
    try:
        layout = model.layout
    except (UnsupportedError, InputError) as error:
        why = str(error).partition(";")[0]
        return replace(read, notes=(*read.notes, f"heads are read from the shapes of the weights alone: {why}"))
    return _with_layout(read, layout, model.module)


def _with_layout(read: ModelNumbers, layout: HeadLayout, root: nn.Module) -> ModelNumbers:
    """Take from the layout what weights do not show: order, repeated calls, masks; refuse where the two disagree."""
    blocks = {site.block: site for site in read.attention}
    sites = []
    calls: dict[str, int] = {}
    for site in layout.sites:
        block = layout.blocks[site.block]
        known = blocks.get(site.block)
        calls[site.block] = calls.get(site.block, 0) + 1
        if known is not None and calls[site.block] % known.calls != 1 % known.calls:
            continue  # another call over the same projections
        if known is None:
            raise UnsupportedError(
                f"{site.block}: the forward pass has attention here, but the ledger does not understand its projections"
            )
        _agree(known, (block.query_heads, block.kv_heads, block.d_k, block.d_v))
        decodes = site.key.stack == "decoder" and (site.causal or site.key.kind == "cross")
        sites.append(
            replace(
                known,
                stack=site.key.stack,
                kind=site.key.kind,
                layer=site.layer,
                name=str(site.key),
                causal=site.causal,
                window=known.window if known.window is not None else site.window,
                cached=decodes and keeps_cache(root, site.block),
            )
        )
    met = {site.block for site in layout.sites}
    missed = [site for site in read.attention if site.block not in met]
    why = "not met by the forward pass that found the heads"
    notes = [f"{site.name}: {why if site.query_heads else 'no head is left'}" for site in missed]
    notes += [f"{path}: not counted as attention ({why})" for path, why in layout.uncovered]
    return replace(read, attention=(*sites, *missed), notes=(*read.notes, *notes))


def _agree(known: AttentionNumbers, seen: tuple[int, int, int, int]) -> None:
    read = (known.query_heads, known.kv_heads, known.d_k, known.d_v)
    shared = known.latent is not None and seen[0] == read[0] and seen[2:] == read[2:]
    if read != seen and not shared:
        raise ModelError(
            f"{known.block}: the weights have {read[0]} query and {read[1]} key-value heads of width {read[2]} and "
            f"{read[3]}, but the forward pass shows {seen[0]} and {seen[1]} of {seen[2]} and {seen[3]}"
        )

"""A whole transformers model in numbers: its attention layers in order, and what it has beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from headwise.costs import AttentionNumbers, ModelNumbers, Rest, dtype_name
from headwise.errors import InputError, UnsupportedError
from headwise.models.families import field_of, is_cross, stack_of, takes_cache
from headwise.verbs.cost_attention import Found, find_attention, is_matrix, is_stateful, nearest_config
from headwise.verbs.cost_experts import experts_of, is_expert, shared_experts
from headwise.verbs.cost_notes import differences, outside_layers
from headwise.verbs.cost_positions import (
    is_within,
    masked_above,
    packs_images,
    probe_above,
    set_apart,
    vision_positions,
)
from headwise.verbs.cost_repeats import calls_of, in_order_of_calls
from headwise.verbs.cost_shape import read_shape

__all__ = ["numbers_of"]

#: Weights of attention that takes the difference of two patterns, each over both halves of the values (Ye et al. 2024).
DIFFERENTIAL: Final = {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}
#: Stacks that no text goes through.
TOWERS: Final = ("vision", "audio")
#: Parts that see one position of every sequence.
ONCE: Final = ("pooler",)
#: Heads of a task, which see one position or all of them.
TASK: Final = ("classifier", "score", "qa_outputs", "pre_classifier")


def numbers_of(root: nn.Module, name: str | None = None) -> ModelNumbers:
    """Read a transformers model, with or without weights in memory.

    Raises:
        UnsupportedError: no attention whose projections are understood; what was looked for is listed.
        ModelError: weights that fit no whole number of heads.
    """
    found = list(find_attention(root))
    config = getattr(root, "config", None)
    kind = type(root).__name__
    if not found:
        raise UnsupportedError(
            f"{kind} has no attention that the ledger understands; looked for modules with projections called "
            "q_proj/k_proj/v_proj, query/key/value, q/k/v, q_lin/k_lin/v_lin and the like, or fused ones called "
            "query_key_value, qkv_proj, c_attn, Wqkv and the like, each with an output projection"
        )
    sites, apart = set_apart(root, [_site(root, one) for one in found])
    sites, said = _windows(_repeated(sites, config), config)
    rest, notes = _rest(root, found, sites, apart)
    notes += said + _stateful(root) + differences(root, found)
    notes += [
        f"{path} writes tokens of its own after those of this model: it is counted over as many positions as source "
        "says, and neither in a decode step nor in the cache"
        for path in apart
    ]
    weights = next((weight.dtype for weight in root.parameters() if weight.is_floating_point()), None)
    return ModelNumbers(
        name=name or getattr(config, "name_or_path", "") or kind,
        attention=tuple(sites),
        rest=rest,
        dtype=_dtype(
            weights if weights is not None and not _on_meta(root) else getattr(config, "dtype", None) or weights
        ),
        source=_source(config),
        vision=vision_positions(root, sites),
        init_std=_number(config, "initializer_range"),
        notes=tuple(notes),
    )


def _on_meta(root: nn.Module) -> bool:
    return any(weight.is_meta for weight in root.parameters())


def _dtype(dtype: Any) -> str | None:
    try:
        return None if dtype is None else dtype_name(dtype)
    except InputError:
        return None


def _site(root: nn.Module, found: Found) -> AttentionNumbers:
    numbers = read_shape(found)
    probe = probe_above(root, found.path)
    if probe is not None:
        # The stack is that of the positions it pools.
        stack = stack_of(root, found.path, causal=False)
        return replace(
            numbers,
            name=found.path,
            block=found.path,
            kind="cross",
            stack=stack,
            causal=False,
            cached=False,
            queries=max(1, probe.numel() // numbers.d_model),
        )
    kind = "cross" if is_cross(found.path, {}) or bool(getattr(found.module, "is_cross_attention", False)) else "self"
    causal = kind == "self" and (_causal(found) or masked_above(root, found.path))
    stack = stack_of(root, found.path, causal or kind == "cross")
    return replace(
        numbers,
        name=found.path,
        block=found.path,
        kind=kind,
        stack=stack,
        causal=causal,
        window=None if causal else _two_sided_window(found),
        packed=stack == "vision" and packs_images(root, found.path),
        calls=2 if dict(found.module.named_parameters(recurse=False)).keys() >= DIFFERENTIAL else 1,
        cached=stack == "decoder" and (causal or kind == "cross") and keeps_cache(root, found.path),
    )


def keeps_cache(root: nn.Module, path: str) -> bool:
    """Whether keys and values of a module can be kept between calls: its config tells, or a text part takes a cache."""
    config = nearest_config(root, path)
    text = getattr(config, "base_config_key", "") == "text_config"
    return hasattr(config, "use_cache") or (text and takes_cache(root.get_submodule(path)))


def _two_sided_window(found: Found) -> int | None:
    """The window of an encoder's layer: transformers lets it see keys at a distance of up to ``sliding_window``."""
    if not isinstance(getattr(found.module, "sliding_window", None), int):
        return None
    width = _number(found.config, "sliding_window")
    return None if width is None else int(width) + 1


def _causal(found: Found) -> bool:
    said = [getattr(found.module, name, None) for name in ("is_causal", "is_decoder")]
    if any(isinstance(value, bool) for value in said):
        return any(said)
    config = found.config
    if isinstance(getattr(config, "is_decoder", None), bool) and config.is_decoder:
        return True
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    family = getattr(config, "model_type", None)
    return family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _repeated(sites: list[AttentionNumbers], config: Any) -> list[AttentionNumbers]:
    """Number the layers in the order of their calls."""
    sites = in_order_of_calls(sites, config)
    counts: dict[tuple[str, str], int] = {}
    numbered = []
    for site in sites:
        key = (site.stack, site.kind)
        numbered.append(replace(site, layer=counts.get(key, 0)))
        counts[key] = counts.get(key, 0) + 1
    return numbered


def _windows(sites: list[AttentionNumbers], config: Any) -> tuple[list[AttentionNumbers], list[str]]:
    """Windows, chunks and shared caches of a decoder's self-attention, from the same source as transformers' cache."""
    from transformers import PreTrainedConfig
    from transformers.cache_utils import get_layer_types_and_kwargs

    decoder = [at for at, site in enumerate(sites) if site.stack == "decoder" and site.kind == "self" and site.causal]
    if not decoder or not isinstance(config, PreTrainedConfig):
        return sites, []
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "num_hidden_layers"):
        return sites, []
    kinds, extras = get_layer_types_and_kwargs(text)
    attending = [(kind, extra) for kind, extra in zip(kinds, extras, strict=True) if _attends(kind)]
    if len(attending) != len(decoder):
        if not any("sliding_window" in extra for extra in extras):
            return sites, []
        return sites, [
            f"windows are left out: the config speaks of {len(attending)} layers, the model has {len(decoder)}"
        ]
    out = list(sites)
    for at, (kind, extra) in zip(decoder, attending, strict=True):
        span = extra.get("sliding_window")
        out[at] = replace(
            sites[at],
            window=span if "sliding" in kind else None,
            chunk=span if kind == "chunked_attention" else None,
            shares_cache=kind == "dummy",
        )
    return out, []


def _stateful(root: nn.Module) -> list[str]:
    """Name layers that keep a state instead of keys and values: they have no heads in the ledger's sense."""
    classes: dict[str, int] = {}
    for module in root.modules():
        if is_stateful(module) and any(is_matrix(child) for child in module.children()):
            classes[type(module).__name__] = classes.get(type(module).__name__, 0) + 1
    return [
        f"{count} x {name} keep a state of constant size: their projections are counted, their state is not"
        for name, count in classes.items()
    ]


def _attends(kind: str) -> bool:
    return ("attention" in kind and kind != "linear_attention") or kind == "dummy"


def _rest(
    root: nn.Module, found: list[Found], sites: list[AttentionNumbers], apart: list[str]
) -> tuple[Rest, list[str]]:
    unique = {id(weight): weight for weight in root.parameters()}
    tables = {id(part.weight): part.weight for part in root.modules() if isinstance(part, nn.Embedding)}
    output = _output_matrix(root)
    tied = output is not None and id(output) in tables
    ours = {id(part) for one in found for part in one.module.modules()}
    ours |= {id(one.output) for one in found}
    once = 0
    products: list[tuple[str, int]] = []
    skipped: dict[str, int] = {}
    seen: set[int] = set() if output is None else {id(output)}
    for path, part in root.named_modules():
        weight = getattr(part, "weight", None)
        if id(part) in ours or not isinstance(weight, Tensor) or id(weight) in seen or isinstance(part, nn.Embedding):
            continue
        if weight.ndim > 2:
            skipped[type(part).__name__] = skipped.get(type(part).__name__, 0) + 1
        elif is_matrix(part) and (any(word in ONCE for word in path.split(".")) or probe_above(root, path) is not None):
            once += weight.numel()
        elif is_matrix(part) and _is_task(path):
            skipped[path] = 1
        elif is_expert(path):
            continue
        elif is_matrix(part) or (weight.ndim == 2 and "router" in type(part).__name__.lower()):
            seen.add(id(weight))
            products.append((path, weight.numel()))
    matrices, away, outside = _by_stack(root, (*products, *shared_experts(root)), sites, apart)
    experts, notes = experts_of(root)
    names = [name if count == 1 else f"{count} x {name}" for name, count in skipped.items()]
    names += [f"{path} ({count} matri{'x' if count == 1 else 'ces'} of no text)" for path, count in away.items()]
    rest = Rest(
        parameters=sum(weight.numel() for weight in unique.values()),
        embedding=sum(table.numel() for table in tables.values()),
        tied=output.numel() if tied and output is not None else 0,
        head=0 if output is None else output.numel(),
        matrices=matrices,
        once=once,
        not_counted=tuple(names),
        **experts._asdict(),
    )
    return rest, notes + outside_layers(outside)


def _is_task(path: str) -> bool:
    """Whether a matrix is the head of a task; a layer's router may be called a classifier too."""
    parts = path.split(".")
    at = next((at for at, part in enumerate(parts) if part in TASK), None)
    return at is not None and not any(part.isdigit() for part in parts[:at])


def _by_stack(
    root: nn.Module, products: Iterable[tuple[str, int]], sites: list[AttentionNumbers], apart: list[str]
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Weights that every position of a stack meets; how many matrices towers without heads have; the paths counted."""
    stacks = {site.stack for site in sites}
    writes = any(site.cached and site.causal for site in sites)
    matrices: dict[str, int] = {}
    away: dict[str, int] = {}
    outside = []
    for path, weights in products:
        stack = "second" if is_within(path, apart) else stack_of(root, path, "decoder" in stacks)
        if writes and stack in TOWERS and stack not in stacks and not _in_layer(path, sites):
            parts = path.split(".")
            tower = ".".join(parts[: 2 if parts[0] == "model" else 1])
            away[tower] = away.get(tower, 0) + 1
            continue
        stack = next(iter(stacks)) if len(stacks) == 1 else stack
        outside.append(path)
        matrices[stack] = matrices.get(stack, 0) + weights * calls_of(path, sites)
    return matrices, away, outside


def _in_layer(path: str, sites: list[AttentionNumbers]) -> bool:
    """Whether a layer around ``path`` has attention."""
    parts = path.split(".")
    layers = [".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdigit()]
    return any(is_within(site.block, layers) for site in sites)


def _output_matrix(root: nn.Module) -> Tensor | None:
    """The matrix that turns the residual stream into logits over the vocabulary, if the model has one."""
    get = getattr(root, "get_output_embeddings", None)
    module = get() if callable(get) else None
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _source(config: Any) -> int | None:
    """Positions of an encoder that are the same for every input: Whisper's 30 seconds."""
    if getattr(config, "is_encoder_decoder", False) and _number(config, "num_mel_bins"):
        value = _number(config, "max_source_positions")
        return None if value is None else int(value)
    return None


def _number(config: Any, name: str) -> float | None:
    value: float | None = field_of(config, name, kind=(int, float))
    return value

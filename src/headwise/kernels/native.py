"""The compiled kernel as a function of tensors: checks nothing, computes without gradients.

:mod:`headwise.kernels.cpu` is the backend; here is what stands between tensors and the extension:
whether it could be loaded, which target runs, and the addresses and strides that it reads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "TYPES",
    "Extras",
    "Output",
    "Rules",
    "core",
    "forced",
    "forward",
    "plain",
    "readable",
    "received",
    "target",
    "why_not",
]

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Loaded(NamedTuple):
    core: ModuleType | None
    target: int
    name: str
    why_not: str | None
    exchanges: bool = False  # the extension can take torch's tensors as they are


def _extension() -> ModuleType:
    """The compiled extension; ``HEADWISE_CORE`` names another build of it (the sanitizers' runs use it)."""
    other = os.environ.get("HEADWISE_CORE")
    if other is None:
        from headwise.kernels import _core  # type: ignore[attr-defined]

        return _core  # type: ignore[no-any-return]
    spec = importlib.util.spec_from_file_location("headwise.kernels._core", other)
    if spec is None or spec.loader is None:
        raise ImportError(f"HEADWISE_CORE={other} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load() -> _Loaded:
    try:
        extension = _extension()
    except ImportError as error:
        return _Loaded(None, 0, "", f"the compiled extension headwise.kernels._core could not be loaded: {error}")
    names = extension.targets()
    forced = os.environ.get("HEADWISE_TARGET")
    if forced is not None and forced not in names:
        reason = f"HEADWISE_TARGET={forced} is not a target that this machine can run ({', '.join(names)})"
        return _Loaded(None, 0, "", reason)
    index = names.index(forced) if forced is not None else 0
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    return _Loaded(extension, index, names[index], None, table is not None and extension.use_exchange(table))


_LOADED = _load()


def core() -> ModuleType | None:
    """The extension, or None where it could not be loaded."""
    return _LOADED.core


def target() -> str:
    """The instruction set that runs: ``avx512``, ``avx2``, ``neon`` or ``baseline``; empty without the extension."""
    return _LOADED.name


def why_not() -> str | None:
    """Why the kernel cannot run on this machine at all; None when it can."""
    return _LOADED.why_not


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Run a certain target inside the block; for tests and measurements."""
    global _LOADED  # noqa: PLW0603
    before = _LOADED
    assert before.core is not None
    _LOADED = before._replace(target=before.core.targets().index(name), name=name)
    try:
        yield
    finally:
        _LOADED = before


class Output(NamedTuple):
    """What a call wrote: z in q's dtype; floats (lse, entropy, max_weight, then sink, distance and top where wanted),
    whole numbers (argmax, visible), weights on pairs (P, B, H, Q) and on classes (B, H, Q, C)."""

    z: Tensor
    floats: Tensor | None
    whole: Tensor | None
    pairs: Tensor | None
    classes: Tensor | None


def readable(x: Tensor) -> Tensor:
    """x itself, or a copy where its last axis is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _plane(x: Tensor, keep: list[Tensor]) -> tuple[int, ...]:
    """Address and strides of a (B or 1, H or 1, Q or 1, K or 1) tensor, 0 where it broadcasts."""
    if x.shape[3] > 1 and x.stride(3) != 1:
        x = x.contiguous()
    keep.append(x)
    steps = (0 if size == 1 else step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True))
    return (x.data_ptr(), *steps, 0 if x.shape[3] == 1 else 1)


def _added(terms: tuple[Tensor, ...], keep: list[Tensor]) -> tuple[Any, ...] | None:
    if not terms:
        return None
    known = [term if term.dtype in TYPES else term.float() for term in terms]
    return tuple((_plane(term, keep), TYPES[term.dtype]) for term in known)


#: (padding, mask, added, distance bias, sinks) of a call without any.
_NO_RULES = (None, None, None, None, 0)


def _rules(rules: Rules, keep: list[Tensor]) -> tuple[Any, ...]:
    """(padding, mask, added, distance bias, sinks) as the extension takes them; copies are kept alive in ``keep``."""
    padding = mask = distance = None
    sink_address = 0
    if rules.key_padding is not None:
        key_padding = readable(rules.key_padding)
        keep.append(key_padding)
        padding = (key_padding.data_ptr(), key_padding.stride(0))
    if rules.mask is not None:
        mask = _plane(rules.mask, keep)
    if rules.distance_bias is not None:
        table = rules.distance_bias.float().contiguous()
        keep.append(table)
        distance = (table.data_ptr(), table.shape[1] if table.shape[0] > 1 else 0, table.shape[1], rules.distance_zero)
    if rules.sinks is not None:
        sinks = rules.sinks.float().contiguous()
        keep.append(sinks)
        sink_address = sinks.data_ptr()
    return padding, mask, _added(rules.added, keep), distance, sink_address


class Rules(NamedTuple):
    """Everything beside q, k and v that shapes a call; None and 0 for what is not there."""

    key_padding: Tensor | None = None
    mask: Tensor | None = None
    added: tuple[Tensor, ...] = ()
    distance_bias: Tensor | None = None
    distance_zero: int = 0
    sinks: Tensor | None = None


class Extras(NamedTuple):
    """What is wanted beside z and the row statistics; ``top``: each row's largest score in units of log 2."""

    distance: bool = False
    pairs: Tensor | None = None
    pair_lists: tuple[Tensor, Tensor] | None = None
    classes: Tensor | None = None
    n_classes: int = 0
    top: bool = False


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    softcap: float,
    visible: tuple[bool, int, int | None],
    statistics: bool,
) -> tuple[Tensor, ...] | None:
    """The plain case by the shortest road: z, or z, lse, entropy, max_weight, argmax and visible.

    The extension looks at the tensors itself; None where anything about them needs a second look. ``visible`` is
    (causal, window or 0, offset or None), ``softcap`` 0 for none.
    """
    if not _LOADED.exchanges:
        return None
    causal, window, offset = visible
    found: tuple[Tensor, ...] | None = _LOADED.core.plain(  # type: ignore[union-attr]
        _LOADED.target, torch.get_num_threads(), q, k, v, scale, softcap, causal, window, offset, statistics
    )
    return found


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    visible: tuple[bool, int, int],
    kv_map: tuple[int, ...] | None = None,
    statistics: bool = False,
    rules: Rules | None = None,
    extras: Extras | None = None,
) -> Output:
    """Run the kernel. Shapes as in :class:`headwise.kernels.Problem`; the caller has checked them.

    ``visible`` is (causal, window or 0, offset). ``rules`` and ``extras`` are None for the plain case, which is
    what a short call must be quick for.
    """
    assert _LOADED.core is not None
    q_step, k_step, v_step = q.stride(), k.stride(), v.stride()
    if q_step[3] != 1 or k_step[3] != 1 or v_step[3] != 1:
        q, k, v = readable(q), readable(k), readable(v)
        q_step, k_step, v_step = q.stride(), k.stride(), v.stride()
    batch, heads, queries, d_k = q.shape
    _, groups, keys, d_v = v.shape
    # queries before heads, as torch's own attention has it: joining the heads copies nothing
    z = torch.empty((batch, queries, heads, d_v), dtype=q.dtype).transpose(1, 2)
    keep: list[Tensor] = []
    ruled = _NO_RULES if rules is None else _rules(rules, keep)
    floats, whole, rows = _room(q, rules, extras) if statistics else (None, None, None)
    more = _NO_MORE if extras is None else _more(extras, q, keep)
    _LOADED.core.forward(
        _LOADED.target,
        torch.get_num_threads(),
        TYPES[q.dtype],
        (batch, heads, groups, queries, keys, d_k, d_v),
        (q.data_ptr(), k.data_ptr(), v.data_ptr(), z.data_ptr()),
        q_step,
        k_step,
        v_step,
        z.stride(),
        kv_map,
        scale,
        softcap or 0.0,
        visible,
        *ruled,
        rows,
        more.pair_addresses,
        more.class_addresses,
    )
    return Output(z, floats, whole, more.pairs, more.classes)


def _room(q: Tensor, rules: Rules | None, extras: Extras | None) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Room for the row statistics, and its addresses in the order in which the extension takes them."""
    batch, heads, queries, _ = q.shape
    sinks = rules is not None and rules.sinks is not None
    distance, top = (False, False) if extras is None else (extras.distance, extras.top)
    n = 3 + sinks + distance
    floats = torch.empty((n + top, batch, heads, queries), dtype=torch.float32)
    whole = torch.empty((2, batch, heads, queries), dtype=torch.int64)
    at, step, counts = floats.data_ptr(), 4 * batch * heads * queries, whole.data_ptr()
    sink_at = at + 3 * step if sinks else 0
    distance_at = at + (3 + sinks) * step if distance else 0
    top_at = at + n * step if top else 0
    return floats, whole, (at, at + step, at + 2 * step, counts, counts + 2 * step, sink_at, distance_at, top_at)


class _More(NamedTuple):
    """Weights on pairs and classes, and the addresses that the extension fills."""

    pairs: Tensor | None = None
    classes: Tensor | None = None
    pair_addresses: tuple[int, ...] | None = None
    class_addresses: tuple[int, ...] | None = None


_NO_MORE = _More()


def _more(extras: Extras, q: Tensor, keep: list[Tensor]) -> _More:
    batch, heads, queries, _ = q.shape
    lists = _pair_lists(extras, q, keep)
    pairs = pair_addresses = weights = class_addresses = None
    if lists is not None:
        pairs = _pair_output(lists[2], extras, q)
        pair_addresses = tuple(x.data_ptr() for x in lists)
    if extras.classes is not None:
        classes = readable(extras.classes)
        keep.append(classes)
        weights = torch.empty((batch, heads, queries, extras.n_classes), dtype=torch.float32)
        step = classes.stride(0) if classes.shape[0] > 1 else 0
        class_addresses = (classes.data_ptr(), step, extras.n_classes, weights.data_ptr())
    return _More(pairs, weights, pair_addresses, class_addresses)


def _pair_lists(extras: Extras, q: Tensor, keep: list[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row offsets, keys, and room for the weights (H, pairs), from (P, B or 1, Q) or as they are."""
    batch, heads, queries, _ = q.shape
    if extras.pair_lists is not None:
        offsets, keys = extras.pair_lists[0].contiguous(), extras.pair_lists[1].contiguous()
    elif extras.pairs is not None:
        rules = extras.pairs.shape[0]
        keys = extras.pairs.expand(rules, batch, queries).permute(1, 2, 0).contiguous()
        offsets = torch.arange(batch * queries + 1) * rules
    else:
        return None
    keep += [offsets, keys]
    return offsets, keys, torch.zeros((heads, keys.numel()), dtype=torch.float32)


def _pair_output(weights: Tensor, extras: Extras, q: Tensor) -> Tensor:
    if extras.pairs is None:
        return weights
    batch, heads, queries, _ = q.shape
    return weights.view(heads, batch, queries, extras.pairs.shape[0]).permute(3, 1, 0, 2)


def received(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    visible: tuple[bool, int, int],
    kv_map: tuple[int, ...] | None,
    rules: Rules,
    row_weights: Tensor | None,
) -> Tensor:
    """Sums of the pattern over query rows, (B, H, K), from each row's ``lse`` (B, H, Q)."""
    assert _LOADED.core is not None
    batch, heads, queries, d_k = q.shape
    groups, keys = k.shape[1], k.shape[2]
    q, k, lse = readable(q), readable(k), lse.float().contiguous()
    keep = [lse]
    weights = None
    if row_weights is not None:
        row_weights = row_weights.float().contiguous()
        keep.append(row_weights)
        weights = (row_weights.data_ptr(), queries if row_weights.shape[0] > 1 else 0)
    out = torch.empty((batch, heads, keys), dtype=torch.float32)
    _LOADED.core.received(
        _LOADED.target,
        torch.get_num_threads(),
        TYPES[q.dtype],
        (batch, heads, groups, queries, keys, d_k, 0),
        (q.data_ptr(), k.data_ptr(), 0, 0),
        q.stride(),
        k.stride(),
        kv_map,
        scale,
        softcap or 0.0,
        visible,
        *_rules(rules, keep),
        lse.data_ptr(),
        weights,
        out.data_ptr(),
    )
    return out

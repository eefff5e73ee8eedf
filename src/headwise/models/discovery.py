"""Discovery: run a model once on a small input, watch every attention call, and check each one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, InputError, UnsupportedError
from headwise.layout import Block, HeadLayout, Projection, Site, SiteKey
from headwise.models.cut_modules import HeadCut, cut_of
from headwise.models.direct import DirectAttention, find_direct, outputs_differ, slow_path
from headwise.models.examples import candidates, padded
from headwise.models.families import check_counts, check_groups, find_projections, is_cross, stack_of
from headwise.models.interface import alone
from headwise.models.layouts import Discovered
from headwise.models.masks import CompactMaskError
from headwise.models.probe import Probe, Record, run_model, tensors_of
from headwise.models.restore import eager, unchanged
from headwise.models.standin import MaskMode
from headwise.models.static import attention_elsewhere, attention_on_seam, refuse_every, refuse_without_attention

__all__ = ["MODEL_FAILURES", "probe_model"]

#: What a model's own code raises on an input or an output that it does not take.
MODEL_FAILURES: Final = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    KeyError,
    AssertionError,
    NotImplementedError,
    ImportError,
    ZeroDivisionError,
)


def probe_model(root: nn.Module, example: Mapping[str, Any] | None) -> Discovered:
    """Find the heads of ``root``; see :func:`~headwise.models.discover`."""
    check_groups(root)
    if example is None:
        refuse_without_attention(root)
    tries = [dict(example)] if example is not None else candidates(root)
    with unchanged(root), alone(root.modules()):
        inputs, plain = _plain(root, tries, given=example is not None)
        plain, fast = _slow(root, inputs, plain)
        direct = find_direct(root, inputs, attention_on_seam(root))
        if not attention_on_seam(root) and not direct.axes and not _emptied(root):
            refuse_every(root, direct.refused)
        probe, masks, why = _probe_masks(root, inputs, plain, direct)
        differs = _eager_differs(root, inputs, plain)
        own_output = probe.returned_weights and not _same_without_weights(root, inputs, plain, masks, direct)
    facts = (*_facts(root, masks, why, own_output, differs), *direct.facts, *fast)
    layout = _layout(root, probe, facts, direct)
    attention = {path: root.get_submodule(path) for path in probe.paths}
    axes = {path: direct.axes[path] for path in probe.paths if path in direct.axes}
    return Discovered(layout, attention, masks, own_output, axes)


def _slow(
    root: nn.Module, inputs: Mapping[str, Any], plain: list[Tensor]
) -> tuple[list[Tensor], tuple[tuple[str, str], ...]]:
    """What the model gives without torch's fused fast path, and a fact where that is something else."""
    with slow_path(root) as changed:
        if not changed:
            return plain, ()
        slow = tensors_of(run_model(root, inputs))
    if not outputs_differ(plain, slow):
        return slow, ()
    return slow, (
        (
            "fast path",
            "torch's fused path of nn.MultiheadAttention is off while headwise looks on; it gives zeros at padding "
            "where the path in steps gives numbers that nothing should read",
        ),
    )


def _plain(root: nn.Module, tries: list[dict[str, Any]], *, given: bool) -> tuple[dict[str, Any], list[Tensor]]:
    """The first input that the model runs on, and what it gives."""
    failures: list[Exception] = []
    for inputs in tries:
        try:
            return inputs, tensors_of(run_model(root, inputs))
        except MODEL_FAILURES as one:
            failures.append(one)
    failure = failures[0]
    names = ", ".join(f"{name} {_shape(value)}" for name, value in tries[0].items())
    whose = "the example" if given else "the input that headwise made for it"
    raise InputError(
        f"{type(root).__name__} does not run on {whose} ({names}): {type(failure).__name__}: {failure}; "
        "give the keyword arguments of a small forward pass that it runs on (example= in Python, --inputs FILE on the "
        "command line)"
    ) from failure


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _probe_masks(
    root: nn.Module, inputs: Mapping[str, Any], plain: list[Tensor], direct: DirectAttention
) -> tuple[Probe, MaskMode, str]:
    """Probe with compact masks, and where the model computes with its masks or gives other numbers, with whole ones."""
    try:
        return _probe(root, inputs, plain, "compact", direct), "compact", ""
    except CompactMaskError as refusal:
        why = refusal.what
    except _DiffersError as difference:
        why = str(difference)
    except MODEL_FAILURES as failure:
        why = f"{type(failure).__name__}: {failure}"
    try:
        return _probe(root, inputs, plain, "dense", direct), "dense", why
    except _DiffersError as difference:
        if difference.refusal is not None:
            raise difference.refusal from None
        raise UnsupportedError(
            f"{type(root).__name__}: {difference}; something changes its attention that does not pass "
            "through the seam, so its heads would be measured wrongly"
        ) from None
    except MODEL_FAILURES as failure:
        if isinstance(failure, HeadwiseError):
            raise
        raise UnsupportedError(
            f"{type(root).__name__} runs by itself but not with its attention function replaced: "
            f"{type(failure).__name__}: {failure}"
        ) from failure


class _DiffersError(Exception):
    """The model's own numbers and headwise's disagree, or headwise refuses a call."""

    def __init__(self, text: str, refusal: HeadwiseError | None = None) -> None:
        super().__init__(text)
        self.refusal = refusal


def _new_probe(root: nn.Module, direct: DirectAttention, *, keep_weights: bool = True) -> Probe:
    called = {path: root.get_submodule(path) for path in direct.axes}
    return Probe(root, {**attention_on_seam(root), **called}, keep_weights, direct=direct.axes)


def _probe(
    root: nn.Module, inputs: Mapping[str, Any], plain: list[Tensor], masks: MaskMode, direct: DirectAttention
) -> Probe:
    probe = _new_probe(root, direct)
    probe.by_gradient = True
    with probe.running(masks):
        outputs = tensors_of(run_model(root, inputs))
    if not probe.records and not _emptied(root):
        raise UnsupportedError(
            f"{type(root).__name__}: none of its {len(probe.static)} attention modules was called on the example; "
            "give an input that reaches them (example= in Python, --inputs FILE on the command line)"
        )
    _compare(probe, plain, outputs)
    with_padding = padded(root, inputs)
    if with_padding is not None and _takes(root, with_padding):
        again = _new_probe(root, direct)
        with again.running(masks):
            run_model(root, with_padding)
        _compare(again, [], [])
    return probe


def _takes(root: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the model by itself runs on the input; some take no padding."""
    try:
        run_model(root, inputs)
    except MODEL_FAILURES:
        return False
    return True


def _compare(probe: Probe, plain: list[Tensor], outputs: list[Tensor]) -> None:
    for record in probe.records:
        if isinstance(record.error, HeadwiseError):
            raise _DiffersError(str(record.error), record.error)
        if record.error is not None:
            raise _DiffersError(f"{record.path}: {record.error}")
    for left, right in zip(plain, outputs, strict=False):
        if left.shape != right.shape or not _close(left, right):
            raise _DiffersError("the model's output changes although every head's output is its own")


def _close(left: Tensor, right: Tensor) -> bool:
    if not left.is_floating_point():
        return True
    allowed = {torch.bfloat16: 1e-1, torch.float16: 1e-2}.get(left.dtype, 1e-3)
    left, right = left.double(), right.double()
    finite = torch.isfinite(left)
    if not torch.equal(finite, torch.isfinite(right)):
        return False
    scale = left[finite].abs().max().item() if bool(finite.any()) else 0.0
    return bool(((left - right)[finite].abs() <= allowed * scale + 1e-6).all())


def _same_without_weights(
    root: nn.Module, inputs: Mapping[str, Any], plain: list[Tensor], masks: MaskMode, direct: DirectAttention
) -> bool:
    """Whether the model runs alike when the attention function returns no weights."""
    probe = _new_probe(root, direct, keep_weights=False)
    try:
        with probe.running(masks):
            outputs = tensors_of(run_model(root, inputs))
    except MODEL_FAILURES:
        return False
    return len(plain) == len(outputs) and all(_close(left, right) for left, right in zip(plain, outputs, strict=True))


def _eager_differs(root: nn.Module, inputs: Mapping[str, Any], plain: list[Tensor]) -> bool:
    """Whether the model gives other numbers under transformers' eager attention than under the one it is set to."""
    with eager(root) as changed:
        if not changed:
            return False
        try:
            outputs = tensors_of(run_model(root, inputs))
        except MODEL_FAILURES:
            return False
    return any(
        left.shape == right.shape and not _close(left, right) for left, right in zip(plain, outputs, strict=False)
    )


def _facts(root: nn.Module, masks: MaskMode, why: str, own_output: bool, differs: bool) -> tuple[tuple[str, str], ...]:
    facts = [("masks", masks if not why else f"{masks}: {why}")]
    if own_output:
        facts.append(("output", "computed by the model's own attention function, whose weights it needs"))
    if differs:
        facts.append(
            (
                "implementations",
                f"{type(root).__name__} gives other numbers under 'eager' than under the attention implementation "
                "it is set to; measured is what it computes as it is set",
            )
        )
    return tuple(facts)


def _layout(root: nn.Module, probe: Probe, facts: tuple[tuple[str, str], ...], direct: DirectAttention) -> HeadLayout:
    sites: list[Site] = []
    blocks: dict[str, Block] = {}
    labels: dict[tuple[str, str], int] = {}
    for record in probe.records:
        block = _block(probe, record)
        known = blocks.setdefault(record.path, block)
        if (known.query_heads, known.kv_heads, known.d_k, known.d_v) != (
            block.query_heads,
            block.kv_heads,
            block.d_k,
            block.d_v,
        ):
            raise UnsupportedError(f"{record.path}: its calls have different numbers or widths of heads")
        kind = "cross" if is_cross(record.path, record.arguments) else "self"
        stack = stack_of(root, record.path, record.causal)
        layer = labels.get((stack, kind), 0)
        labels[stack, kind] = layer + 1
        if not block.query_heads:
            facts += (("empty", f"{record.path}: no head is left; its output is the bias of the output projection"),)
            continue
        key = SiteKey(stack, kind, record.path, record.call)
        sites.append(Site(key, record.path, layer, record.causal, record.window))
    for path, cut in _emptied(root).items():
        if path not in blocks:
            blocks[path] = _empty_block(path, cut)
            facts += (("empty", f"{path}: no head is left, and nothing of it was seen to run"),)
    for block in blocks.values():
        check_counts(root, block.module, block)
    return HeadLayout(tuple(sites), blocks, uncovered=_uncovered(root, probe, direct), facts=facts)


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(other + ".")


def _block(probe: Probe, record: Record) -> Block:
    cut = cut_of(probe.root.get_submodule(record.path))
    if cut is not None and not cut.heads:
        return _empty_block(record.path, cut)
    kv_map = None if cut is None else cut.kv_map
    key, value, _ = record.groups(cut)
    found, told = find_projections(record.linears, record.query, key, value), record.told
    heads, kv_heads = record.query.shape[1], key.shape[1]
    output, why = probe.output_projection(record)
    unknown = [one for one in found.unknown if one[0] not in told.found]
    if output is None:
        unknown.append(("o", why))
    gate = _rooted(told.found.get("gate"), record.path)
    return Block(
        module=record.path,
        query_heads=heads,
        kv_heads=kv_heads,
        d_k=record.query.shape[3],
        d_v=record.value.shape[3],
        kv_map=kv_map or tuple(head // (heads // kv_heads) for head in range(heads)),
        q=_rooted(found.q or told.found.get("q"), record.path),
        k=_rooted(found.k or told.found.get("k"), record.path),
        v=_rooted(found.v or told.found.get("v"), record.path),
        o=output,
        o_path=None if output is None else output.parameter,
        unknown=tuple(unknown),
        gate=gate,
        partial=tuple(told.partial.items()),
    )


def _empty_block(path: str, cut: HeadCut) -> Block:
    gone = tuple((part, "no head is left") for part in "qkvo")
    return Block(path, 0, 0, cut.d_k, cut.d_v, (), unknown=gone)


def _emptied(root: nn.Module) -> dict[str, HeadCut]:
    """Attention modules of which no head is left."""
    cuts = ((path, cut_of(part)) for path, part in root.named_modules())
    return {path: cut for path, cut in cuts if cut is not None and not cut.heads}


def _rooted(projection: Projection | None, path: str) -> Projection | None:
    if projection is None or not path:
        return projection
    return replace(projection, parameter=f"{path}.{projection.parameter}")


def _uncovered(root: nn.Module, probe: Probe, direct: DirectAttention) -> tuple[tuple[str, str], ...]:
    met = {record.path for record in probe.records} | set(_emptied(root))
    parts = [(path, f"{type(root.get_submodule(path)).__name__}: {why}") for path, why in direct.refused.items()]
    parts += [
        (path, f"{type(module).__name__} computes attention in a way that was not seen on the example input")
        for path, module in attention_elsewhere(root).items()
        if path not in direct.refused and not any(_within(path, other) or _within(other, path) for other in met)
    ]
    parts += [
        (path, f"{type(module).__name__} was not called on the example input")
        for path, module in probe.static.items()
        if path not in met and not any(other.startswith(path + ".") for other in met)
    ]
    return tuple(parts)

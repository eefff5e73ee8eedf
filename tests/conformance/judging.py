"""One model type of transformers: built small, measured, compared with its own attention in float64, gated.

What the model itself computes is recorded from a copy of it in float64 with eager attention: the weights that its
eager attention functions return, and everything that comes out of torch's softmax and its fused attention.
"""

from __future__ import annotations

import copy
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import zoo
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.utils import logging

from headwise.errors import HeadwiseError
from headwise.kernels import Wanted
from headwise.layout import HeadLayout, Site, SiteKey
from headwise.models import gate, observe, output_weight
from headwise.models.discovery import MODEL_FAILURES
from headwise.models.examples import candidates, padded
from headwise.models.layouts import Discovered, discovered
from headwise.models.probe import run_model, tensors_of
from headwise.models.restore import configs_of
from headwise.models.torch_seam.heads import Heads, assumed

__all__ = ["EXACT", "Verdict", "judge", "types"]

#: Longest time for one type, seconds: an end to what hangs, far above the few seconds that a type takes.
PATIENCE = 300
EXACT, AS_SET, WRONG = "exact", "as set", "WRONG"
REFUSED, NO_EXAMPLE, NOT_BUILT, FAILED = "refused", "no example", "not built", "FAILED"


@dataclass(frozen=True)
class Verdict:
    """What came out for one type.

    Attributes:
        model_type: its name in transformers.
        verdict: ``"exact"``; ``"as set"`` (measured, but transformers' own eager attention gives other numbers than its
            default, so that there is nothing to compare with); ``"refused"`` by headwise; ``"no example"`` (headwise
            could not make an input); ``"not built"`` (no small model from its config); ``"WRONG"``; ``"FAILED"``.
        reason: why, where it is not exact.
        sites: what was found, such as ``"decoder self 2"``.
        seam: how it was seen: ``"interface"``, ``"torch"``, ``"softmax"``, joined by ``+``.
        masks: ``"compact"`` or ``"dense"``.
        gate: ``"equal"`` where a gate equals zeroed columns of W_O, else why that was not compared.
        uncovered: number of modules with attention that is not measured.
        off: largest difference of a row's entropy or largest weight.
    """

    model_type: str
    verdict: str
    reason: str = ""
    sites: str = ""
    seam: str = ""
    masks: str = ""
    gate: str = ""
    uncovered: int = 0
    off: float = 0.0


class Rows:
    """Collects entropy, largest weight and visible keys of every call, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Tensor, Tensor, Tensor]] = []

    def want(self, site: Any, problem: Any) -> Wanted:
        return Wanted(rows=True)

    def see(self, call: Any) -> None:
        rows = call.answer.rows
        largest = rows.max_weight if rows.sink is None else rows.max_weight / (1 - rows.sink)
        self.calls.append((call.site.key, rows.entropy, largest, rows.visible))


@contextmanager
def replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``owner``'s ``name`` is what ``made`` makes of it."""
    space = owner if isinstance(owner, dict) else None
    before = owner[name] if space is not None else getattr(owner, name)
    own = name in owner if space is not None else name in vars(owner)
    if space is not None:
        space[name] = made(before)
    else:
        setattr(owner, name, made(before))
    try:
        yield
    finally:
        if space is not None:
            space[name] = before
        elif own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def dense_attention(kept: list[Tensor]) -> Callable[[Any], Any]:
    """Torch's fused attention written out; keeps its weights."""

    def made(_before: Any) -> Any:
        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if enable_gqa:
                key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
            scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
            if is_causal:
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
                scores = scores.masked_fill(~seen, -torch.inf)
            if attn_mask is not None:
                scores = (
                    scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
                )
            blind = (scores == -torch.inf).all(-1, keepdim=True)  # torch gives such a row zeros
            scores = scores.masked_fill(blind, 0)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            weights = (weights / weights.sum(-1, keepdim=True)).masked_fill(blind, 0)
            kept.append(without_underflow(weights, scores.masked_fill(blind, -torch.inf), -1))
            return weights @ value

        return attend

    return made


def without_underflow(output: Tensor, scores: Tensor, dim: int) -> Tensor:
    """A softmax in which a visible key that float32 rounds to zero, and float64 does not, is left as next to nothing.

    Visible keys are counted by their weights, and sharp random models have some of 1e-85.
    """
    if output.dtype == torch.float64 or not bool((output == 0).any()):
        return output
    exact = (scores.double() - scores.double().amax(dim, keepdim=True)).exp()
    return torch.where((output == 0) & (exact > 0), torch.finfo(output.dtype).tiny, output)


@contextmanager
def recorded(model: nn.Module) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """What eager attention functions return as weights, and what comes out of every softmax; each in order."""
    eager: list[Tensor] = []
    softmax: list[Tensor] = []

    def keeping_weights(function: Any) -> Any:
        def kept(*args: Any, **kwargs: Any) -> Any:
            output, weights = function(*args, **kwargs)
            eager.append(weights)
            return output, weights

        return kept

    def keeping_output(function: Any) -> Any:
        def kept(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            if output.ndim > 2:
                named = dict(zip(("input", "dim"), args, strict=False)) | kwargs
                output = without_underflow(output, named["input"], named["dim"])
                softmax.append(output.clone())
            return output

        return kept

    spaces = {
        id(sys.modules[type(part).__module__]): sys.modules[type(part).__module__].__dict__ for part in model.modules()
    }
    with ExitStack() as stack:
        for space in spaces.values():
            for name in [name for name in space if "eager_attention_forward" in name and callable(space[name])]:
                stack.enter_context(replaced(space, name, keeping_weights))
        for owner in (torch, functional, Tensor):
            stack.enter_context(replaced(owner, "softmax", keeping_output))
        stack.enter_context(replaced(functional, "scaled_dot_product_attention", dense_attention(softmax)))
        yield eager, softmax


def entropy_of(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy of each row in nats, and its largest weight; of the keys alone where a sink took some."""
    share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return -torch.special.xlogy(share, share).sum(-1), share.amax(-1)


def first_that_runs(model: nn.Module) -> dict[str, Any]:
    """The input with which headwise found the heads."""
    for inputs in candidates(model):
        try:
            with torch.no_grad():
                run_model(model, inputs)
        except MODEL_FAILURES:
            continue
        return inputs
    raise AssertionError("headwise found heads with an input that does not run")


def left_padded(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The same with two positions of padding before the first row; None where the model takes none."""
    shifted = padded(model, inputs)
    if shifted is None:
        return None
    shifted["attention_mask"] = shifted["attention_mask"].flip(1)
    try:
        with torch.no_grad():
            run_model(model, shifted)
    except MODEL_FAILURES:
        return None
    return shifted


def own_weights(
    model: nn.Module, inputs: dict[str, Any], *, double: bool = True, implementation: str = "eager"
) -> tuple[list[Tensor], list[Tensor]]:
    """What the model computes by itself, in float64 (float32 where it does not run in float64, or where asked)."""
    truth = copy.deepcopy(model).double() if double else copy.deepcopy(model)
    for config in configs_of(truth):
        config._attn_implementation_internal = implementation
    doubled = {
        name: value.double() if double and isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = lambda **given: eager_mask(**{**given, "dtype": torch.float32})
    try:
        with torch.no_grad():
            with recorded(truth) as kept:
                try:
                    run_model(truth, doubled)
                except RuntimeError as failure:
                    if "ouble" not in str(failure) and "overflow" not in str(failure):
                        raise
                    kept[0].clear()
                    kept[1].clear()
            finite = all(weights is None or bool(torch.isfinite(weights).all()) for weights in (*kept[0], *kept[1]))
            # kernels without float64, or masks of its own whose float64 minimum is -inf in its float32 softmax
            if not (finite and (kept[0] or kept[1])):
                with recorded(truth.float()) as kept:
                    run_model(truth, inputs)
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    return kept


def difference(call: tuple[Any, Tensor, Tensor, Tensor], weights: Tensor) -> float | str:
    """How far a call's rows are from ``weights`` (B, H, Q, K), beyond 1e-4 of each value; or what does not fit."""
    key, entropy, largest, visible = call
    expected = entropy_of(weights)
    if expected[0].shape != entropy.shape:
        return f"{key}: shapes {tuple(expected[0].shape)} and {tuple(entropy.shape)}"
    seeing = (visible > 0).expand(entropy.shape)
    counted = (weights > 0).sum(-1)
    if not torch.equal(visible.expand(entropy.shape)[seeing], counted[seeing]):
        where = (visible.expand(entropy.shape) != counted) & seeing
        return f"{key}: {int(visible.expand(entropy.shape)[where][0])} keys are visible, not {int(counted[where][0])}"
    worst = 0.0
    for mine, theirs in zip((entropy, largest), expected, strict=True):
        off = ((mine.double() - theirs.double()).abs() - 1e-4 * theirs.abs())[seeing]
        if not bool(torch.isfinite(off).all()):
            return f"{key}: not finite"
        worst = max(worst, off.max().item() if off.numel() else 0.0)
    return worst


def compare(model: nn.Module, found: Discovered, inputs: dict[str, Any]) -> tuple[str, float]:
    """What is wrong, or how far the rows are from the model's own attention.

    In float64 first; where that is off, the model's own float32 decides, ten times as strictly: what is left then is
    the model's own rounding. Last, where eager attention gives rows that see no key something else than torch's fused
    attention does, and later layers look at them: the fused attention that the model is set to, written out.
    """
    rows = Rows()
    with torch.no_grad(), observe(model, rows):
        run_model(model, inputs)
    problem, off = _compare(rows, found, *own_weights(model, inputs))
    if problem or off > 1e-4:
        alike, single = _compare(rows, found, *own_weights(model, inputs, double=False))
        if not alike and single <= 1e-5:
            return "", single
        if all(config._attn_implementation == "sdpa" for config in configs_of(model)):
            fused, off_fused = _compare_fused(rows, own_weights(model, inputs, implementation="sdpa")[1])
            if not fused and off_fused <= 1e-4:
                return "", off_fused
    return problem, off


def _compare_fused(rows: Rows, weights: list[Tensor]) -> tuple[str, float]:
    """The same against the weights of every call of torch's fused attention, call by call."""
    if len(rows.calls) != len(weights):
        return f"{len(rows.calls)} calls seen, {len(weights)} of fused attention", 0.0
    worst = 0.0
    for call, one in zip(rows.calls, weights, strict=True):
        off = difference(call, one)
        if isinstance(off, str):
            return off, 0.0
        worst = max(worst, off)
    return "", worst


def _compare(rows: Rows, found: Discovered, eager: list[Tensor], softmax: list[Tensor]) -> tuple[str, float]:
    through = [call for call in rows.calls if call[0].module not in found.direct]
    if len(through) != len(eager):
        return f"{len(through)} calls seen, {len(eager)} eager calls", 0.0
    worst = 0.0
    for call, weights in zip(through, eager, strict=True):
        if weights is None:
            return f"{call[0]}: no eager weights", 0.0
        off = difference(call, weights)
        if isinstance(off, str):
            return off, 0.0
        worst = max(worst, off)
    place = 0
    for call in (call for call in rows.calls if call[0].module in found.direct):
        nearest = float("inf")
        for later, weights in enumerate(softmax[place:], start=place):
            off = difference(call, _split(found, call, weights))
            if isinstance(off, float):
                nearest = min(nearest, off)
                if off <= 1e-4:
                    place = later + 1
                    worst = max(worst, off)
                    break
        else:
            return f"{call[0]}: no softmax of the model has these rows, the nearest is off by {nearest:.2g}", 0.0
    return "", worst


def _split(found: Discovered, call: tuple[Any, Tensor, Tensor, Tensor], weights: Tensor) -> Tensor:
    """``weights`` with the heads of a call on their own axis, where they fit."""
    lead, count = weights.ndim - 2, call[1].shape[1]
    heads = found.direct[call[0].module].get(lead) or (Heads(1, None, count) if lead == 1 else assumed(lead))
    return weights if heads.axis is None and weights.shape[0] % heads.count else heads.split(weights)


def compare_gates(model: nn.Module, layout: HeadLayout, inputs: dict[str, Any]) -> str:
    """``"equal"`` when the last head of one site of every kind, gated, equals zeroed columns of W_O; else why not."""
    kinds = {(site.key.stack, site.key.kind): site for site in layout.sites}
    compared = False
    for site in kinds.values():
        block = layout.block_of(site.key)
        if block.o is None:
            continue
        head = block.query_heads - 1
        changed = copy.deepcopy(model)
        with torch.no_grad():
            output_weight(changed, block)[head] = 0
            expected = tensors_of(run_model(changed, inputs))
            with gate(model, {key: [head] for key in _of_the_same_weights(model, layout, site)}):
                gated = tensors_of(run_model(model, inputs))
        for left, right in zip(gated, expected, strict=True):
            if not left.is_floating_point():
                continue
            scale = max(1.0, right[torch.isfinite(right)].abs().max().item() if right.numel() else 1.0)
            if left.shape != right.shape or not torch.allclose(left, right, rtol=0, atol=2e-5 * scale, equal_nan=True):
                worst = (left - right).abs().max().item() if left.shape == right.shape else float("inf")
                return f"DIFFERS at {site.key} by {worst:.2g} where values reach {scale:.2g}"
        compared = True
    if compared:
        return "equal"
    return "not compared: " + next(dict(block.unknown)["o"] for block in layout.blocks.values() if block.o is None)


def _of_the_same_weights(model: nn.Module, layout: HeadLayout, site: Site) -> list[SiteKey]:
    """The sites whose heads go through the same output projection, also where two modules hold one weight."""
    blocks = {path: block for path, block in layout.blocks.items() if block.o is not None}
    place = output_weight(model, blocks[site.block]).data_ptr()
    same = {path for path, block in blocks.items() if output_weight(model, block).data_ptr() == place}
    return [other.key for other in layout.sites if other.block in same]


def _sites(layout: HeadLayout) -> str:
    kinds = Counter((site.key.stack, site.key.kind) for site in layout.sites)
    return ", ".join(f"{stack} {kind} {number}" for (stack, kind), number in kinds.items())


def _seam(found: Discovered) -> str:
    words = dict.fromkeys(site.key.module in found.direct for site in found.layout.sites)
    own = [text for name, text in found.layout.facts if name == "seam"]
    parts = ["interface"] if False in words else []
    parts += ["torch"] if any("scaled_dot_product_attention" in text for text in own) else []
    parts += ["softmax"] if any("softmax of their own" in text for text in own) else []
    return "+".join(parts)


def _judge(model_type: str) -> Verdict:
    try:
        with torch.random.fork_rng():
            model = zoo.build(model_type)
    except TimeoutError:
        raise
    except Exception as failure:  # noqa: BLE001
        return Verdict(model_type, NOT_BUILT, f"{type(failure).__name__}: {_words(failure)}")
    try:
        found = discovered(model)
        inputs = first_that_runs(model)
    except HeadwiseError as refusal:
        no_input = "does not run on" in str(refusal) or "example=" in str(refusal)
        return Verdict(model_type, NO_EXAMPLE if no_input else REFUSED, _words(refusal))
    layout = found.layout
    facts = dict(layout.facts)
    verdict = Verdict(
        model_type,
        EXACT,
        sites=_sites(layout),
        seam=_seam(found),
        masks=facts["masks"].split(":")[0],
        uncovered=len(layout.uncovered),
    )
    worst = 0.0
    for given in (inputs, left_padded(model, inputs)):
        if given is None:
            continue
        problem, off = compare(model, found, given)
        if not problem and off > 1e-4:
            problem = f"off by {off:.2g}"
        if problem:
            kind = AS_SET if "implementations" in facts else WRONG
            return _with(verdict, verdict=kind, reason=problem)
        worst = max(worst, off)
    gates = compare_gates(model, layout, inputs)
    if gates.startswith("DIFFERS"):
        return _with(verdict, verdict=WRONG, reason=f"gate {gates}", off=worst)
    return _with(verdict, gate=gates, off=worst)


def _with(base: Verdict, **changes: Any) -> Verdict:
    return Verdict(**{**vars(base), **changes})


def _words(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    for tail in ("; looked for", "; give the keyword", " You can install it", " Please note"):
        text = text.partition(tail)[0]
    return text if len(text) <= 240 else text[:237] + "..."


@contextmanager
def patiently() -> Iterator[None]:
    """Inside, nothing is said, and a TimeoutError ends what takes longer than :data:`PATIENCE`."""
    logging.set_verbosity_error()

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge(model_type: str) -> Verdict:
    """Build, discover, measure, compare and gate one type."""
    try:
        with patiently():
            return _judge(model_type)
    except Exception as failure:  # noqa: BLE001
        return Verdict(model_type, FAILED, f"{type(failure).__name__}: {_words(failure)}")


def types() -> list[str]:
    """Every model type of the installed transformers that has a model class."""
    from transformers import CONFIG_MAPPING

    return [name for name in sorted(CONFIG_MAPPING) if zoo.safe_class(name) is not None]

"""The checks of the conformance suite: each tries one thing that a measure must not depend on, or must not do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch

from headwise.errors import HeadwiseError, InputError
from headwise.heads import HeadTable
from headwise.layout import HeadId
from headwise.measures.conformance.comparing import differences
from headwise.measures.conformance.specimens import Specimen, padded, permuted, without_columns
from headwise.measures.conformance.state import changes, state_of
from headwise.measures.conformance.subjects import Subject, Watched
from headwise.models import gate, wrap

__all__ = ["CHECKS", "Check"]

#: Gives what is wrong, in words; nothing where all is well.
Check = Callable[[Subject, Specimen], list[str]]


def _whole(subject: Subject, specimen: Specimen) -> HeadTable:
    return subject.table(specimen.model, specimen.examples)


def check_determinism(subject: Subject, specimen: Specimen) -> list[str]:
    """Twice the same data give the same bits, whatever the global seed is and whatever was measured in between."""
    first = subject.table(specimen.model, specimen.examples, seed=1)
    subject.table(specimen.model, specimen.examples[:2], seed=2)
    second = subject.table(specimen.model, specimen.examples, seed=3)
    return differences(first, second, close=0.0)


def check_range(subject: Subject, specimen: Specimen) -> list[str]:
    """Every single value is finite and in the stated range; there is a value, or a reason why not."""
    if isinstance(subject, Watched):
        subject.seen.clear()
    table = _whole(subject, specimen)
    wrong = list(dict.fromkeys(subject.seen)) if isinstance(subject, Watched) else []
    for name, info in table.measures.items():
        means, counts = table.mean(name), table.count(name)
        for head, mean, count in zip(table.heads, means, counts, strict=True):
            if not count and table.reason(name, head.site) is None and not info.pooled:
                wrong.append(f"{name} of {head} has no value, and no reason is given")
            elif count and not (torch.isfinite(torch.tensor(mean)) and _inside(mean, info.low, info.high)):
                wrong.append(f"{name} of {head} is {mean:.6g}, stated is {info.low} to {info.high}")
    return wrong


def _inside(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low - 1e-6) and (high is None or value <= high + 1e-6)


def check_padding(subject: Subject, specimen: Specimen) -> list[str]:
    """More padding changes nothing."""
    batch = specimen.batch()
    expected = subject.table(specimen.model, [batch])
    wrong = differences(expected, subject.table(specimen.model, [padded(batch, 5)]), close=subject.close)
    if specimen.left:
        wrong += differences(
            expected, subject.table(specimen.model, [padded(batch, 5, left=True)]), close=subject.close
        )
    return wrong


def check_batching(subject: Subject, specimen: Specimen) -> list[str]:
    """Passages one by one, in twos and all at once, in either order, give the same."""
    expected = subject.table(specimen.model, specimen.examples, batch_size=len(specimen.examples))
    wrong = []
    for size in (1, 2):
        wrong += differences(
            expected, subject.table(specimen.model, specimen.examples, batch_size=size), close=subject.close
        )
    return wrong + differences(
        expected, subject.table(specimen.model, specimen.examples[::-1], batch_size=2), close=subject.close
    )


def check_splitting(subject: Subject, specimen: Specimen) -> list[str]:
    """The merged tables of two parts are the table of the whole; where they cannot be, merging is refused."""
    whole = _whole(subject, specimen)
    first, second = (subject.table(specimen.model, part) for part in (specimen.examples[:2], specimen.examples[2:]))
    if any(info.pooled for info in whole.measures.values()):
        with suppress(InputError):
            first.merge(second)
            return ["two tables of a pooled measure were merged"]
        return []
    weights_only = all(whole.count(name).max(initial=0) <= 1 for name in whole.measures)
    return differences(whole, first.merge(second), counts=not weights_only, close=subject.close)


def check_heads(subject: Subject, specimen: Specimen) -> list[str]:
    """Heads in another order give the same numbers in that order."""
    expected = _whole(subject, specimen)
    model, order = permuted(specimen.model)
    found = subject.table(model, specimen.examples)
    place = {path: {old: new for new, old in enumerate(heads)} for path, heads in order.items()}
    layout = specimen.model.layout

    def moved(head: HeadId) -> HeadId:
        return HeadId(head.site, place[layout.block_of(head.site).module][head.head])

    return differences(expected, found, other=moved, close=5 * subject.close)


def check_device(subject: Subject, specimen: Specimen) -> list[str]:
    """Every tensor is made where the model's are: on a stand-in for an accelerator, and on one where there is one."""
    wrong = []
    if isinstance(subject, Watched):
        abroad = Watched(subject.measure, foreign=True)
        try:
            wrong = differences(_whole(subject, specimen), _whole(abroad, specimen), close=0.0)
        except (RuntimeError, NotImplementedError) as error:
            wrong = [f"it mixes devices: a tensor is made without device= ({str(error).splitlines()[0]})"]
        wrong += [note for note in dict.fromkeys(abroad.seen) if "meta" in note]
    if torch.cuda.is_available():
        model = wrap(copy.deepcopy(specimen.model.module).to("cuda"), name=specimen.model.name)
        try:
            wrong += differences(
                _whole(subject, specimen), subject.table(model, specimen.examples), close=50 * subject.close
            )
        except RuntimeError as error:
            wrong.append(f"it does not run on cuda: {str(error).splitlines()[0]}")
    return wrong


def check_precision(subject: Subject, specimen: Specimen) -> list[str]:
    """In float64 the numbers are those of float32, to its rounding."""
    model = wrap(copy.deepcopy(specimen.model.module).double(), name=specimen.model.name)
    return differences(_whole(subject, specimen), subject.table(model, specimen.examples), close=10 * subject.close)


def check_passive(subject: Subject, specimen: Specimen) -> list[str]:
    """The model computes what it does without the measure, and is as before afterwards, also after an error."""
    module = copy.deepcopy(specimen.model.module).train()
    next(module.parameters()).requires_grad_(False)
    model = wrap(module, name=specimen.model.name)
    _ = model.layout
    before = state_of(module)
    plain, measured = _outputs(module, lambda: _quiet(subject, specimen, model, None)), []
    measured = _outputs(module, lambda: _quiet(subject, specimen, model, subject))
    wrong = [f"it changes the model's {name}" for name in changes(before, state_of(module))]
    if len(measured) >= len(plain) and any(
        a.shape == b.shape and not torch.allclose(a, b, rtol=1e-3, atol=1e-4)
        for a, b in zip(plain, measured, strict=False)
    ):
        wrong.append("the model gives other numbers while it is measured: something is changed in place")
    return wrong + _after_error(subject, specimen, model, before)


class _Nothing(Subject):
    """Runs the model and measures entropy, which is known to be passive."""

    name = "nothing"

    def table(self, model: Any, inputs: Any, *, batch_size: int = 8, seed: int = 0) -> HeadTable:
        from headwise.measures.pattern import Entropy

        return Watched(Entropy()).table(model, inputs, batch_size=batch_size, seed=seed)


def _quiet(subject: Subject, specimen: Specimen, model: Any, which: Subject | None) -> None:
    (_Nothing() if which is None else subject).table(model, specimen.examples)


def _outputs(module: Any, act: Callable[[], None]) -> list[torch.Tensor]:
    """What the model's last attention block lets through in each forward pass."""
    found: list[torch.Tensor] = []
    body = module.base_model if module.base_model is not module else module

    def keep(_module: Any, _args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else next(iter(output.values()))
        found.append(value.detach().clone())

    handle = body.register_forward_hook(keep)
    try:
        act()
    finally:
        handle.remove()
    return found


class _PlannedError(RuntimeError):
    """The error that a check makes happen."""


def _after_error(subject: Subject, specimen: Specimen, model: Any, before: Mapping[str, Any]) -> list[str]:
    last = model.module.get_submodule(model.layout.sites[-1].block)

    def explode(*_: Any) -> None:
        raise _PlannedError

    handle = last.register_forward_pre_hook(explode)
    try:
        subject.table(model, specimen.examples)
        return ["an error inside the model was swallowed"]
    except (_PlannedError, HeadwiseError):
        pass
    finally:
        handle.remove()
    return [
        f"after an error the model's {name} is not as before" for name in changes(dict(before), state_of(model.module))
    ]


def check_gate(subject: Subject, specimen: Specimen) -> list[str]:
    """With a head gated to 0, all others give what they give when its columns of W_O are zero."""
    layout = specimen.model.layout
    site = layout.sites[0]
    block = layout.blocks[site.block]
    cut = without_columns(specimen.model, block, 1)
    with gate(specimen.model, {site.key: [1]}):
        gated = _whole(subject, specimen)
    expected = subject.table(cut, specimen.examples)
    off = HeadId(site.key, 1)
    wrong = differences(gated, expected, other=lambda head: None if head == off else head, close=subject.close)
    plain = _whole(subject, specimen)
    if any(plain.count(name).max(initial=0) > 1 for name in plain.measures) and gated == plain:
        wrong.append("a gate on a head of the first layer changes no number of any head")
    return wrong


CHECKS: Final[Mapping[str, Check]] = {
    "determinism": check_determinism,
    "range": check_range,
    "padding": check_padding,
    "batching": check_batching,
    "splitting": check_splitting,
    "heads": check_heads,
    "device": check_device,
    "precision": check_precision,
    "passive": check_passive,
    "gate": check_gate,
}

"""The seam: one attention function that stands in for every model's own.

It finds the sessions that look at the calling module, asks their observers what they want of the
call, lets the kernels or the model's own function compute it, multiplies the heads by the gates,
and hands the result back. A module that no session looks at gets its own function, unchanged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headwise import kernels
from headwise.errors import ModelError
from headwise.kernels import Answer, Choice, Problem, Wanted
from headwise.layout import Block, Site
from headwise.models.cut_modules import past_adapter
from headwise.models.masks import CompactMask
from headwise.models.problems import Call, problem_of
from headwise.models.standin import own_function
from headwise.models.torch_seam.seam import outside

__all__ = [
    "AttentionCall",
    "Observer",
    "Party",
    "Seen",
    "alone",
    "answer",
    "attend_as",
    "check_heads",
    "delegate",
    "enrol",
    "expel",
]


@dataclass(frozen=True)
class AttentionCall:
    """One answered attention call.

    Attributes:
        site, block: where it happened and whose weights it used.
        forward: ordinal of the forward pass inside the session, counted from 0.
        module: the model; the paths in ``site`` and ``block`` start there.
        problem: what was computed.
        answer: what the kernels gave; ``answer.z`` is before gates.
        z: (B, H, Q, D_v) after gates, as the model goes on with it.
        choice: which backend computed the answer, and why not the others.
        part: ordinal of this piece where the model cuts one attention into pieces (packed images), else 0.
        recomputed: gradient checkpointing computed this call again during a backward pass.
    """

    site: Site
    block: Block
    forward: int
    module: nn.Module
    problem: Problem
    answer: Answer
    z: Tensor
    choice: Choice
    part: int = 0
    recomputed: bool = False


class Observer(Protocol):
    """Looks on at the attention calls of a model.

    A layer under gradient checkpointing is computed a second time during the backward pass. ``want`` is
    asked again then, and must answer the same; ``see`` is called again only for an observer whose
    attribute ``sees_recomputed`` is true.
    """

    def want(self, site: Site, problem: Problem) -> Wanted | None:
        """What is needed of this call; None when nothing is."""

    def see(self, call: AttentionCall) -> None:
        """Take one answered call that was wanted."""


@dataclass(frozen=True)
class Seen:
    """Where a session finds a call: its site, its block, and the ordinals."""

    site: Site
    block: Block
    forward: int
    part: int
    recomputed: bool


class Party(Protocol):
    """What the seam needs of a session.

    Attributes:
        watching: False once it is done: an interrupt may leave it among the parties of some modules.
    """

    watching: bool
    root: nn.Module
    observer: Observer | None
    backend: str | None
    own_output: bool

    def locate(self, module: nn.Module, spot: Hashable, query: Tensor, key: Tensor) -> Seen | None:
        """The site of the call, or None when the session has nothing to do with it."""

    def gated(self, seen: Seen, output: Tensor, means: Callable[[], Tensor]) -> Tensor:
        """``output`` (B, Q, H, D_v) times the session's gates; ``means`` gives what may take the place of heads."""

    def pause(self, paused: bool) -> None:
        """Look away, or on again."""


@runtime_checkable
class Taker(Protocol):
    """A party that takes every call for itself: the probe."""

    watching: bool

    def take(self, call: Call, spot: Hashable) -> tuple[Tensor, Any]:
        """Answer the call."""


_LOCK = threading.RLock()
_PARTIES: WeakKeyDictionary[nn.Module, tuple[Party | Taker, ...]] = WeakKeyDictionary()


def enrol(party: Party | Taker, modules: Iterable[nn.Module]) -> None:
    """From now on ``party`` takes part in the attention calls of ``modules``."""
    with _LOCK:
        for module in modules:
            _PARTIES[module] = (*_PARTIES.get(module, ()), party)


def expel(party: Party | Taker, modules: Iterable[nn.Module]) -> None:
    """``party`` no longer takes part."""
    with _LOCK:
        for module in modules:
            left = tuple(one for one in _PARTIES.get(module, ()) if one is not party)
            if left:
                _PARTIES[module] = left
            else:
                _PARTIES.pop(module, None)


@contextmanager
def alone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, no session that is already running takes part in calls of ``modules`` or counts their passes."""
    with _LOCK:
        held = {module: _PARTIES.pop(module) for module in modules if module in _PARTIES}
        parties = {id(party): party for group in held.values() for party in group if not isinstance(party, Taker)}
    for party in parties.values():
        party.pause(True)
    try:
        yield
    finally:
        for party in parties.values():
            party.pause(False)
        with _LOCK:
            for module, group in held.items():
                _PARTIES[module] = group


_STANDING_IN: dict[str, Callable[..., Any]] = {}


def attend_as(original: str) -> Callable[..., Any]:
    """The attention function that stands in for the implementation ``original``."""
    if original not in _STANDING_IN:

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any = None,
            *rest: Any,
            **extra: Any,
        ) -> tuple[Tensor, Any]:
            if rest:
                extra |= dict(zip(("dropout", "scaling"), rest, strict=False))
            frame = past_adapter(sys._getframe(1))
            own = own_function(module, original, frame)
            spot = (frame.f_code, frame.f_lasti)
            with outside():
                return answer(Call(module, "", query, key, value, attention_mask, original, own, extra), spot)

        _STANDING_IN[original] = attend
    return _STANDING_IN[original]


def delegate(call: Call) -> tuple[Tensor, Any]:
    """The model's own attention function on the same arguments; (B, Q, H, D_v) and what it says of weights."""
    mask = call.mask.own(call.original) if isinstance(call.mask, CompactMask) else call.mask
    result: tuple[Tensor, Any] = call.own(call.module, call.query, call.key, call.value, mask, **call.extra)
    return result


def answer(call: Call, spot: Hashable) -> tuple[Tensor, Any]:
    """Let everyone take part who looks at the calling module; gives (B, Q, H, D_v), and weights if there are any."""
    taking_part = []
    for party in _PARTIES.get(call.module, ()):
        if not party.watching:
            continue
        if isinstance(party, Taker):
            return party.take(call, spot)
        seen = party.locate(call.module, spot, call.query, call.key)
        if seen is not None:
            taking_part.append((party, seen))
    looking = [(party, seen) for party, seen in taking_part if party.observer is not None]
    if not looking:
        output, weights = delegate(call)
        return _gated(call, taking_part, output), weights
    return _observed(replace(call, path=looking[0][1].site.key.module), taking_part, looking)


def _gated(call: Call, taking_part: list[tuple[Party, Seen]], output: Tensor) -> Tensor:
    for party, seen in taking_part:
        output = party.gated(seen, output, partial(_means, call, seen.site.key.module, output))
    return output


def _means(call: Call, path: str, output: Tensor) -> Tensor:
    """(B, Q, H, D_v) the mean of the values that each query may see; ``output`` where it sees none.

    Raises:
        UnsupportedError: who sees whom is not understood.
    """
    problem = problem_of(replace(call, path=path))
    means_BQHD = kernels.mean_of_visible(problem).transpose(1, 2).to(output)
    sees_BQH1 = (kernels.visible_counts(problem) > 0).transpose(1, 2)[..., None]
    return torch.where(sees_BQH1, means_BQHD, output)


def _observed(
    call: Call, taking_part: list[tuple[Party, Seen]], looking: list[tuple[Party, Seen]]
) -> tuple[Tensor, Any]:
    problem = problem_of(call)
    answers: list[tuple[Party, Seen, Answer, Choice]] = []
    for party, seen in looking:
        wanted = party.observer.want(seen.site, problem) if party.observer is not None else None
        if wanted is not None:
            answers.append((party, seen, *compute(problem, wanted, party.backend)))
    if not answers or _by_itself(call, looking):
        output, weights = delegate(call)
        own_z = output.transpose(1, 2)
        answers = [(party, seen, replace(given, z=own_z), choice) for party, seen, given, choice in answers]
    else:
        output, weights = answers[0][2].z.transpose(1, 2).contiguous(), None
    output = _gated(call, taking_part, output)
    for party, seen, given, choice in answers:
        if party.observer is not None and (not seen.recomputed or getattr(party.observer, "sees_recomputed", False)):
            party.observer.see(
                AttentionCall(
                    site=seen.site,
                    block=seen.block,
                    forward=seen.forward,
                    module=party.root,
                    problem=problem,
                    answer=given,
                    z=output.transpose(1, 2),
                    choice=choice,
                    part=seen.part,
                    recomputed=seen.recomputed,
                )
            )
    return output, weights


def _by_itself(call: Call, looking: list[tuple[Party, Seen]]) -> bool:
    """Whether z must come from the model's own function: dropout acts, or the model needs what it returns."""
    dropout = float(call.extra.get("dropout") or 0.0)
    acts = dropout > 0.0 and (call.original != "eager" or call.module.training)
    return (
        acts
        or call.settled
        or any(party.own_output for party, _ in looking)
        or bool(call.extra.get("output_attentions"))
        or bool(getattr(getattr(call.module, "config", None), "output_attentions", False))
    )


def compute(problem: Problem, wanted: Wanted, backend: str | None) -> tuple[Answer, Choice]:
    """Let the kernels answer, and say who did."""
    given = kernels.run(problem, wanted, backend=backend)
    assert given.choice is not None
    return given, given.choice


def check_heads(site: Site, block: Block, query: Tensor, key: Tensor) -> None:
    """Refuse a call whose head counts are not those of the layout."""
    kv_heads = block.kv_heads if block.even else block.query_heads  # unevenly grouped: each head has its own copy here
    if query.shape[1] != block.query_heads or key.shape[1] != kv_heads:
        raise ModelError(
            f"{site.key}: the layout says {block.query_heads} query and {block.kv_heads} key-value heads, the call has "
            f"{query.shape[1]} and {key.shape[1]}; the model has changed since it was discovered: discover it again"
        )

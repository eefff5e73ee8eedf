"""Which backend runs a problem, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from headwise.errors import InputError, UnsupportedError
from headwise.kernels import cpu, eager, reference, sdpa, tiled
from headwise.kernels.check import check_problem
from headwise.kernels.extras import with_extras, without_distance_bias
from headwise.kernels.problem import Answer, Choice, Problem, Rows, Wanted

__all__ = ["backends", "choose", "run"]

_ABOUT = {
    "cpu": cpu.about(),
    "sdpa": "torch's scaled_dot_product_attention: plain scores, z alone",
    "tiled": "plain torch, block by block: every score rule, every row statistic, any device, memory linear in length",
    "eager": "plain torch, dense: builds the (batch, heads, queries, keys) pattern",
    "reference": "float64 from the formulas, dense: the truth of the tests",
}


#: The usual choice, made once: a short call should not spend its time on words.
_CPU_FIRST = tuple((name, "cpu comes first") for name in _ABOUT if name != "cpu")
_CPU = Choice("cpu", _CPU_FIRST)


def backends() -> dict[str, str]:
    """Every backend, fastest first, with what it is.

    Example:
        >>> from headwise.kernels import backends
        >>> list(backends())
        ['cpu', 'sdpa', 'tiled', 'eager', 'reference']
    """
    return dict(_ABOUT)


def _refusal(name: str, problem: Problem, wanted: Wanted) -> str | None:
    if name == "cpu":
        return cpu.refusal(problem, wanted)
    if name == "sdpa":
        return sdpa.refusal(problem, wanted)
    if name == "tiled":
        return tiled.refusal(problem)
    return None


def choose(problem: Problem, wanted: Wanted | None = None, backend: str | None = None) -> Choice:
    """The backend that :func:`run` would take, with a reason for each that it would not.

    Raises:
        InputError: ``backend`` is not the name of a backend.
        UnsupportedError: the backend that was asked for cannot compute this problem.

    Example:
        >>> import torch
        >>> from headwise.kernels import Problem, Wanted, choose
        >>> x = torch.zeros(1, 1, 3, 2)
        >>> choose(Problem(x, x, x), Wanted(rows=True), backend="tiled").backend
        'tiled'
        >>> dict(choose(Problem(x.double(), x.double(), x.double()), Wanted(rows=True)).reasons)["sdpa"]
        'it returns no row statistics, and no identity gives the largest weight of a row'
    """
    wanted = wanted or Wanted()
    if backend is not None and backend not in _ABOUT:
        raise InputError(f"backend must be one of {', '.join(_ABOUT)}, or None to choose; got {backend!r}.")
    if backend is None and cpu.refusal(problem, wanted) is None and cpu.stands_back(problem, wanted) is None:
        notes = cpu.notes(problem)
        return Choice("cpu", _CPU_FIRST, notes) if notes else _CPU
    why: dict[str, str | None] = {}
    for name in _ABOUT:
        why[name] = _refusal(name, problem, wanted)
        if name == "cpu" and backend is None and why[name] is None:
            why[name] = cpu.stands_back(problem, wanted)
        if backend is None and why[name] is None:
            break
    first = next(name for name, reason in why.items() if reason is None)
    if backend is None:
        taken, others = first, f"{first} comes first"
    elif why[backend] is not None:
        raise UnsupportedError(
            f"backend={backend!r} cannot compute this: {why[backend]}. Leave backend out (it would be"
            f" {first!r}), or pass another."
        )
    else:
        taken, others = backend, f"{backend} was asked for"
    reasons = tuple((name, why.get(name) or others) for name in _ABOUT if name != taken)
    return Choice(taken, reasons, cpu.notes(problem) if taken == "cpu" else ())


def run(problem: Problem, wanted: Wanted | None = None, *, backend: str | None = None) -> Answer:
    """Compute a problem: z, and what is wanted beside it.

    Args:
        problem: queries, keys, values, who sees whom, and how scores are made.
        wanted: what is asked for beside z.
        backend: a name of :func:`backends`; None takes the fastest that can do it.

    Returns:
        The answer; ``answer.choice`` says which backend ran and why not the others. z does not
        depend on what else is wanted of the same backend.

    Raises:
        InputError: a value or a shape does not fit; the message names it.
        UnsupportedError: the backend that was asked for cannot compute this problem.

    Example:
        >>> import torch
        >>> from headwise.kernels import Problem, Visible, Wanted, run
        >>> q, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]])
        >>> answer = run(Problem(q, q, v, Visible(causal=True)), Wanted(rows=True))
        >>> answer.z.flatten().tolist(), answer.rows.max_weight.flatten().tolist()
        ([1.0, 2.0], [1.0, 0.5])
    """
    wanted = wanted or Wanted()
    if backend is None:
        answer = _at_once(problem, wanted)
        if answer is not None:
            return answer
    check_problem(problem, wanted)
    problem = _plain_groups(problem)
    choice = choose(problem, wanted, backend)
    answer = _ATTEND[choice.backend](problem, wanted)
    return Answer(answer.z, answer.rows, answer.weights, choice)


def _at_once(problem: Problem, wanted: Wanted) -> Answer | None:
    """The answer to a plain problem on the CPU; None where there is anything to check, choose or say."""
    visible, rule = problem.visible, problem.rule
    if (
        problem.kv_map is not None
        or visible.key_padding is not None
        or visible.mask is not None
        or visible.predicate is not None
        or rule.bias is not None
        or rule.additive_mask is not None
        or rule.distance_bias is not None
        or rule.sinks is not None
        or wanted.weights
        or wanted.distance
        or wanted.pairs is not None
        or wanted.classes is not None
        or wanted.pair_lists is not None
    ):
        return None
    found = cpu.quick(
        problem.q,
        problem.k,
        problem.v,
        visible.causal,
        visible.window,
        visible.offset,
        rule.scale,
        rule.softcap,
        wanted.rows,
    )
    return None if found is None else Answer(found[0], found[1], None, _CPU)


def _plain_groups(problem: Problem) -> Problem:
    """Drop a kv_map that says what its absence says."""
    if problem.kv_map is None:
        return problem
    heads, groups = problem.q.shape[1], problem.k.shape[1]
    usual = heads % groups == 0 and problem.kv_map == tuple(h // (heads // groups) for h in range(heads))
    return replace(problem, kv_map=None) if usual else problem


def _reference(problem: Problem, wanted: Wanted) -> Answer:
    answer = reference.attend(problem, wanted)
    weights = None if answer.weights is None else answer.weights.to(problem.q.dtype)
    return Answer(answer.z.to(problem.q.dtype), _cast(answer.rows, problem.compute_dtype), weights)


def _cast(rows: Rows | None, dtype: torch.dtype) -> Rows | None:
    if rows is None:
        return None
    floats = {name: value for name, value in vars(rows).items() if value is not None and value.is_floating_point()}
    return replace(rows, **{name: value.to(dtype) for name, value in floats.items()})


def _and_weights(attend: Callable[[Problem, Wanted], Answer]) -> Callable[[Problem, Wanted], Answer]:
    """A backend that builds no pattern, with the pattern beside it where it is wanted."""

    def both(problem: Problem, wanted: Wanted) -> Answer:
        if not wanted.weights:
            return attend(problem, wanted)
        answer = attend(problem, replace(wanted, weights=False))
        return replace(answer, weights=eager.pattern(without_distance_bias(problem)))

    return both


def _by_hand(attend: Callable[[Problem, Wanted], Answer]) -> Callable[[Problem, Wanted], Answer]:
    """A backend that knows neither biases by distance nor classes and lists, with all three."""
    extended = with_extras(attend)
    return lambda problem, wanted: extended(without_distance_bias(problem), wanted)


_ATTEND: dict[str, Callable[[Problem, Wanted], Answer]] = {
    "cpu": _and_weights(cpu.attend),
    "sdpa": _and_weights(sdpa.attend),
    "tiled": _and_weights(_by_hand(tiled.attend)),
    "eager": _by_hand(eager.attend),
    "reference": _by_hand(_reference),
}

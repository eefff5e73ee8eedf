"""The conformance suite: is a measure what a measure must be?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headwise.errors import HeadwiseError, InputError, MeasureError
from headwise.measures.conformance.checks import CHECKS
from headwise.measures.conformance.comparing import CLOSE
from headwise.measures.conformance.specimens import MODELS, Specimen, specimens
from headwise.measures.conformance.subjects import Subject, Tables, subject_of
from headwise.measures.measure import Measure

__all__ = ["Conformance", "check_measure"]

#: Errors of a measure's own code that count as a failed check.
_FAILURES = (HeadwiseError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError, KeyError)


@dataclass(frozen=True)
class Conformance:
    """What the suite found.

    Attributes:
        measure: which measure.
        passed: names of the checks that passed.
        failures: for each check that failed, on which model and what.
    """

    measure: str
    passed: tuple[str, ...]
    failures: tuple[tuple[str, str], ...]

    @property
    def failed(self) -> frozenset[str]:
        """The names of the checks that failed."""
        return frozenset(name for name, _ in self.failures)

    def __str__(self) -> str:
        lines = [f"{self.measure}: {len(self.passed)} of {len(self.passed) + len(self.failed)} checks passed"]
        return "\n".join([*lines, *(f"  {name}: {text}" for name, text in self.failures)])


def check_measure(
    measure: Measure | Tables,
    *,
    only: Iterable[str] | None = None,
    on: Iterable[str] | None = None,
    close: float = CLOSE,
    refuse: bool = True,
) -> Conformance:
    """Try a measure on tiny models: does anything change its numbers that must not?

    The checks: ``determinism`` (the same bits twice, whatever the global seed and whatever was measured in between),
    ``range`` (every value finite and as stated), ``padding``, ``batching``, ``splitting`` (merged tables of parts are
    the table of the whole), ``heads`` (permuted heads give permuted numbers), ``device``, ``precision`` (float64
    agrees), ``passive`` (the model computes what it did and is as before, also after an error), ``gate`` (a head that
    is off is off for the measure, too). The models: a causal one with grouped heads, a bidirectional one, an
    encoder-decoder.

    Args:
        measure: a measure, or a function ``(model, inputs, batch_size=...) -> HeadTable``.
        only: names of checks to run; all by default.
        on: kinds of models to run them on: ``"causal"``, ``"bidirectional"``, ``"encoder-decoder"``; all by default.
        close: how far numbers that should be the same may lie apart, relative to the measure's largest value over
            heads; permuted heads and float64 are given 5 and 10 times as much.
        refuse: raise when a check fails; False returns what was found.

    Raises:
        MeasureError: a check failed; every failure is listed.
        InputError: something that is neither, or an unknown check.

    Example:
        >>> from headwise.measures import MEASURES
        >>> check_measure(MEASURES["entropy"], only=["range", "heads"]).passed
        ('range', 'heads')
    """
    if not isinstance(measure, Measure) and not callable(measure):
        raise InputError(f"check_measure takes a measure or a function, and got a {type(measure).__name__}")
    if isinstance(measure, type):
        raise InputError(f"check_measure got the class {measure.__name__}; give an instance, {measure.__name__}()")
    names = _known("check", CHECKS, only)
    kinds = _known("kind of model", MODELS, on)
    failures = _description(measure)
    for specimen in specimens(kinds):
        for name in names:
            failures += [
                (name, f"on {specimen.name}: {text}") for text in _tried(name, subject_of(measure, close), specimen)
            ]
    failed = {name for name, _ in failures}
    named = measure.name if isinstance(measure, Measure) else getattr(measure, "__name__", type(measure).__name__)
    found = Conformance(named, tuple(name for name in names if name not in failed), tuple(failures))
    if refuse and failures:
        raise MeasureError(str(found))
    return found


def _known(what: str, known: Iterable[str], asked: Iterable[str] | None) -> list[str]:
    names = list(known)
    chosen = names if asked is None else list(asked)
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise InputError(f"there is no {what} {unknown[0]!r}; there are {', '.join(names)}")
    return chosen


def _description(measure: Any) -> list[tuple[str, str]]:
    if not isinstance(measure, Measure):
        return []
    wrong = []
    if _unhashable(measure):
        wrong.append("it holds something that can change (a list, a dictionary), so it could keep state")
    if not measure.description:
        wrong.append("it has no description")
    try:
        measure.info  # noqa: B018
    except InputError as error:
        wrong.append(str(error))
    return [("description", text) for text in wrong]


def _unhashable(measure: Measure) -> bool:
    try:
        hash(measure)
    except TypeError:
        return True
    return False


def _tried(name: str, subject: Subject, specimen: Specimen) -> list[str]:
    """What one check finds on one model, at most three findings; an error counts as one."""
    try:
        found = CHECKS[name](subject, specimen)
    except _FAILURES as error:
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]
    more = [f"and {len(found) - 3} more"] if len(found) > 3 else []
    return [*found[:3], *more]

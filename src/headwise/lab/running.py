"""Runs experiments and judges what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module

from headwise.errors import InputError
from headwise.lab.catalogue import CATALOGUE, find
from headwise.lab.experiment import Experiment
from headwise.lab.outcome import Outcome

__all__ = ["definition", "judge", "run", "run_all"]

SIZES = ("full", "small")
Progress = Callable[[int, int, str], None]


def definition(name: str) -> Experiment:
    """The experiment called ``name``.

    Raises:
        InputError: there is none.
    """
    found = import_module(find(name).module).EXPERIMENT
    assert isinstance(found, Experiment)
    return found


def run(name: str, *, seed: int = 0, size: str = "full") -> Outcome:
    """Run one experiment.

    Args:
        name: as in :data:`~headwise.lab.CATALOGUE`.
        seed: where its random numbers start, >= 0; the same seed gives the same numbers (times of
            ``cache`` and ``tiling`` apart).
        size: ``"full"`` for a result; ``"small"`` for a look that takes a second or two and counts for nothing.

    Raises:
        InputError: an unknown name (with the nearest), seed or size.

    Example:
        >>> run("worked-split", size="small").verdict.value
        'holds'
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InputError(f"seed must be a whole number from 0 to {2**31 - 1}, got {seed!r}")
    if size not in SIZES:
        raise InputError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    return judge(definition(name), seed=seed, size=size)


def judge(chosen: Experiment, *, seed: int, size: str) -> Outcome:
    """Measure and apply the rule; torch's own random state is as before afterwards."""
    import torch

    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = chosen.measure(seed, size)
    seconds = time.perf_counter() - start
    verdict, stated, conditioned = chosen.rule.judge(found.quantities)
    return Outcome(
        name=chosen.name,
        seed=seed,
        size=size,
        verdict=verdict,
        quantities=found.quantities,
        stated=stated,
        conditioned=conditioned,
        headline=found.headline,
        finding=found.finding,
        series=found.series,
        seconds=seconds,
    )


def run_all(
    names: Sequence[str] = (), *, seed: int = 0, size: str = "full", progress: Progress | None = None
) -> list[Outcome]:
    """Run several experiments (default: all) in the order of the catalogue.

    Every name is checked before the first one runs. ``progress(done, total, name)`` is told before each
    and after the last.
    """
    wanted = {find(name).name for name in names} or {entry.name for entry in CATALOGUE}
    chosen = [entry.name for entry in CATALOGUE if entry.name in wanted]
    outcomes = []
    for done, name in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), name)
        outcomes.append(run(name, seed=seed, size=size))
    if progress is not None:
        progress(len(chosen), len(chosen), chosen[-1])
    return outcomes

"""Progress of a run, and what the run will need, said before it is long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from headwise.data import Facts
from headwise.models import Model
from headwise.trace import Progress
from headwise.verbs.estimate import available_memory, memory_estimate, readable_bytes, readable_seconds

__all__ = ["Bar", "Forecast"]

#: seconds; a run that is going to take longer says so
_LONG: Final = 10.0
#: seconds of measuring that tell the pace
_WATCHED: Final = 2.0


class Bar(Protocol):
    """How progress is shown: ``bar(done, total, stage)``."""

    def __call__(self, done: int, total: int | None = None, stage: str = "", /) -> None:
        """Show ``done`` of ``total`` steps of ``stage``."""


class Forecast:
    """Shows the batches done; warns of memory at once, and of time once a few seconds tell the pace.

    Attributes:
        warnings: what was warned of, for ``run.json``.
    """

    def __init__(
        self, model: Model, survey: Facts, batch_size: int, bar: Bar | None, notice: Callable[[str], None] | None
    ) -> None:
        self._survey, self._bar, self._notice = survey, bar, notice
        self.warnings: list[str] = []
        need, have = memory_estimate(model, survey, batch_size), available_memory()
        if model.device.type == "cpu" and have is not None and need > have:
            self._warn(
                f"the longest batch is estimated to need {readable_bytes(need)} beside the weights, and "
                f"{readable_bytes(have)} of memory are free: use a smaller batch_size or max_length"
            )
        self._need = need
        self._first: tuple[float, int] | None = None
        self._told = False

    def __call__(self, done: Progress) -> None:
        """Take one finished batch. The first one warms up; those of the next seconds tell the pace."""
        if self._bar is not None:
            self._bar(done.batches, self._survey.batches, "measuring")
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done.tokens)
        elif not self._told and now - self._first[0] > _WATCHED and done.tokens > self._first[1]:
            self._told = True
            pace = (now - self._first[0]) / (done.tokens - self._first[1])
            self._tell(pace * (self._survey.tokens - done.tokens))

    def _tell(self, left: float) -> None:
        if left > _LONG and self._notice is not None:
            self._notice(
                f"about {readable_seconds(left)} to go for this pass over {self._survey.tokens:,} tokens in "
                f"{self._survey.batches:,} batches, with an estimated {readable_bytes(self._need)} beside the weights"
            )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        if self._notice is not None:
            self._notice(text)

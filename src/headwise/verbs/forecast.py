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


class Bar(Protocol):
    """How progress is shown: ``bar(done, total, stage)``."""

    def __call__(self, done: int, total: int | None = None, stage: str = "", /) -> None:
        """Show ``done`` of ``total`` steps of ``stage``."""


class Forecast:
    """Shows the batches done; warns of memory at once, and of time after the second batch.

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

    def __call__(self, done: Progress) -> None:
        """Take one finished batch. The first one warms up; the second tells the pace."""
        if self._bar is not None:
            self._bar(done.batches, self._survey.batches, "measuring")
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done.tokens)
        elif done.batches == 2 and self._notice is not None and done.tokens > self._first[1]:
            pace = (now - self._first[0]) / (done.tokens - self._first[1])
            left = pace * (self._survey.tokens - done.tokens)
            if left > _LONG:
                self._notice(
                    f"about {readable_seconds(left)} to go for {self._survey.tokens:,} tokens in "
                    f"{self._survey.batches:,} batches, with an estimated {readable_bytes(self._need)} beside the weights"
                )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        if self._notice is not None:
            self._notice(text)

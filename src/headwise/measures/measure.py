"""What a measure is: a small callable without state, with its name, unit, range, direction and source.

Three kinds, by what one number is made of:

* a :class:`RowMeasure` gives one number per query row and head, folded into count, mean and spread;
* a :class:`PooledMeasure` gives one number per head from sums over all rows (a rank, an explained variance);
* a :class:`WeightMeasure` gives one number per head from the weights alone.

A measure of your own is a subclass with a ``__call__``; give an instance to ``hw.scan(..., measures=[...])`` and try it
with :func:`headwise.measures.check_measure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from torch import Tensor

from headwise.data import Batch
from headwise.heads import MeasureInfo
from headwise.kernels import Problem, Rows, Wanted
from headwise.layout import Site
from headwise.measures.weights import HeadWeights
from headwise.models import AttentionCall

__all__ = ["HeadValues", "Look", "Measure", "PooledMeasure", "RowMeasure", "RowValues", "Sums", "WeightMeasure"]

#: One number per row (B, H, Q); with the rows that have one (bool, broadcastable to it); or why the site has none.
RowValues: TypeAlias = Tensor | tuple[Tensor, Tensor] | str
#: One number per head (H,), or why there is none.
HeadValues: TypeAlias = Tensor | str


@dataclass(frozen=True)
class Look:
    """One attention call as a measure sees it.

    Attributes:
        call: the answered call; ``call.problem`` has q, k and v, ``call.z`` the heads' outputs (B, H, Q, D_v).
        kinds: int8 (B, Q): 0 padding, 1 token, 2 special token.
        batch: the batch in flight, or None when the user runs the model.
        weights: the weights of the call's block, by head.
        targets: int64 (P, B or 1, Q), the keys that this measure asked for in ``wants``; None where it asked for none.
        pairs: (P, B, H, Q), the weights on them.
    """

    call: AttentionCall
    kinds: Tensor
    batch: Batch | None
    weights: HeadWeights
    targets: Tensor | None = None
    pairs: Tensor | None = None

    @property
    def site(self) -> Site:
        """Where the call was made."""
        return self.call.site

    @property
    def problem(self) -> Problem:
        """What was computed."""
        return self.call.problem

    @property
    def rows(self) -> Rows:
        """The row statistics that ``wants`` asked for."""
        found = self.call.answer.rows
        if found is None:
            raise AssertionError("no row statistics: the measure's wants() must ask for them with Wanted(rows=True)")
        return found


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The description of a measure: the fields of :class:`~headwise.heads.MeasureInfo`."""

    name: str
    unit: str
    low: float | None = None
    high: float | None = None
    better: Literal["high", "low"] | None = None
    description: str = ""
    source: str = ""

    @property
    def info(self) -> MeasureInfo:
        """How tables and reports describe the measure."""
        return MeasureInfo(self.name, self.unit, self.low, self.high, self.better, self.description, self.source)

    def applies(self, site: Site) -> str | None:  # noqa: ARG002
        """Why the measure means nothing at a site; None where it does."""
        return None


@dataclass(frozen=True, kw_only=True)
class RowMeasure(Measure):
    """One number per query row and head.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Perplexity(RowMeasure):
        ...     name: str = "pattern_perplexity"
        ...     unit: str = "keys"
        ...     low: float | None = 1.0
        ...     description: str = "exp(entropy): how many keys a uniform row of the same entropy would see."
        ...
        ...     def __call__(self, look):
        ...         return look.rows.entropy.exp()
        >>> Perplexity().info.unit
        'keys'
    """

    def wants(self, site: Site, problem: Problem) -> Wanted:  # noqa: ARG002
        """What the kernels must give beside z; row statistics by default."""
        return Wanted(rows=True)

    def __call__(self, look: Look) -> RowValues:
        """The value of every row (B, H, Q), perhaps with the rows that have one; or why there is none here."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


State = TypeVar("State")


class Sums(Generic[State]):
    """What a :class:`PooledMeasure` adds up. Stateless itself: the state is made, folded and joined outside.

    Measures that share one object of sums (equal by ``==``) share the work.
    """

    def of(self, look: Look) -> State | str:
        """The sums of one call over its real rows (padding left out), or why the site has none."""
        raise NotImplementedError

    def join(self, left: State, right: State) -> State:
        """The sums of both sets of rows; the order must not matter."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PooledMeasure(Measure):
    """One number per head from sums over all rows of the data; two of them cannot be merged, their sums can.

    Attributes:
        sums: what is added up.
    """

    sums: Sums[Any]

    @property
    def info(self) -> MeasureInfo:
        """How tables and reports describe the measure."""
        return MeasureInfo(
            self.name, self.unit, self.low, self.high, self.better, self.description, self.source, pooled=True
        )

    def prepare(self, states: Sequence[Any]) -> None:
        """Do what is quicker for all sites together, before the numbers are asked for; by default nothing."""

    def __call__(self, state: Any) -> HeadValues:
        """The number of every head (H,) from the sums; NaN for a head that has none."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


@dataclass(frozen=True, kw_only=True)
class WeightMeasure(Measure):
    """One number per head from the weights of its block; data changes nothing."""

    def prepare(self, weights: Sequence[HeadWeights]) -> None:
        """Do what is quicker for all blocks together, before the numbers are asked for; by default nothing."""

    def __call__(self, weights: HeadWeights) -> HeadValues:
        """The number of every query head (H,), or why there is none."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

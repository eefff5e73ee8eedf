"""A plan: which heads go, in which order, and where that came from. Pure data, saved as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from headwise import artifacts
from headwise.errors import HeadwiseError, InputError, RunError

__all__ = ["REPLACEMENTS", "HeadCut", "HeadPlan"]

#: What stands in a removed head's place: nothing, its mean, or the mean of its values so far (causal).
REPLACEMENTS: Final = ("nothing", "constant", "running_mean")
_UNITS: Final = ("head", "group")


@dataclass(frozen=True)
class HeadCut:
    """One head that goes.

    Attributes:
        block: path of its attention module.
        head: its number among the block's query heads, from 0.
        replacement: what takes its place, one of :data:`REPLACEMENTS`.
    """

    block: str
    head: int
    replacement: str = "nothing"


@dataclass(frozen=True)
class HeadPlan:
    """Which heads of a model go, in the order of their removal.

    Attributes:
        cuts: the heads. The first n of them are the plan for n heads; see :meth:`first`.
        model: name of the model that it was made for.
        weight_hash: of its weights; None where any model with these blocks will do.
        criterion: how the heads were chosen.
        budget: what decided how many.
        unit: ``"head"``, or ``"group"``: a key-value head with all its query heads.
        facts: what choosing cost, the text used, the predicted curve.
        blocks: for each block of the model its numbers of query heads and key-value heads.
        statistics: moments of the head outputs that the plan was made from, for the repair; not saved.

    Raises:
        InputError: a head twice, or one that its block does not have.

    Example:
        >>> plan = HeadPlan((HeadCut("attn", 2), HeadCut("attn", 0)), "tiny", blocks={"attn": (4, 4)})
        >>> plan.removed, len(plan), plan.first(1).removed
        ({'attn': (0, 2)}, 2, {'attn': (2,)})
    """

    cuts: tuple[HeadCut, ...] = field(repr=False)
    model: str | None = None
    weight_hash: str | None = None
    criterion: str = "given"
    budget: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "head"
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    statistics: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.unit not in _UNITS:
            raise InputError(f"unit must be one of {', '.join(_UNITS)}, and is {self.unit!r}")
        for cut in self.cuts:
            if cut.block not in self.blocks:
                raise InputError(
                    f"the plan removes head {cut.head} of {cut.block!r}, and its blocks are "
                    f"{', '.join(list(self.blocks)[:6]) or 'none'}; a plan lists every block of its model"
                )
            count = self.blocks[cut.block][0]
            if not 0 <= cut.head < count:
                raise InputError(f"{cut.block}: there is no head {cut.head}; it has the heads 0 to {count - 1}")
            if cut.replacement not in REPLACEMENTS:
                raise InputError(
                    f"{cut.block}: head {cut.head} is replaced by {cut.replacement!r}; known are "
                    f"{', '.join(REPLACEMENTS)}"
                )
        twice = [where for where, count in Counter((cut.block, cut.head) for cut in self.cuts).items() if count > 1]
        if twice:
            raise InputError(f"{twice[0][0]}: head {twice[0][1]} is removed twice; name it once")

    def __len__(self) -> int:
        return len(self.cuts)

    def __str__(self) -> str:
        return f"{len(self)} of {self.heads} heads of {self.model or 'a model'} go, chosen by {self.criterion}"

    @property
    def removed(self) -> dict[str, tuple[int, ...]]:
        """For each block that loses heads, which, sorted; in the order of the model."""
        found: dict[str, list[int]] = {}
        for cut in self.cuts:
            found.setdefault(cut.block, []).append(cut.head)
        return {block: tuple(sorted(found[block])) for block in self.blocks if block in found}

    @property
    def heads(self) -> int:
        """How many query heads the model has."""
        return sum(query for query, _ in self.blocks.values())

    def first(self, count: int) -> HeadPlan:
        """The plan for the first ``count`` heads of this one.

        Raises:
            InputError: more heads than the plan has.
        """
        if not 0 <= count <= len(self.cuts):
            raise InputError(f"count must lie in 0 to {len(self.cuts)}, the heads of the plan, and is {count}")
        return replace(self, cuts=self.cuts[:count], budget={**self.budget, "first": count})

    def to_document(self) -> dict[str, Any]:
        """The plan as ``headwise.plan`` 1.0 (docs/format.md)."""
        return {
            "format": artifacts.PLAN_FORMAT,
            "version": artifacts.PLAN_VERSION,
            "model": {"name": self.model, "weight_hash": self.weight_hash},
            "criterion": self.criterion,
            "budget": dict(self.budget),
            "unit": self.unit,
            "facts": dict(self.facts),
            "blocks": [
                {"module": block, "query_heads": query, "kv_heads": kv} for block, (query, kv) in self.blocks.items()
            ],
            "cuts": [{"block": cut.block, "head": cut.head, "replacement": cut.replacement} for cut in self.cuts],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> HeadPlan:
        """Read what :meth:`to_document` wrote.

        Raises:
            InputError: the document contradicts itself.
        """
        blocks: Sequence[Mapping[str, Any]] = document["blocks"]
        return cls(
            tuple(HeadCut(cut["block"], cut["head"], cut["replacement"]) for cut in document["cuts"]),
            model=document["model"]["name"],
            weight_hash=document["model"]["weight_hash"],
            criterion=document["criterion"],
            budget=document["budget"],
            unit=document["unit"],
            facts=document["facts"],
            blocks={one["module"]: (one["query_heads"], one["kv_heads"]) for one in blocks},
        )

    def save(self, path: str | Path) -> Path:
        """Write the plan in one step; the bytes are a function of the content.

        Raises:
            RunError: it cannot be written; what was there is untouched.
        """
        return artifacts.write_document(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path) -> HeadPlan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            RunError: it is missing, damaged, of another format, or contradicts itself.
        """
        document = artifacts.read_document(path, artifacts.PLAN_FORMAT)
        try:
            return cls.from_document(document)
        except HeadwiseError as error:
            raise RunError(f"{path}: {error}") from None

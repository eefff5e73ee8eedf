"""Measures that are wrong on purpose, each with the check that must catch it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import headwise as hw
from headwise.data import batches
from headwise.heads import HeadTable, MeasureInfo, Moments
from headwise.measures import HeadWeights, Look, PooledMeasure, RowMeasure, Sums, WeightMeasure
from headwise.measures.importance import NextToken, gate_gradients


@dataclass(frozen=True, kw_only=True)
class Broken(RowMeasure):
    name: str = "broken"
    unit: str = "1"
    description: str = "Wrong on purpose."


@dataclass(frozen=True, kw_only=True)
class CountsPadding(Broken):
    """Divides by the length of the padded sequence."""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy / look.problem.k.shape[2]


@dataclass(frozen=True, kw_only=True)
class CentresBatch(Broken):
    """Subtracts the mean over the batch."""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy - look.rows.entropy.mean()


@dataclass(frozen=True, kw_only=True)
class FirstOfBatch(Broken):
    """Counts the rows of a batch's first passage only."""

    def __call__(self, look: Look) -> tuple[Tensor, Tensor]:
        entropy = look.rows.entropy
        first = torch.zeros(entropy.shape[0], 1, 1, dtype=torch.bool)
        first[0] = True
        return entropy, first.expand_as(entropy)


@dataclass(frozen=True, kw_only=True)
class KeepsState(Broken):
    """Remembers how often it was called."""

    calls: list[int] = field(default_factory=list, compare=False, hash=False)

    def __call__(self, look: Look) -> Tensor:
        self.calls.append(1)
        return look.rows.entropy + len(self.calls)


@dataclass(frozen=True, kw_only=True)
class HoldsList(Broken):
    """Could keep state in a list."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy


@dataclass(frozen=True, kw_only=True)
class Rolls(Broken):
    """Adds global random numbers."""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy + torch.rand_like(look.rows.entropy)


@dataclass(frozen=True, kw_only=True)
class NumbersHeads(Broken):
    """Depends on where a head stands."""

    def __call__(self, look: Look) -> Tensor:
        heads = look.call.z.shape[1]
        return look.rows.entropy * torch.arange(1, heads + 1, device=look.call.z.device)[None, :, None]


@dataclass(frozen=True, kw_only=True)
class MixesHeads(Broken):
    """Subtracts the neighbour's value."""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.max_weight - look.rows.max_weight.roll(1, dims=1)


@dataclass(frozen=True, kw_only=True)
class OnTheCpu(Broken):
    """Makes a tensor without saying where."""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy * torch.ones(look.call.z.shape[1])[None, :, None]


@dataclass(frozen=True, kw_only=True)
class OutOfRange(Broken):
    """States a range that its values leave."""

    low: float | None = 0.0
    high: float | None = 0.3

    def __call__(self, look: Look) -> Tensor:
        return look.rows.max_weight


@dataclass(frozen=True, kw_only=True)
class LogOfZero(Broken):
    """0 log 0 the naive way."""

    def __call__(self, look: Look) -> Tensor:
        p = look.rows.max_weight
        return -(1 - p) * (1 - p).log()


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Broken):
    """Computes in bfloat16 what arrives in float32."""

    def __call__(self, look: Look) -> Tensor:
        entropy = look.rows.entropy
        return entropy.bfloat16().float() if entropy.dtype == torch.float32 else entropy


@dataclass(frozen=True, kw_only=True)
class InPlace(Broken):
    """Changes the activations that the model goes on with."""

    def __call__(self, look: Look) -> Tensor:
        norm = look.call.z.float().norm(dim=-1)
        look.call.z.mul_(0.5)
        return norm


@dataclass(frozen=True, kw_only=True)
class TouchesWeights(Broken):
    """Normalises the weights of the model."""

    def __call__(self, look: Look) -> Tensor:
        with torch.no_grad():
            next(look.call.module.parameters()).mul_(1.0000001)
            list(look.call.module.parameters())[-1].add_(1e-3)
        return look.rows.entropy


@dataclass(frozen=True, kw_only=True)
class LeavesHooks(Broken):
    """Hooks a module and forgets about it."""

    def __call__(self, look: Look) -> Tensor:
        look.call.module.register_forward_hook(lambda *_: None)
        return look.rows.entropy


@dataclass(frozen=True, kw_only=True)
class WakesTraining(Broken):
    """Leaves the model in another mode."""

    def __call__(self, look: Look) -> Tensor:
        next(look.call.module.parameters()).requires_grad_(True)
        return look.rows.entropy


@dataclass(frozen=True, kw_only=True)
class ByForward(Broken):
    """Depends on which forward pass it is."""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy + look.call.forward


@dataclass(frozen=True, kw_only=True)
class TooFew(Broken):
    """One number per head instead of one per row."""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy.mean(-1)


@dataclass(frozen=True, kw_only=True)
class NoRows(Broken):
    """Reads row statistics that it did not ask for."""

    def wants(self, site: Any, problem: Any) -> Any:
        from headwise.kernels import Wanted

        return Wanted()

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy


@dataclass(frozen=True, kw_only=True)
class Silent(Broken):
    """Says nothing about itself."""

    description: str = ""

    def __call__(self, look: Look) -> Tensor:
        return look.rows.entropy


@dataclass(frozen=True)
class LastCall(Sums[Tensor]):
    """Keeps the later of two sums."""

    def of(self, look: Look) -> Tensor:
        return look.call.z.detach().double().square().sum((0, 2, 3))

    def join(self, left: Tensor, right: Tensor) -> Tensor:
        return right


@dataclass(frozen=True, kw_only=True)
class Forgets(PooledMeasure):
    """Knows the last batch only."""

    name: str = "forgets"
    unit: str = "1"
    description: str = "Wrong on purpose."
    sums: LastCall = LastCall()

    def __call__(self, state: Tensor) -> Tensor:
        return state


@dataclass(frozen=True, kw_only=True)
class FirstHeadOnly(WeightMeasure):
    """Gives the norm of the first head to all."""

    name: str = "first_head"
    unit: str = "1"
    description: str = "Wrong on purpose."

    def __call__(self, weights: HeadWeights) -> Tensor | str:
        return weights.o if isinstance(weights.o, str) else weights.o.norm(dim=(1, 2))[:1].expand(len(weights.o))


def cancelling(model: hw.Model, inputs: Any, batch_size: int = 8) -> HeadTable:
    """Case 21: the absolute value after the sum over a batch's examples."""
    loss, layout = NextToken(), model.layout
    heads = list(layout.heads())
    total, rows = np.zeros(len(heads)), 0
    for batch in batches(model, inputs, batch_size=batch_size):
        found = gate_gradients(model, loss.prepare(model, batch), loss, layout=layout)
        values = [found.gradients[site.key] for site in layout.sites]
        total += torch.cat([value.sum(0).abs() for value in values if value is not None]).numpy()
        rows += len(batch.passages)
    info = MeasureInfo("cancelling", "nats", description="Wrong on purpose.")
    moments = Moments([rows] * len(heads), total / rows, np.zeros(len(heads)))
    return HeadTable.build(layout, {"cancelling": info}, {("cancelling", "token"): moments})


#: Each broken measure and the checks of which at least one must catch it.
ZOO: dict[str, tuple[Any, frozenset[str]]] = {
    "counts padding": (CountsPadding(), frozenset({"padding", "batching"})),
    "centres by the batch": (CentresBatch(), frozenset({"batching", "padding"})),
    "first passage of a batch": (FirstOfBatch(), frozenset({"batching"})),
    "keeps state": (KeepsState(), frozenset({"determinism"})),
    "could keep state": (HoldsList(), frozenset({"description"})),
    "global random numbers": (Rolls(), frozenset({"determinism"})),
    "numbers heads": (NumbersHeads(), frozenset({"heads"})),
    "mixes heads": (MixesHeads(), frozenset({"heads"})),
    "tensor without device": (OnTheCpu(), frozenset({"device"})),
    "out of range": (OutOfRange(), frozenset({"range"})),
    "0 log 0": (LogOfZero(), frozenset({"range"})),
    "half precision": (HalfPrecision(), frozenset({"precision"})),
    "in place": (InPlace(), frozenset({"passive"})),
    "touches weights": (TouchesWeights(), frozenset({"passive"})),
    "leaves hooks": (LeavesHooks(), frozenset({"passive"})),
    "changes requires_grad": (WakesTraining(), frozenset({"passive"})),
    "by the forward pass": (ByForward(), frozenset({"batching"})),
    "one number per head": (TooFew(), frozenset({"range"})),
    "reads what it did not ask for": (NoRows(), frozenset({"range"})),
    "no description": (Silent(), frozenset({"description"})),
    "forgets earlier batches": (Forgets(), frozenset({"batching"})),
    "first head for all": (FirstHeadOnly(), frozenset({"heads"})),
    "cancels over a batch": (cancelling, frozenset({"batching"})),
}

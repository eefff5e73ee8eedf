"""How sensitive the loss is to the gates of heads: a :class:`~headwise.plans.GateScores`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headwise.data import Batch
from headwise.measures.importance import Loss, gate_gradients
from headwise.models import Model
from headwise.plans import RIDGE, Sensitivity, Unit, gone_of
from headwise.surgery.averaging import averaged
from headwise.verbs.choosing.projecting import Projections, projecting

__all__ = ["GateGradientScores"]


class GateGradientScores:
    """Gradients by the gates of units, one forward and one backward pass a batch.

    The gate of a unit is the gate of all its heads at all sites that read its block: their gradients are added before
    the absolute value is taken.

    Args:
        model: as before afterwards.
        batches: the text.
        loss: whose gradients.
        running: heads are replaced by running means; the gradient is then by how much of the head is left of the two.
    """

    def __init__(self, model: Model, batches: Iterable[Batch], loss: Loss, *, running: bool = False) -> None:
        self._model, self._batches, self._loss, self._running = model, batches, loss, running
        self._projections = Projections(model, None, "none", RIDGE, running=running)
        self.passes = 0.0

    def sensitivities(self, removed: Sequence[Unit], units: Sequence[Unit], kind: Sensitivity) -> list[float]:
        """Mean over examples of the absolute or squared gradient by each unit's gate, without ``removed``."""
        layout = self._model.layout
        gone = gone_of(removed)
        parts = {path: [self._projections.without(path, heads)] for path, heads in gone.items()}
        replacement = "running_mean" if self._running else "nothing"
        totals, examples = torch.zeros(len(units), dtype=torch.float64), 0
        means = averaged(self._model, layout, gone if self._running else {})
        with means, projecting(self._model.module, layout.blocks, parts):
            for batch in self._batches:
                task = self._loss.prepare(self._model, batch)
                taken = gate_gradients(self._model, task, self._loss, layout=layout, replacement=replacement)
                found = taken.gradients
                blocks: dict[str, Tensor] = {}
                for site in layout.sites:
                    gradient = found[site.key]
                    if gradient is not None:
                        blocks[site.block] = blocks.get(site.block, 0) + gradient.double().cpu()
                for at, unit in enumerate(units):
                    if unit.block in blocks:
                        each = blocks[unit.block][:, list(unit.heads)].sum(1)
                        totals[at] += (each.abs() if kind == "michel" else each.square()).sum()
                examples += task.size
        self.passes += 3
        values: list[float] = (totals / max(1, examples)).tolist()
        return values

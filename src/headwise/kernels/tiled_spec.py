"""A problem taken apart into tensors and the rest, as functions with gradients need it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.kernels.problem import Predicate, Problem, ScoreRule, Visible

__all__ = ["OUTPUTS", "Spec"]

#: What a pass yields, in the order in which functions hand it over; the first four have gradients.
OUTPUTS = ("z", "lse", "entropy", "distance", "max_score", "argmax")


@dataclass(frozen=True)
class Spec:
    """All of a problem that is no tensor, and what is wanted."""

    causal: bool
    window: int | None
    offset: int
    predicate: Predicate | None
    scale: float
    softcap: float | None
    statistics: bool
    distance: bool

    def problem(self, *tensors: Tensor | None) -> Problem:
        """The problem that these tensors and this spec make."""
        q, k, v, bias, additive_mask, key_padding, mask = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        visible = Visible(self.causal, self.window, self.offset, key_padding, mask, self.predicate)
        return Problem(q, k, v, visible, ScoreRule(self.scale, self.softcap, bias, None, additive_mask))

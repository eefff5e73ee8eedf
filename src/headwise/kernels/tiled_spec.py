"""A problem taken apart into tensors and the rest, as functions with gradients need it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.kernels.problem import Predicate, Problem, ScoreRule, Visible
from headwise.kernels.tiled_core import Raw

__all__ = ["OUTPUTS", "Spec"]

#: What a pass yields, in the order in which functions hand it over; the first five have gradients.
OUTPUTS = ("z", "lse", "entropy", "distance", "peak", "top", "argmax")


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

    def raw(self, *outputs: Tensor | None) -> Raw:
        """A pass's outputs by name, from the order of ``OUTPUTS``; what was not wanted is None."""
        named = dict(zip(OUTPUTS, outputs, strict=True))
        z, lse, peak, top = (named[name] for name in ("z", "lse", "peak", "top"))
        assert z is not None
        assert lse is not None
        assert peak is not None
        assert top is not None
        if not self.statistics:
            return Raw(z, lse, peak, top)
        return Raw(z, lse, peak, top, named["entropy"], named["argmax"], named["distance"] if self.distance else None)

"""One number per head and example, folded into moments, and the table made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from torch import Tensor

from headwise.heads import HeadTable, MeasureInfo, Moments
from headwise.layout import HeadId, HeadLayout, SiteKey
from headwise.measures.importance.edits import Ablation
from headwise.measures.importance.losses import Loss

__all__ = ["ExampleMoments", "ablation_info", "gradient_infos"]

_MICHEL: Final = "Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 4.1"


class ExampleMoments:
    """Moments over examples of several measures, over all heads of a layout."""

    def __init__(self, layout: HeadLayout, infos: Sequence[MeasureInfo]) -> None:
        self.layout = layout
        self.infos = {info.name: info for info in infos}
        self._heads = tuple(layout.heads())
        self._at = {head: at for at, head in enumerate(self._heads)}
        self._moments = {name: Moments.empty(len(self._heads)) for name in self.infos}
        self._absent: dict[str, dict[SiteKey, str]] = {name: {} for name in self.infos}

    def add_site(self, name: str, site: SiteKey, values_BH: Tensor) -> None:
        """Take one number per example and head of a site."""
        values = values_BH.detach().double().cpu().numpy()
        self._fold(name, [self._at[HeadId(site, head)] for head in range(values.shape[1])], values)

    def add_head(self, name: str, head: HeadId, values_B: Tensor) -> None:
        """Take one number per example of one head."""
        self._fold(name, [self._at[head]], values_B.detach().double().cpu().numpy()[:, None])

    def _fold(self, name: str, at: Sequence[int], values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
        old, new = self._moments[name], Moments.of(values)
        joined = old.take(at).merge(new)
        parts = {part: np.array(getattr(old, part)) for part in ("count", "mean", "m2")}
        for part, array in parts.items():
            array[list(at)] = getattr(joined, part)
        self._moments[name] = Moments(parts["count"], parts["mean"], parts["m2"])

    def lacks(self, name: str, site: SiteKey, reason: str) -> None:
        """Say why a site has no number."""
        self._absent[name].setdefault(site, reason)

    def table(self, *, model: str | None, weight_hash: str | None, parts: Sequence[str]) -> HeadTable:
        """The table over every head; a site that has numbers is not absent."""
        absent = {}
        for name, reasons in self._absent.items():
            counts = self._moments[name].count
            seen = {head.site for head, count in zip(self._heads, counts, strict=True) if count}
            absent[name] = {site: reason for site, reason in reasons.items() if site not in seen}
        values: dict[tuple[str, Literal["token", "special"]], Moments] = {
            (name, "token"): moments for name, moments in self._moments.items()
        }
        return HeadTable.build(
            self.layout, self.infos, values, absent=absent, model=model, weight_hash=weight_hash, parts=parts
        )


def gradient_infos(loss: Loss) -> tuple[MeasureInfo, MeasureInfo]:
    """The two measures that one backward pass gives: ``gate_gradient`` and ``fisher``."""
    return (
        MeasureInfo(
            "gate_gradient",
            loss.unit,
            low=0.0,
            better="high",
            description=f"|dL/dgate| of the head per example; rows are examples. Loss: {loss.said}.",
            source=_MICHEL,
        ),
        MeasureInfo(
            "fisher",
            f"({loss.unit})^2",
            low=0.0,
            better="high",
            description=f"(dL/dgate)^2 of the head per example, diagonal of the gates' empirical Fisher matrix; "
            f"rows are examples. Loss: {loss.said}.",
            source="Kwon et al. 2022, A Fast Post-Training Pruning Framework for Transformers",
        ),
    )


def ablation_info(loss: Loss, kind: Ablation) -> MeasureInfo:
    """The measure of one kind of ablation: ``ablation_zero``, ``ablation_mean`` or ``ablation_resample``."""
    by = {
        "zero": "zero",
        "mean": "its mean over the rows of this data",
        "resample": "its output at random rows of other passages of this data",
    }[kind]
    return MeasureInfo(
        f"ablation_{kind}",
        loss.unit,
        better="high",
        description=f"Rise of the loss when the head's output is replaced by {by}; rows are examples. "
        f"Loss: {loss.said}.",
        pooled=kind != "zero",
        source="Chan et al. 2022, Causal Scrubbing"
        if kind == "resample"
        else "Michel et al. 2019, section 3 (ablating one head)",
    )

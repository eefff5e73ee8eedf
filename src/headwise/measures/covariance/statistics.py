"""What planning needs of a model on data: for every layer the covariance of its head outputs, and of its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwise import artifacts
from headwise.errors import InputError, RunError
from headwise.layout import Site, SiteKey
from headwise.measures.covariance.accumulate import Scatter

__all__ = ["ROWS_TAKEN", "SiteStatistics", "Statistics"]

#: What the file says about the rows that were taken.
ROWS_TAKEN: Final = "all rows but padding, special tokens included"


@dataclass(frozen=True)
class SiteStatistics:
    """The moments of one site.

    Attributes:
        site: where.
        heads, d_v: how many query heads, and the width of each.
        z: of the concatenated head outputs, width heads * d_v, head after head; and after them of the mean of the
            visible values of so many key-value heads as ``means`` says.
        gradient: of the loss gradient at the layer's output (after W_O), width d_model; None where none were taken.
        input_energy: mean over rows, weighted as they are, of the squared norm of the residual stream at the layer's
            input; None where the layer was not found.
        means: of how many key-value heads the running means were taken, all or none.
    """

    site: Site
    heads: int
    d_v: int
    z: Scatter
    gradient: Scatter | None = None
    input_energy: float | None = None
    means: int = 0

    @property
    def mean(self) -> Tensor:
        """Means of the head outputs (heads * d_v,)."""
        return self.z.mean[: self.heads * self.d_v]

    @property
    def covariance(self) -> Tensor:
        """C (heads * d_v, heads * d_v), centred, over rows."""
        width = self.heads * self.d_v
        return self.z.covariance[:width, :width]

    @property
    def joint_mean(self) -> Tensor:
        """Means of the head outputs and, after them, of the running means ((heads + means) * d_v,)."""
        return self.z.mean

    @property
    def joint_covariance(self) -> Tensor:
        """The covariance of both, centred, over rows."""
        return self.z.covariance

    @property
    def gradient_moment(self) -> Tensor | None:
        """G (d_model, d_model): E[g g^T], not centred; None where no gradients were taken."""
        return None if self.gradient is None else self.gradient.second_moment

    def merge(self, other: SiteStatistics) -> SiteStatistics:
        """Both sets of rows together."""
        if (self.site, self.heads, self.d_v, self.means) != (other.site, other.heads, other.d_v, other.means):
            raise InputError(f"cannot merge: site {self.site.key} has other heads, or running means, in the other")
        gradient = self.gradient.merge(other.gradient) if self.gradient and other.gradient else None
        energy = None
        if self.input_energy is not None and other.input_energy is not None:
            total = self.z.weight + other.z.weight
            energy = (self.input_energy * self.z.weight + other.input_energy * other.z.weight) / (total or 1.0)
        return SiteStatistics(self.site, self.heads, self.d_v, self.z.merge(other.z), gradient, energy, self.means)


class Statistics:
    """The moments of every site of a model on data, saved as one safetensors file (docs/format.md).

    Args:
        sites: the moments, in the order of a forward pass.
        model, weight_hash: which model.
        parts: names of the pieces of data.
        skip_first: rows left out at the beginning of every passage.
        relative: whether rows count by the inverse of their energy; see :class:`CovarianceObserver`.
        loss: whose gradients were taken, or None.

    Index it by :class:`~headwise.layout.SiteKey`; iterate over it for the keys, in order.
    """

    def __init__(
        self,
        sites: Iterable[SiteStatistics],
        *,
        model: str | None = None,
        weight_hash: str | None = None,
        parts: Iterable[str] = (),
        skip_first: int = 0,
        relative: bool = False,
        loss: str | None = None,
    ) -> None:
        self.sites: Mapping[SiteKey, SiteStatistics] = {one.site.key: one for one in sites}
        self.model, self.weight_hash, self.loss, self.skip_first = model, weight_hash, loss, skip_first
        self.relative = relative
        self.parts = tuple(sorted(set(parts)))

    def __getitem__(self, key: SiteKey) -> SiteStatistics:
        if key not in self.sites:
            raise InputError(
                f"the statistics have no site {key}; they have {', '.join(map(str, list(self.sites)[:8]))}"
            )
        return self.sites[key]

    def __iter__(self) -> Any:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def merge(self, other: Statistics, *, overlap: bool = False) -> Statistics:
        """The statistics of both sets of rows: what one run over all the data would have given.

        Raises:
            InputError: other weights, sites, losses or choices of rows, or a shared part of the data.
        """
        for name in ("weight_hash", "loss", "skip_first", "relative"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise InputError(
                    f"cannot merge: {name} is {ours!r} in the first statistics and {theirs!r} in the second"
                )
        if list(self.sites) != list(other.sites):
            raise InputError("cannot merge: the two statistics are of different sites")
        shared = set(self.parts) & set(other.parts)
        if shared and not overlap:
            raise InputError(
                f"cannot merge: both were measured on {min(shared)!r}, whose rows would count twice; pass overlap=True "
                "to count them twice"
            )
        return Statistics(
            [one.merge(other[key]) for key, one in self.sites.items()],
            model=self.model if self.model is not None else other.model,
            weight_hash=self.weight_hash,
            parts={*self.parts, *other.parts},
            skip_first=self.skip_first,
            relative=self.relative,
            loss=self.loss,
        )

    def save(self, path: str | Path) -> Path:
        """Write the file in one step; bytes are a function of the content.

        Raises:
            RunError: it cannot be written.
        """
        arrays: dict[str, npt.NDArray[Any]] = {}
        for at, one in enumerate(self.sites.values()):
            if one.z.rows:
                arrays[f"{at}.mean"], arrays[f"{at}.covariance"] = _array(one.z.mean), _array(one.z.covariance)
            if one.gradient is not None and one.gradient.rows:
                arrays[f"{at}.gradient_mean"] = _array(one.gradient.mean)
                arrays[f"{at}.gradient_covariance"] = _array(one.gradient.covariance)
        return artifacts.write_tensors(path, self._document(), arrays)

    def _document(self) -> dict[str, Any]:
        return {
            "format": artifacts.STATISTICS_FORMAT,
            "version": artifacts.STATISTICS_VERSION,
            "model": {"name": self.model, "weight_hash": self.weight_hash},
            "parts": list(self.parts),
            "rows": {
                "which": ROWS_TAKEN,
                "skip_first": self.skip_first,
                **({"relative": True} if self.relative else {}),
            },
            "loss": self.loss,
            "sites": [_entry(one) for one in self.sites.values()],
        }

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read a file that :meth:`save` wrote.

        Raises:
            RunError: it is missing, damaged, of another format, or contradicts itself.
        """
        document, arrays = artifacts.read_tensors(path, artifacts.STATISTICS_FORMAT)
        sites = [_read(entry, at, arrays, path) for at, entry in enumerate(document["sites"])]
        if len({one.site.key for one in sites}) < len(sites):
            raise RunError(f"{path}: a site occurs twice")
        return cls(
            sites,
            model=document["model"]["name"],
            weight_hash=document["model"]["weight_hash"],
            parts=document["parts"],
            skip_first=document["rows"]["skip_first"],
            relative=document["rows"].get("relative", False),
            loss=document["loss"],
        )


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.detach().double().cpu().numpy()


def _entry(one: SiteStatistics) -> dict[str, Any]:
    key = one.site.key
    return {
        "stack": key.stack,
        "kind": key.kind,
        "module": key.module,
        "call": key.call,
        "block": one.site.block,
        "layer": one.site.layer,
        "causal": one.site.causal,
        "window": one.site.window,
        "heads": one.heads,
        "d_v": one.d_v,
        "rows": one.z.rows,
        "input_energy": one.input_energy,
        "gradient_rows": None if one.gradient is None else one.gradient.rows,
        **({} if one.z.weight == one.z.rows else {"weight": one.z.weight}),
        **({"means": one.means} if one.means else {}),
    }


def _read(
    entry: Mapping[str, Any], at: int, arrays: Mapping[str, npt.NDArray[Any]], path: str | Path
) -> SiteStatistics:
    key = SiteKey(entry["stack"], entry["kind"], entry["module"], entry["call"])
    site = Site(key, entry["block"], entry["layer"], entry["causal"], entry["window"])
    means = entry.get("means", 0)
    width = (entry["heads"] + means) * entry["d_v"]
    z = _scatter(arrays, f"{at}.", "", entry["rows"], width, path, entry.get("weight"))
    gradient = None
    if entry["gradient_rows"] is not None:
        gradient = _scatter(arrays, f"{at}.", "gradient_", entry["gradient_rows"], None, path)
    return SiteStatistics(site, entry["heads"], entry["d_v"], z, gradient, entry["input_energy"], means)


def _scatter(
    arrays: Mapping[str, npt.NDArray[Any]],
    place: str,
    kind: str,
    rows: int,
    width: int | None,
    path: str | Path,
    weight: float | None = None,
) -> Scatter:
    mean, covariance = (arrays.get(f"{place}{kind}{name}") for name in ("mean", "covariance"))
    if rows == 0:
        return Scatter(width or 1)
    if mean is None or covariance is None:
        raise RunError(
            f"{path}: {place}{kind}mean or {place}{kind}covariance is missing although {rows} rows are counted"
        )
    width = len(mean) if width is None else width
    if mean.shape != (width,) or covariance.shape != (width, width):
        raise RunError(
            f"{path}: {place}{kind}covariance has shape {covariance.shape} and {place}{kind}mean {mean.shape}; "
            f"expected width {width}"
        )
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise RunError(f"{path}: {place}{kind}covariance holds values that are not finite")
    scale = float(np.abs(covariance).max(initial=0.0)) * 1e-6
    if covariance.diagonal().min(initial=0.0) < -scale or np.abs(covariance - covariance.T).max(initial=0.0) > scale:
        raise RunError(f"{path}: {place}{kind}covariance is none: it is not symmetric, or has a negative variance")
    return Scatter.of(rows, torch.from_numpy(mean.copy()), torch.from_numpy(covariance.copy()), weight)

"""How alike the heads of a model are: distances of patterns, alignment of outputs, clusters and a map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headwise import artifacts
from headwise.errors import InputError, RunError
from headwise.layout import HeadId, SiteKey
from headwise.measures.similarity.clusters import average_linkage, classical_map, cut

__all__ = ["HeadMap", "Pair", "Redundancy"]

By = Literal["patterns", "outputs"]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """Two heads and how alike they are: ``distance`` in [0, 1], 0 for heads that do the same."""

    left: HeadId
    right: HeadId
    distance: float


@dataclass(frozen=True)
class HeadMap:
    """Heads as points of a plane.

    Attributes:
        heads: which heads.
        points: (heads, 2).
        share: how much of the distances the plane holds, in [0, 1].
    """

    heads: tuple[HeadId, ...]
    points: Floats
    share: float


@dataclass(frozen=True, eq=False)
class Redundancy:
    """How alike every two heads are.

    Attributes:
        heads: the heads, in the order of the matrices.
        layers: the label of each head's layer.
        js: (heads, heads) Jensen-Shannon distance of patterns: the square root of the mean divergence over the sampled
            rows, in bits; 0 alike, 1 disjoint. NaN where queries or keys are other positions.
        cka: (heads, heads) linear CKA of outputs; 1 alike up to rotation and scale, 0 unrelated. Exact within a layer.
            NaN where rows are others, or a head never varies.
        patterns: ``rows`` (sampled in all), ``rows_per_passage``, ``seed``.
        outputs: ``directions`` (random, of each head, across layers), ``exact`` (whether they are all), ``rows``.
        model, weight_hash, parts: of what.
    """

    heads: tuple[HeadId, ...]
    layers: tuple[int, ...]
    js: Floats
    cka: Floats
    patterns: Mapping[str, Any]
    outputs: Mapping[str, Any]
    model: str | None = None
    weight_hash: str | None = None
    parts: tuple[str, ...] = ()

    def distance(self, by: By = "outputs") -> Floats:
        """(heads, heads): ``js`` for ``"patterns"``, 1 - ``cka`` for ``"outputs"``."""
        if by not in ("patterns", "outputs"):
            raise InputError(f"by must be 'patterns' or 'outputs', not {by!r}")
        return self.js.copy() if by == "patterns" else 1 - self.cka

    def nearest(self, n: int = 10, by: By = "outputs") -> list[Pair]:
        """The ``n`` pairs of heads that are most alike, nearest first."""
        table = self.distance(by)
        left, right = np.triu_indices(len(self.heads), 1)
        values = table[left, right]
        order = np.lexsort((right, left, values))
        kept = [at for at in order if not np.isnan(values[at])][:n]
        return [Pair(self.heads[left[at]], self.heads[right[at]], float(values[at])) for at in kept]

    def clusters(self, at: float = 0.3, by: By = "outputs") -> list[tuple[HeadId, ...]]:
        """Groups of two or more heads, by average linkage, whose mean distance is at most ``at``; largest first.

        Heads that cannot be compared are taken as far apart as can be.
        """
        if not 0 <= at <= 1:
            raise InputError(f"at must be a distance in [0, 1], got {at}")
        table = self._filled(by)
        labels = cut(average_linkage(table), len(self.heads), at)
        groups: dict[int, list[HeadId]] = {}
        for head, label in zip(self.heads, labels, strict=True):
            groups.setdefault(int(label), []).append(head)
        return sorted((tuple(group) for group in groups.values() if len(group) > 1), key=lambda g: (-len(g), g[0]))

    def _filled(self, by: By) -> Floats:
        table = np.nan_to_num(self.distance(by), nan=1.0)
        np.fill_diagonal(table, 0.0)
        return table

    def maps(self, by: By = "patterns") -> Iterator[HeadMap]:
        """The heads of each stack and kind in a plane, by classical scaling; heads without a distance are left out."""
        groups: dict[tuple[str, str], list[int]] = {}
        table = self.distance(by)
        for at, head in enumerate(self.heads):
            groups.setdefault((head.site.stack, head.site.kind), []).append(at)
        for group in groups.values():
            part = table[group][:, group]
            there = np.flatnonzero(~np.isnan(part).all(1))
            if len(there):
                points, share = classical_map(np.nan_to_num(part[there][:, there], nan=1.0))
                yield HeadMap(tuple(self.heads[group[one]] for one in there), points, share)

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file (docs/format.md) in one step.

        Raises:
            RunError: it cannot be written.
        """
        document = {
            "format": artifacts.REDUNDANCY_FORMAT,
            "version": artifacts.REDUNDANCY_VERSION,
            "model": {"name": self.model, "weight_hash": self.weight_hash},
            "parts": list(self.parts),
            "heads": [_entry(head, layer) for head, layer in zip(self.heads, self.layers, strict=True)],
            "patterns": dict(self.patterns),
            "outputs": dict(self.outputs),
        }
        return artifacts.write_tensors(path, document, {"js": self.js, "cka": self.cka})

    @classmethod
    def load(cls, path: str | Path) -> Redundancy:
        """Read a file that :meth:`save` wrote.

        Raises:
            RunError: it is missing, damaged, of another format, or contradicts itself.
        """
        document, arrays = artifacts.read_tensors(path, artifacts.REDUNDANCY_FORMAT)
        heads = tuple(_head(entry) for entry in document["heads"])
        for name in ("js", "cka"):
            if name not in arrays or arrays[name].shape != (len(heads), len(heads)):
                raise RunError(f"{path}: {name} is not a matrix of {len(heads)} x {len(heads)} heads")
        return cls(
            heads,
            tuple(entry["layer"] for entry in document["heads"]),
            arrays["js"],
            arrays["cka"],
            document["patterns"],
            document["outputs"],
            document["model"]["name"],
            document["model"]["weight_hash"],
            tuple(document["parts"]),
        )

    def to_document(self, pairs: int = 20, at: float = 0.3) -> dict[str, Any]:
        """What ``--json`` prints: the nearest pairs and the clusters, by patterns and by outputs."""

        def names(heads: Iterable[HeadId]) -> list[str]:
            return [str(head) for head in heads]

        kinds: tuple[By, By] = ("patterns", "outputs")
        return {
            "model": {"name": self.model, "weight_hash": self.weight_hash},
            "heads": names(self.heads),
            "patterns": dict(self.patterns),
            "outputs": dict(self.outputs),
            "nearest": {
                by: [
                    {"left": str(pair.left), "right": str(pair.right), "distance": pair.distance}
                    for pair in self.nearest(pairs, by)
                ]
                for by in kinds
            },
            "clusters": {by: [names(group) for group in self.clusters(at, by)] for by in kinds},
            "cluster_distance": at,
        }


def _entry(head: HeadId, layer: int) -> dict[str, Any]:
    key = head.site
    return {
        "stack": key.stack,
        "kind": key.kind,
        "module": key.module,
        "call": key.call,
        "layer": layer,
        "head": head.head,
    }


def _head(entry: Mapping[str, Any]) -> HeadId:
    return HeadId(SiteKey(entry["stack"], entry["kind"], entry["module"], entry["call"]), entry["head"])

"""Groups of heads that are near each other, and a map of them in two dimensions; numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwise.errors import InputError

__all__ = ["average_linkage", "classical_map", "cut"]

Floats = npt.NDArray[np.float64]


def average_linkage(distances: Floats) -> Floats:
    """Agglomerative clustering by average distance (UPGMA), by nearest-neighbour chains in O(n^2).

    Args:
        distances: symmetric (n, n), 0 on the diagonal; no NaN.

    Returns:
        (n - 1, 4), as scipy's ``linkage``: the two clusters that merge (points are 0 .. n - 1, the cluster of line i is
        n + i), their distance, and the number of points together; in the order of distance.

    Raises:
        InputError: not symmetric, or NaN.

    Example:
        >>> d = np.array([[0.0, 1.0, 5.0], [1.0, 0.0, 3.0], [5.0, 3.0, 0.0]])
        >>> average_linkage(d).tolist()
        [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 4.0, 3.0]]
    """
    table = np.array(distances, np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not np.allclose(table, table.T, equal_nan=False):
        raise InputError("distances must be a symmetric matrix without NaN")
    count = len(table)
    np.fill_diagonal(table, np.inf)
    sizes, alive = np.ones(count), np.ones(count, bool)
    merges: list[tuple[int, int, float]] = []
    chain: list[int] = []
    for _ in range(count - 1):
        if not chain:
            chain.append(int(np.flatnonzero(alive)[0]))
        while True:
            here = chain[-1]
            near = int(np.argmin(np.where(alive, table[here], np.inf)))
            if len(chain) > 1 and table[here, chain[-2]] <= table[here, near]:
                near = chain[-2]
                break
            chain.append(near)
        chain = chain[:-2]
        keep, gone = min(here, near), max(here, near)
        merges.append((keep, gone, float(table[here, near])))
        mean = (sizes[keep] * table[keep] + sizes[gone] * table[gone]) / (sizes[keep] + sizes[gone])
        table[keep], table[:, keep] = mean, mean
        table[keep, keep] = np.inf
        sizes[keep] += sizes[gone]
        alive[gone] = False
        table[gone], table[:, gone] = np.inf, np.inf
    return _in_order(merges, count)


def _in_order(merges: list[tuple[int, int, float]], count: int) -> Floats:
    """Merges sorted by distance, with clusters numbered as scipy numbers them."""
    parent, name = list(range(count)), list(range(count))
    size = [1] * count

    def root(point: int) -> int:
        while parent[point] != point:
            parent[point] = parent[parent[point]]
            point = parent[point]
        return point

    lines = []
    for at, (left, right, distance) in enumerate(sorted(merges, key=lambda merge: merge[2])):
        a, b = root(left), root(right)
        first, second = sorted((name[a], name[b]))
        parent[b] = a
        size[a] += size[b]
        name[a] = count + at
        lines.append((first, second, distance, size[a]))
    return np.array(lines, np.float64).reshape(-1, 4)


def cut(linkage: Floats, count: int, at: float) -> npt.NDArray[np.int64]:
    """The cluster of every point when merges above the distance ``at`` are undone; clusters by first point, from 0.

    Example:
        >>> cut(np.array([[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 4.0, 3.0]]), 3, 2.0).tolist()
        [0, 0, 1]
    """
    members = {point: [point] for point in range(count)}
    for line, (left, right, distance, _) in enumerate(linkage):
        if distance > at:
            break
        members[count + line] = members.pop(int(left)) + members.pop(int(right))
    out = np.empty(count, np.int64)
    for number, points in enumerate(sorted(members.values(), key=min)):
        out[points] = number
    return out


def classical_map(distances: Floats) -> tuple[Floats, float]:
    """Classical multidimensional scaling: points in a plane whose distances come close to those given.

    Returns:
        (n, 2) coordinates, centred, with signs fixed (the largest coordinate of each axis is positive); and the share
        of the positive eigenvalues that the plane holds, in [0, 1].

    Example:
        >>> points, share = classical_map(np.array([[0.0, 3.0], [3.0, 0.0]]))
        >>> round(float(abs(points[0, 0] - points[1, 0])), 6), share
        (3.0, 1.0)
    """
    count = len(distances)
    centring = np.eye(count) - 1 / count
    gram = -0.5 * centring @ np.square(distances) @ centring
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    positive = np.clip(values[::-1], 0.0, None)
    axes = vectors[:, ::-1][:, :2] * np.sqrt(positive[:2])
    axes = np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))
    signs = np.sign(axes[np.abs(axes).argmax(0), np.arange(2)])
    total = float(positive.sum())
    return axes * np.where(signs == 0, 1.0, signs), float(positive[:2].sum() / total) if total > 0 else 1.0

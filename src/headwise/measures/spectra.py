"""Eigenvalues of many small symmetric matrices: LAPACK takes one at a time, so they are shared out among threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["singular_values"]


def singular_values(squares: Sequence[Tensor]) -> list[Tensor]:
    """Square roots of the eigenvalues of symmetric matrices, (n, D, D) each: (n, D) each, descending.

    What rounding made negative counts as 0. Values below about 1e-8 of the largest are lost in the squares.

    Example:
        >>> singular_values([torch.tensor([[[4.0, 0.0], [0.0, 9.0]]])])[0].tolist()
        [[3.0, 2.0]]
    """
    threads = min(torch.get_num_threads(), len(squares))
    if threads < 2:
        return [_roots(one) for one in squares]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_roots, squares))


def _roots(squares: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(squares.detach())
    return values.clamp(min=0).sqrt().flip(-1)

"""From the heads' z to the residual stream: concatenate and mix, or average.

``concat(z_1..z_h) W_O = sum_i z_i W_O^i`` (Vaswani et al. 2017, section 3.2.2), so each head has a term of
its own in the output. The averaged variant sends the mean of the z_i through one shared W_O.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headwise.nn.options import Combine

__all__ = ["mixed", "results"]


def mixed(z_BHQD: Tensor, W_O: Tensor, b_O: Tensor | None, combine: Combine, n_heads: int) -> Tensor:
    """The layer's output (B, Q, E). ``n_heads`` is the whole layer's, which the mean divides by."""
    z_BQD = z_BHQD.sum(dim=1) / n_heads if combine == "mean" else z_BHQD.transpose(1, 2).flatten(2)
    return functional.linear(z_BQD, W_O.t(), b_O)


def results(z_BHQD: Tensor, W_O: Tensor, combine: Combine, n_heads: int) -> Tensor:
    """Each head's term in the residual stream (B, H, Q, E); their sum is the output without b_O."""
    if combine == "mean":
        return functional.linear(z_BHQD / n_heads, W_O.t())
    W_HDE = W_O.view(z_BHQD.shape[1], z_BHQD.shape[3], -1)
    return torch.matmul(z_BHQD, W_HDE)

"""The norm of a head's term in the residual stream, without building the term.

``|z W_O|`` equals ``|z L|`` where ``W_O = L Q`` with orthonormal rows in Q, so one d_v x d_v
product per row replaces one of d_v x d_model (9 times less work in SmolLM2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.models import AttentionCall, output_weight

__all__ = ["ResultNorm"]


class ResultNorm:
    """Norms of ``z W_O`` per row, with each block's triangular factor made once."""

    def __init__(self) -> None:
        self._factors: dict[str, Tensor] = {}

    def of(self, call: AttentionCall) -> Tensor | str:
        """(B, H, Q) norms in float32, or the reason why the block has none."""
        block = call.block
        if block.o_path is None:
            return dict(block.unknown).get("o", "the projection after the heads is not understood")
        factor = self._factors.get(block.module)
        if factor is None:
            factor = self._factors[block.module] = _factor(output_weight(call.module, block)).to(call.z.device)
        norms: Tensor = torch.einsum("bhqd,hdr->bhqr", call.z.float(), factor).norm(dim=-1)
        return norms


def _factor(weight_HDE: Tensor) -> Tensor:
    """L (H, D, R) in float32 with ``|z L| = |z W_O|`` for every z; R is at most D."""
    upper: Tensor = torch.linalg.qr(weight_HDE.detach().double().cpu().transpose(1, 2), mode="r").R
    return upper.transpose(1, 2).float()

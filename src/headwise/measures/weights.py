"""The weights of a block by head: W_Q, W_K, W_V and W_O, whatever way the model stores them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from headwise.layout import Block, Projection
from headwise.models import output_weight

__all__ = ["HeadWeights"]


class HeadWeights:
    """The factors of a block's heads, in float64 on the CPU; or, for what is not known, the reason as a string.

    Args:
        module: the model in which the block was discovered.
        block: the block.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from headwise.models import discover
        >>> model = GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=31))
        >>> block = discover(model).blocks["h.0.attn"]
        >>> HeadWeights(model, block).q.shape  # (heads, d_model, d_k)
        torch.Size([2, 8, 4])
    """

    def __init__(self, module: nn.Module, block: Block) -> None:
        self._module, self.block = module, block

    @cached_property
    def q(self) -> Tensor | str:
        """W_Q of every query head, (H, E, D_k)."""
        return self._part("q")

    @cached_property
    def k(self) -> Tensor | str:
        """W_K of every key-value head, (G, E, D_k); ``block.kv_map`` says which one a query head reads."""
        return self._part("k")

    @cached_property
    def v(self) -> Tensor | str:
        """W_V of every key-value head, (G, E, D_v)."""
        return self._part("v")

    @cached_property
    def o(self) -> Tensor | str:
        """W_O of every query head, (H, D_v, E); absent where a gate stands before it: z W_O is not what it gives."""
        if self.block.o is None or "o" in dict(self.block.partial):
            return self._reason("o")
        return output_weight(self._module, self.block).detach().double().cpu()

    @cached_property
    def output_factor(self) -> Tensor | str:
        """L (H, D_v, R) in float32, R at most D_v, with ``|z L| = |z W_O|`` for every z: one small product per row."""
        if isinstance(self.o, str):
            return self.o
        return self._root(self.o.transpose(1, 2)).transpose(1, 2).float()

    @cached_property
    def qk_spectrum(self) -> Tensor | str:
        """Singular values of W_Q W_K^T of every query head, (H, min(D_k, E)), descending; from the factors alone."""
        return self._spectrum(self.q, self.k)

    @cached_property
    def ov_spectrum(self) -> Tensor | str:
        """Singular values of W_V W_O of every query head, (H, min(D_v, E)), descending; from the factors alone."""
        return self._spectrum(self.o if isinstance(self.o, str) else self.o.transpose(1, 2), self.v)

    def _spectrum(self, of_heads: Tensor | str, of_groups: Tensor | str) -> Tensor | str:
        """Singular values of a b^T, where a is of query heads and b of key-value heads, each (heads, E, D)."""
        if isinstance(of_heads, str):
            return of_heads
        if isinstance(of_groups, str):
            return of_groups
        left_HRD, right_HRD = self._root(of_heads), self._root(of_groups)[list(self.block.kv_map)]
        values: Tensor = torch.linalg.svdvals(left_HRD @ right_HRD.transpose(1, 2))
        return values

    def _root(self, factor_HED: Tensor) -> Tensor:
        """R (heads, D, D) with R^T R = a^T a for each factor a.

        By Cholesky, which is quicker than QR and whose error of 1e-8 of the largest singular value is far below what
        float32 or shorter weights resolve; by QR for float64 weights and for factors that do not have full rank.
        """
        if self.resolution >= torch.finfo(torch.float32).eps and factor_HED.shape[1] >= factor_HED.shape[2]:
            found = torch.linalg.cholesky_ex(factor_HED.transpose(1, 2) @ factor_HED)
            lower: Tensor = found.L
            if not bool(found.info.any()):
                return lower.transpose(1, 2)
        upper: Tensor = torch.linalg.qr(factor_HED, mode="r").R
        return upper

    @property
    def resolution(self) -> float:
        """The machine epsilon of the dtype in which the weights are stored."""
        known = [part for part in (self.block.q, self.block.k, self.block.v, self.block.o) if part is not None]
        kinds = [self._weight(part).dtype for part in known]
        return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)

    def _weight(self, projection: Projection) -> Tensor:
        weight = self._module.get_submodule(projection.parameter).weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    def _reason(self, part: str) -> str:
        names = {"q": "query", "k": "key", "v": "value", "o": "output"}
        reasons = {**dict(self.block.unknown), **dict(self.block.partial)}
        return reasons.get(part, f"the {names[part]} projection of the heads is not known")

    def _part(self, part: str) -> Tensor | str:
        projection: Projection | None = getattr(self.block, part)
        if projection is None or part in dict(self.block.partial):
            return self._reason(part)
        weight = self._weight(projection)
        if weight.ndim != 2 or not weight.is_floating_point():
            return f"{projection.parameter} has a weight of {weight.dtype} with {weight.ndim} axes"
        rows = weight.T if projection.transposed else weight
        return _rows_of(rows, self.block, projection, part).double().cpu().transpose(1, 2)


def _rows_of(rows_OE: Tensor, block: Block, projection: Projection, part: str) -> Tensor:
    """The rows of one part, (heads of that part, width, E)."""
    heads, groups, d_k, d_v = block.query_heads, block.kv_heads, block.d_k, block.d_v
    share = heads // groups
    count, width = {"q": (heads, d_k), "k": (groups, d_k), "v": (groups, d_v)}[part]
    arrangement = projection.arrangement
    if arrangement == "heads":
        return rows_OE.reshape(count, width, -1)
    if arrangement == "by head":
        return torch.stack([rows_OE[start : start + width] for start in projection.starts])
    if arrangement == "q|k|v":
        start = {"q": 0, "k": heads * d_k, "v": (heads + groups) * d_k}[part]
        return rows_OE[start : start + count * width].reshape(count, width, -1)
    per_group = rows_OE.reshape(groups, (share + 1) * d_k + d_v, -1)
    start = {"q": 0, "k": share * d_k, "v": (share + 1) * d_k}[part]
    return per_group[:, start : start + count * width // groups].reshape(count, width, -1)

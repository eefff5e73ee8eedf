"""The weights of a block by head: W_Q, W_K, W_V and W_O, whatever way the model stores them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from headwise.layout import Block, Projection
from headwise.measures.spectra import singular_values
from headwise.models import output_weight

__all__ = ["HeadWeights", "Product", "find_spectra"]

#: W_Q W_K^T or W_V W_O.
Product: TypeAlias = Literal["qk", "ov"]


class _Root(NamedTuple):
    """R of factors a with R^T R = a^T a; ``squared``: found from that square, which costs half of the digits."""

    root: Tensor
    squared: bool


class HeadWeights:
    """The factors of a block's heads, in float64 on the CPU; or, for what is not known, the reason as a string.

    Factors are made anew at each use and not kept: in float64 those of a whole model would take twice its own memory.

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
        self._spectra: dict[Product, Tensor | str] = {}

    @property
    def q(self) -> Tensor | str:
        """W_Q of every query head, (H, E, D_k)."""
        return self._part("q")

    @property
    def k(self) -> Tensor | str:
        """W_K of every key-value head, (G, E, D_k); ``block.kv_map`` says which one a query head reads."""
        return self._part("k")

    @property
    def v(self) -> Tensor | str:
        """W_V of every key-value head, (G, E, D_v)."""
        return self._part("v")

    @property
    def o(self) -> Tensor | str:
        """W_O of every query head, (H, D_v, E); absent where a gate stands before it: z W_O is not what it gives."""
        if self.block.o is None or "o" in dict(self.block.partial):
            return self._reason("o")
        return output_weight(self._module, self.block).detach().double().cpu()

    @cached_property
    def output_factor(self) -> Tensor | str:
        """L (H, D_v, R) in float32, R at most D_v, with ``|z L| = |z W_O|`` for every z: one small product per row."""
        found = self._output_root
        return found if isinstance(found, str) else found.root.transpose(1, 2).float()

    @cached_property
    def _output_root(self) -> _Root | str:
        o = self.o
        return o if isinstance(o, str) else self._root(o.transpose(1, 2))

    @property
    def qk_spectrum(self) -> Tensor | str:
        """Singular values of W_Q W_K^T of every query head, (H, min(D_k, E)), descending; from the factors alone."""
        return self._spectrum("qk")

    @property
    def ov_spectrum(self) -> Tensor | str:
        """Singular values of W_V W_O of every query head, (H, min(D_v, E)), descending; from the factors alone."""
        return self._spectrum("ov")

    def _spectrum(self, product: Product) -> Tensor | str:
        find_spectra([self], [product])
        return self._spectra[product]

    def _roots(self, product: Product) -> tuple[_Root, _Root] | str:
        """Roots of the factors a, of query heads, and b, of key-value heads, where the product is a b^T."""
        left, right = (self._output_root, self.v) if product == "ov" else (self.q, self.k)
        if isinstance(left, str):
            return left
        if isinstance(right, str):
            return right
        return (self._root(left) if isinstance(left, Tensor) else left), self._root(right)

    def _root(self, factor_HED: Tensor) -> _Root:
        """R (heads, D, D) with R^T R = a^T a for each factor a.

        By Cholesky, which is quicker than QR and whose error of 1e-8 of the largest singular value is far below what
        float32 or shorter weights resolve; by QR for float64 weights and for factors that do not have full rank.
        """
        if self.resolution >= torch.finfo(torch.float32).eps and factor_HED.shape[1] >= factor_HED.shape[2]:
            found = torch.linalg.cholesky_ex(factor_HED.transpose(1, 2) @ factor_HED)
            lower: Tensor = found.L
            if not bool(found.info.any()):
                return _Root(lower.transpose(1, 2), squared=True)
        upper: Tensor = torch.linalg.qr(factor_HED, mode="r").R
        return _Root(upper, squared=False)

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


def find_spectra(of: Iterable[HeadWeights], products: Collection[Product]) -> None:
    """Compute the spectra of these products of many blocks together, where they are not known yet.

    Singular values of a b^T are those of the small product of the factors' roots. Where both roots come from squares,
    the values are taken from a square as well, in half the time, and their error is of the order that the roots have.
    """
    waiting, squares = [], []
    for weights in of:
        for product in products:
            if product in weights._spectra:
                continue
            roots = weights._roots(product)
            if isinstance(roots, str):
                weights._spectra[product] = roots
                continue
            left, right = roots
            small_HRS = left.root @ right.root[list(weights.block.kv_map)].transpose(1, 2)
            if left.squared and right.squared:
                waiting.append((weights, product))
                squares.append(small_HRS @ small_HRS.transpose(1, 2))
            else:
                weights._spectra[product] = torch.linalg.svdvals(small_HRS)
    for (weights, product), values in zip(waiting, singular_values(squares), strict=True):
        weights._spectra[product] = values


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

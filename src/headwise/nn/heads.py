"""One head of a layer: its slices of the whole matrices, in the same storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from headwise.errors import InputError

if TYPE_CHECKING:
    from headwise.nn.attention import MultiHeadAttention

__all__ = ["HeadView", "HeadViews"]


@dataclass(frozen=True)
class HeadView:
    """The weights of one head, each a view: writing into it changes the layer, and the reverse.

    A view of a parameter keeps its gradient history, so write under ``torch.no_grad()``:
    ``layer.heads[1].W_Q.zero_()``.

    Attributes:
        layer: the layer that owns the storage.
        index: the query head, 0 to H - 1.
    """

    layer: MultiHeadAttention
    index: int

    @property
    def kv_head(self) -> int:
        """The key-value head that this query head reads."""
        return self.index // (self.layer.n_heads // self.layer.n_kv_heads)

    def _columns(self, name: str, head: int, width: int) -> Tensor | None:
        whole: Tensor | None = self.layer.local(name)
        head -= self.layer.first_local(name)
        return None if whole is None else whole.narrow(-1, head * width, width)

    def _matrix(self, name: str, head: int, width: int) -> Tensor:
        matrix = self._columns(name, head, width)
        assert matrix is not None
        return matrix

    @property
    def W_Q(self) -> Tensor:  # noqa: N802
        """(d_model, d_k): ``q_i = x W_Q^i``."""
        return self._matrix("W_Q", self.index, self.layer.d_k)

    @property
    def W_K(self) -> Tensor:  # noqa: N802
        """(d_context, d_k), shared by the query heads of the group."""
        return self._matrix("W_K", self.kv_head, self.layer.d_k)

    @property
    def W_V(self) -> Tensor:  # noqa: N802
        """(d_context, d_v), shared by the query heads of the group."""
        return self._matrix("W_V", self.kv_head, self.layer.d_v)

    @property
    def W_O(self) -> Tensor:  # noqa: N802
        """(d_v, d_model): the head's term is ``z_i W_O^i``. With ``combine="mean"`` all heads share one W_O."""
        whole = self.layer.local("W_O")
        assert whole is not None
        if self.layer.combine == "mean":
            return whole
        return whole.narrow(0, (self.index - self.layer.first_local("W_O")) * self.layer.d_v, self.layer.d_v)

    @property
    def b_Q(self) -> Tensor | None:  # noqa: N802
        """(d_k,), or None without bias."""
        return self._columns("b_Q", self.index, self.layer.d_k)

    @property
    def b_K(self) -> Tensor | None:  # noqa: N802
        """(d_k,), or None without bias."""
        return self._columns("b_K", self.kv_head, self.layer.d_k)

    @property
    def b_V(self) -> Tensor | None:  # noqa: N802
        """(d_v,), or None without bias."""
        return self._columns("b_V", self.kv_head, self.layer.d_v)

    def __repr__(self) -> str:
        return f"HeadView(head {self.index} of {self.layer.n_heads}, key-value head {self.kv_head})"


@dataclass(frozen=True)
class HeadViews:
    """``layer.heads``: indexable, iterable, as long as the layer has query heads."""

    layer: MultiHeadAttention

    def __len__(self) -> int:
        return self.layer.n_heads

    def __getitem__(self, index: int) -> HeadView:
        held = self.layer.local_heads
        if not -len(self) <= index < len(self):
            raise InputError(f"The layer has heads 0 to {len(self) - 1}, but head {index} was asked for.")
        index %= len(self)
        if index not in held:
            raise InputError(
                f"Head {index} is held by another rank; this one holds heads {held.start} to {held.stop - 1}."
            )
        return HeadView(self.layer, index)

    def __iter__(self) -> Iterator[HeadView]:
        return (self[i] for i in self.layer.local_heads)

"""The layer: project, split into heads, score, softmax per head, mix, and add up in the residual stream.

Source: Vaswani et al. (2017), Attention Is All You Need, sections 3.2.1 and 3.2.2; grouped heads: Ainslie et al.
(2023), GQA.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.errors import InputError
from headwise.nn import combine as combining
from headwise.nn.cache import KVCache
from headwise.nn.checks import Call, check, check_context, check_x
from headwise.nn.core import attend
from headwise.nn.heads import HeadViews
from headwise.nn.options import resolve
from headwise.nn.rotary import Rotary, as_rotary

if TYPE_CHECKING:
    from headwise.nn.parallel import HeadShard

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention, self or cross, whose heads stay in sight.

    The matrices are stored whole and in the orientation of the formulas: ``x @ W_Q`` holds the queries of all
    heads side by side. ``layer.heads[i].W_Q`` and so on are views of the same storage. Masks: True = may attend;
    a float mask is added; a query that may see nothing gets 0 from its heads.

    Args:
        d_model: width of the residual stream.
        n_heads: query heads, H.
        n_kv_heads: key-value heads, G, a divisor of H (1: multi-query); None for H. Query head h reads KV head
            ``h // (H // G)``.
        d_k: width of a head's queries and keys; None for ``d_model / n_heads``.
        d_v: width of a head's values; None for d_k.
        d_context: width of what keys and values are made from, for a layer that is always given a context;
            None for self-attention (a context of width d_model may still be given).
        bias: b_Q, b_K, b_V, b_O beside the matrices.
        dropout: probability of dropping a weight after the softmax, in training only.
        rotary: None, True (base 10000), a base, or a :class:`Rotary`.
        window: a query sees itself and ``window - 1`` earlier keys if causal, else keys with ``|i - j| < window``.
        softcap: c gives scores ``c * tanh(score / c)``.
        scale: factor on q.k; None for ``d_k ** -0.5`` (summed: ``(H d_k) ** -0.5``).
        qk_norm: RMS norm of each head's queries and keys, before rotary, with weights shared by the heads.
        sinks: a learned logit per head that takes mass and gives no value.
        combine: "concat" (z_1..z_H side by side, through W_O) or "mean" (their mean, through one shared
            d_v x d_model W_O).
        softmax: "per_head", or "summed": one softmax over the sum of all heads' scores, which is one wide head.
        device, dtype: of the weights.

    Attributes:
        W_Q: (d_model, H d_k). W_K: (d_context, G d_k). W_V: (d_context, G d_v). W_O: (H d_v, d_model).

    Raises:
        InputError: sizes that do not fit, or options that contradict each other, at construction.

    Example:
        >>> layer = MultiHeadAttention(d_model=8, n_heads=2)
        >>> x = torch.randn(1, 3, 8)
        >>> out, rows = layer(x, causal=True, rows=True)
        >>> tuple(out.shape), tuple(rows.entropy.shape)
        ((1, 3, 8), (1, 2, 3))
        >>> torch.allclose(layer.results(x, causal=True).sum(dim=1), out, atol=1e-6)
        True
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_O: Tensor | None  # noqa: N815
    sinks: Tensor | None

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        d_context: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        rotary: Rotary | float | bool | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        sinks: bool = False,
        combine: str = "concat",
        softmax: str = "per_head",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer with fresh weights; the class says what each argument means and refuses."""
        super().__init__()
        turned = rotary is not None and rotary is not False
        o = resolve(
            d_model, n_heads, n_kv_heads=n_kv_heads, d_k=d_k, d_v=d_v, d_context=d_context, bias=bias, dropout=dropout,
            rotary=turned, window=window, softcap=softcap, scale=scale, qk_norm=qk_norm, sinks=sinks, combine=combine,
            softmax=softmax,
        )  # fmt: skip
        self.d_model, self.n_heads, self.n_kv_heads, self.d_k, self.d_v = d_model, n_heads, o.n_kv_heads, o.d_k, o.d_v
        self.d_context, self.cross, self.dropout, self.window = o.d_context, o.cross, o.dropout, o.window
        self.softcap, self.scale, self.qk_norm = o.softcap, o.scale, o.qk_norm
        self.combine, self.softmax = o.combine, o.softmax
        self.eps = 1e-6
        self._shard: HeadShard | None = None
        queries, keys, values = n_heads * o.d_k, o.n_kv_heads * o.d_k, o.n_kv_heads * o.d_v
        mixed = o.d_v if o.combine == "mean" else n_heads * o.d_v
        shapes: dict[str, tuple[int, ...] | None] = {
            "W_Q": (d_model, queries), "W_K": (o.d_context, keys),
            "W_V": (o.d_context, values), "W_O": (mixed, d_model),
            "b_Q": (queries,) if bias else None, "b_K": (keys,) if bias else None,
            "b_V": (values,) if bias else None, "b_O": (d_model,) if bias else None,
            "norm_Q": (o.d_k,) if qk_norm else None, "norm_K": (o.d_k,) if qk_norm else None,
            "sinks": (n_heads,) if sinks else None,
        }  # fmt: skip
        for name, shape in shapes.items():
            empty = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, empty)
        self.rotary = as_rotary(rotary, o.d_k, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices (fans of the whole matrix), biases and sinks 0, norms 1."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("W_"):
                nn.init.xavier_uniform_(parameter)
            elif name.startswith("norm_"):
                nn.init.ones_(parameter)
            else:
                nn.init.zeros_(parameter)

    @property
    def heads(self) -> HeadViews:
        """The heads' own slices of the weights: ``layer.heads[i].W_Q``, ``.W_K``, ``.W_V``, ``.W_O``, ``.b_Q`` ..."""
        return HeadViews(self)

    # Weights that this process holds (all of them, unless the heads are split over ranks)

    @property
    def local_heads(self) -> range:
        """The query heads whose weights this process holds."""
        return range(self.n_heads) if self._shard is None else self._shard.heads(self.n_heads)

    def local(self, name: str) -> Tensor | None:
        """A parameter as a plain tensor: this process's part of it."""
        parameter: Tensor | None = getattr(self, name)
        return parameter if parameter is None or self._shard is None else self._shard.local(parameter)

    def first_local(self, name: str) -> int:
        """The head that the first columns of ``local(name)`` belong to."""
        if self._shard is None:
            return 0
        return self._shard.heads(self.n_kv_heads if name in ("W_K", "W_V", "b_K", "b_V") else self.n_heads).start

    # The computation

    def forward(
        self,
        x: Tensor,
        context: Tensor | KVCache | None = None,
        *,
        causal: bool | None = None,
        mask: Tensor | None = None,
        key_padding: Tensor | None = None,
        bias: Tensor | None = None,
        gates: Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: KVCache | None = None,
        update: bool | None = None,
        rows: bool = False,
        weights: bool = False,
        backend: str | None = None,
    ) -> Any:
        """Attend.

        Args:
            x: (B, Q, d_model), what queries are made from, and keys and values without a context.
            context: (B, K, d_context), or what :meth:`encode_context` made of it.
            causal: the last query sees the last key, each earlier query one key less. None: True with a cache.
            mask: bool, True = may attend, or float, added; (Q, K) or (B or 1, H or 1, Q or 1, K). With a cache K
                counts every token of the sequence.
            key_padding: bool, True = a real token: (B, K) of the context, or (B, Q) of x.
            bias: float, added to the scores; shapes as mask.
            gates: factors on the heads' z, (H,) or (B, H): 0 switches a head off.
            positions: int, (Q,) or (B, Q), for rotary. None counts the real tokens of each row.
            context_positions: the same for the keys of a context.
            cache: keys and values of earlier tokens of the same sequence.
            update: with a cache, True writes this call's keys into it, in place; False leaves it as it is (and
                copies what it reads). It must be said. Nothing is differentiated through cached keys.
            rows: also return the row statistics, each (B, H, Q); H is 1 with a summed softmax.
            weights: also return the weights (B, H, Q, K), per head, before dropout.
            backend: the attention backend; None chooses.

        Returns:
            (B, Q, d_model), then rows, then weights, as far as asked for, in a tuple.

        Raises:
            InputError: an argument or a combination of arguments that means nothing.
            ShapeError: a tensor whose shape, dtype or device does not fit.
        """
        call = Call(
            causal, mask, key_padding, bias, gates, positions, context_positions, cache, update, rows, weights, backend
        )
        check(self, x, context, call)
        z, stats, pattern = attend(self, *self._entered(x, context, call))
        if self._shard is not None:
            stats, pattern = self._shard.gather_rows(stats), self._shard.gather(pattern)
        out = self._mixed(z)
        if not (rows or weights):
            return out
        return (out, *((stats,) if rows else ()), *((pattern,) if weights else ()))

    def results(self, x: Tensor, context: Tensor | KVCache | None = None, **options: Any) -> Tensor:
        """Each head's term in the residual stream, (B, H, Q, d_model).

        Their sum over heads is the layer's output, less b_O where there is one, which belongs to no head.
        Takes what :meth:`forward` takes, except rows and weights.
        """
        call = Call(**options)
        if call.rows or call.weights:
            raise InputError("results gives the heads' terms alone; ask the layer itself for rows or weights.")
        check(self, x, context, call)
        z, _, _ = attend(self, *self._entered(x, context, call))
        W_O = self.local("W_O")
        assert W_O is not None
        terms = combining.results(z, W_O, self.combine, self.n_heads)
        return terms if self._shard is None else self._shard.gather(terms)

    def project(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, Q, d_k), keys (B, G, K, d_k) and values (B, G, K, d_v) as they are scored.

        With a summed softmax there is one wide head of width H d_k. Positions count from 0 unless given.
        """
        check_x(self, x)
        if context is not None:
            check_context(self, context)
        source = x if context is None else context
        key_positions = positions if context is None else context_positions
        queries, keys = self._split("Q", x), self._split("K", source)
        return self._turned(queries, positions), self._turned(keys, key_positions), self._split("V", source)

    def queries(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The queries of :meth:`project` alone, (B, H, Q, d_k)."""
        check_x(self, x)
        return self._turned(self._split("Q", x), positions)

    def new_cache(
        self, batch: int, max_length: int | None = None, *, spare: int = 0, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache that fits this layer: a ring if the layer has a window.

        Args:
            batch: rows.
            max_length: tokens that a row may grow to; may be None with a window.
            spare: keys that a ring keeps beyond the window, so that as many tokens can be cropped.
            dtype: None for that of the weights; under autocast give the autocast dtype.
        """
        heads, d_k, d_v = self._kept()
        return KVCache(
            batch, max_length, n_kv_heads=heads, d_k=d_k, d_v=d_v, window=self.window, spare=spare,
            dtype=dtype or self.W_K.dtype, device=self.W_K.device,
        )  # fmt: skip

    @torch.no_grad()
    def encode_context(
        self, context: Tensor, key_padding: Tensor | None = None, *, context_positions: Tensor | None = None
    ) -> KVCache:
        """Keys and values of a context, made once, to be given as ``context`` at every decoding step.

        Nothing is differentiated through them; give the context itself in training.
        """
        check_context(self, context)
        k, v = self._turned(self._split("K", context), context_positions), self._split("V", context)
        heads, d_k, d_v = self._kept()
        batch, tokens = context.shape[:2]
        memory = KVCache(batch, tokens, n_kv_heads=heads, d_k=d_k, d_v=d_v, dtype=k.dtype, device=k.device)
        memory.append(k, v, key_padding)
        return memory

    def _entered(self, x: Tensor, context: Tensor | KVCache | None, call: Call) -> Any:
        """The inputs as this rank's heads take them: unchanged unless the heads are split over ranks."""
        shard = self._shard
        if shard is None:
            return x, context, call
        floats = ((name, getattr(call, name)) for name in ("gates", "mask", "bias"))
        entered: dict[str, Any] = {n: shard.enter(t) for n, t in floats if t is not None and t.is_floating_point()}
        return (
            shard.enter(x),
            shard.enter(context) if isinstance(context, Tensor) else context,
            replace(call, **entered),
        )

    def _kept(self) -> tuple[int, int, int]:
        """Heads and widths of the keys and values of this process: one wide head with a summed softmax."""
        if self.softmax == "summed":
            return 1, self.n_heads * self.d_k, self.n_heads * self.d_v
        return self.n_kv_heads if self._shard is None else len(self._shard.heads(self.n_kv_heads)), self.d_k, self.d_v

    def _split(self, what: str, x: Tensor) -> Tensor:
        """Project by W_Q, W_K or W_V and split into heads: one product and a view, (B, heads, tokens, width)."""
        W = self.local(f"W_{what}")
        assert W is not None
        _, d_k, d_v = self._kept()
        width = d_v if what == "V" else d_k
        projected = functional.linear(x, W.t(), self.local(f"b_{what}"))
        heads = torch.unflatten(projected, -1, (W.shape[1] // width, width)).transpose(1, 2)
        if self.qk_norm and what != "V":
            norm = self.local(f"norm_{what}")
            assert norm is not None
            heads = functional.rms_norm(heads, (width,), norm.to(heads.dtype), self.eps).to(heads.dtype)
        return heads

    def _turned(self, heads: Tensor, positions: Tensor | None) -> Tensor:
        if self.rotary is None:
            return heads
        if positions is None:
            positions = torch.arange(heads.shape[2], device=heads.device)
        turned: Tensor = self.rotary(heads, positions)
        return turned

    def _mixed(self, z: Tensor) -> Tensor:
        W_O, b_O = self.local("W_O"), self.local("b_O")
        assert W_O is not None
        if self._shard is None:
            return combining.mixed(z, W_O, b_O, self.combine, self.n_heads)
        out = self._shard.leave(combining.mixed(z, W_O, None, self.combine, self.n_heads))
        return out if b_O is None else out + b_O

    # Interchange

    @staticmethod
    def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
        """See :func:`headwise.nn.from_torch`."""
        from headwise.nn.interchange import from_torch

        return from_torch(module)

    def to_torch(self) -> nn.MultiheadAttention:
        """See :func:`headwise.nn.to_torch`."""
        from headwise.nn.interchange import to_torch

        return to_torch(self)

    @staticmethod
    def from_transformers(module: nn.Module) -> MultiHeadAttention:
        """See :func:`headwise.nn.from_transformers`."""
        from headwise.nn.transformers_modules import from_transformers

        return from_transformers(module)

    def to_transformers(self, like: Any) -> nn.Module:
        """See :func:`headwise.nn.to_transformers`."""
        from headwise.nn.transformers_modules import to_transformers

        return to_transformers(self, like)

    def extra_repr(self) -> str:
        """One line for ``print(layer)``: the sizes, and what differs from the plain layer."""
        names = ("d_model", "n_heads", "n_kv_heads", "d_k", "d_v")
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        special = {
            "d_context": self.d_context if self.cross else None, "bias": True if self.b_O is not None else None,
            "dropout": self.dropout or None, "window": self.window, "softcap": self.softcap,
            "qk_norm": self.qk_norm or None, "sinks": True if self.sinks is not None else None,
            "combine": None if self.combine == "concat" else self.combine,
            "softmax": None if self.softmax == "per_head" else self.softmax,
        }  # fmt: skip
        return ", ".join([sizes, *(f"{name}={value!r}" for name, value in special.items() if value is not None)])

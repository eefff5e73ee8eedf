"""Keys and values of what was read before, in memory that is set aside once.

Transformers' dynamic cache concatenates at every step, which copies the whole cache for one token. Here a step
writes one column and reads a view. What is not written is never read, so the memory is not even cleared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError

__all__ = ["KVCache", "Seen"]


@dataclass(frozen=True)
class Seen:
    """What the queries of one call may look at: cached keys followed by new ones.

    Attributes:
        k, v: (B, G, K, D); a view of the cache wherever possible.
        key_padding: (B, K) bool, True = a real key; None where all are real.
        first: position of column 0 in the sequence, when ``ordered``.
        ordered: False when the columns are in the order of the ring.
        length: keys in the sequence after this call, those that a ring has dropped included.
        new: how many of them are new.
        written: True when the new keys are in the cache's memory already.
    """

    k: Tensor
    v: Tensor
    key_padding: Tensor | None
    first: int
    ordered: bool
    length: int
    new: int
    written: bool


class KVCache:
    """Key-value cache of one attention layer: G heads (not H), preallocated, rotated keys.

    Nothing changes the cache but :meth:`append`, :meth:`crop`, :meth:`reset` and a call of a layer with
    ``update=True``. With a window it is a ring that keeps the last ``window + spare`` keys of a sequence of
    any length. One cache serves one layer; keep a list of them for a model.

    Args:
        batch: rows, B.
        max_length: tokens that a row may grow to; None (no limit) needs a window.
        n_kv_heads: key-value heads, G.
        d_k: width of a key.
        d_v: width of a value; None for d_k.
        window: keys that a query sees, itself included; None keeps all.
        spare: further keys that a ring keeps, so that up to ``spare`` tokens can be cropped again.
        dtype: of keys and values; None for torch's default.
        device: where they live.

    Attributes:
        length: tokens read so far, padding included.
        keys: (B, G, slots, d_k), of which only what was written means anything.
        values: (B, G, slots, d_v).

    Raises:
        InputError: a size below 1, or neither ``max_length`` nor ``window``.

    Example:
        >>> cache = KVCache(1, 8, n_kv_heads=2, d_k=4)
        >>> cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        >>> cache.length, cache.nbytes
        (3, 512)
        >>> cache.crop(5).length, cache.crop(drop=5).length
        (3, 0)
    """

    def __init__(
        self,
        batch: int,
        max_length: int | None = None,
        *,
        n_kv_heads: int,
        d_k: int,
        d_v: int | None = None,
        window: int | None = None,
        spare: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        d_v = d_k if d_v is None else d_v
        sizes = {"batch": batch, "n_kv_heads": n_kv_heads, "d_k": d_k, "d_v": d_v}
        sizes |= {n: s for n, s in (("max_length", max_length), ("window", window)) if s is not None}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"{name} must be a whole number of at least 1, but {size!r} was given.")
        if isinstance(spare, bool) or not isinstance(spare, int) or spare < 0:
            raise InputError(f"spare must be a whole number of at least 0, but {spare!r} was given.")
        if max_length is None and window is None:
            raise InputError("max_length is needed when there is no window: without either the memory has no bound.")
        self.batch, self.max_length, self.window, self.spare = batch, max_length, window, spare
        self.n_kv_heads, self.d_k, self.d_v = n_kv_heads, d_k, d_v
        bounds = [n for n in (max_length, None if window is None else window + spare) if n is not None]
        with torch.inference_mode(mode=False):
            self.keys = torch.empty(batch, n_kv_heads, min(bounds), d_k, dtype=dtype, device=device)
            self.values = torch.empty(batch, n_kv_heads, min(bounds), d_v, dtype=dtype, device=device)
        self.length = 0
        self._oldest = 0  # first position that a ring has not overwritten
        self._real: Tensor | None = None  # (B, slots) bool: real keys; None while no padding was ever written
        self._pads: Tensor | None = None  # (B,) int64: padding read so far

    @property
    def slots(self) -> int:
        """Keys that the memory holds."""
        return self.keys.shape[2]

    @property
    def ring(self) -> bool:
        """True when old keys are overwritten."""
        return self.window is not None and self.slots == self.window + self.spare

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values live."""
        return self.keys.device

    @property
    def nbytes(self) -> int:
        """Bytes set aside: keys and values, and a bool per key once there was padding."""
        held = (self.keys, self.values, *(t for t in (self._real, self._pads) if t is not None))
        return sum(t.numel() * t.element_size() for t in held)

    @property
    def real_tokens(self) -> int | Tensor:
        """Tokens read so far without padding: the position of the next one. A number, or (B,) after padding."""
        return self.length if self._pads is None else self.length - self._pads

    def __repr__(self) -> str:
        kept = f"ring of {self.slots}" if self.ring else f"{self.slots} slots"
        return (
            f"KVCache(length={self.length}, {kept}, batch={self.batch}, n_kv_heads={self.n_kv_heads}, "
            f"d_k={self.d_k}, d_v={self.d_v}, {self.dtype}, {self.nbytes} bytes)"
        )

    # Changing it

    def append(self, k: Tensor, v: Tensor, key_padding: Tensor | None = None) -> None:
        """Write keys (B, G, n, d_k) and values (B, G, n, d_v) behind the last ones, in place.

        Raises:
            ShapeError: a shape, dtype or device that is not the cache's.
            InputError: more tokens than ``max_length``. The cache is as before.
        """
        self.commit(self.join(k, v, key_padding, write=True), k, v, key_padding)

    def reset(self) -> KVCache:
        """Forget everything, keep the memory."""
        self.length, self._oldest, self._real, self._pads = 0, 0, None, None
        return self

    def crop(self, keep: int | None = None, *, drop: int | None = None) -> KVCache:
        """Keep the first ``keep`` tokens, or drop the last ``drop``, in place.

        More than there is means all of it: ``crop(5)`` of 3 keeps 3, ``crop(drop=5)`` of 3 keeps none.

        Raises:
            InputError: both or neither given, no whole number, a negative one, or keys that the ring has overwritten.
        """
        if (keep is None) == (drop is None):
            raise InputError("crop takes keep (tokens to keep from the start) or drop (tokens to drop at the end).")
        asked = keep if keep is not None else drop
        assert asked is not None
        if isinstance(asked, bool) or not isinstance(asked, int):
            name = "keep" if keep is not None else "drop"
            raise InputError(f"{name} must be a whole number of tokens, but {asked!r} was given.")
        if asked < 0:
            raise InputError(
                f"crop takes a number of at least 0, but {asked} was given. Use drop={-asked} to drop the end."
            )
        length = min(asked, self.length) if keep is not None else max(self.length - asked, 0)
        needed = 0 if self.window is None else max(length - self.window + 1, 0)
        if 0 < length < self.length and needed < self._oldest:
            raise InputError(
                f"The ring cannot be cropped to {length} of {self.length} tokens: a window of {self.window} needs keys "
                f"that were overwritten. Make the cache with spare={self.length - length} or more, or reset it."
            )
        if self._pads is not None:
            if self.ring:
                self._pads = self._pads.clamp(max=length)
            else:
                assert self._real is not None
                self._pads = length - self._real[:, :length].sum(dim=1)
        self.length = length
        return self if length else self.reset()

    # Copies

    def clone(self) -> KVCache:
        """An independent copy with the same content."""
        return self.select(None)

    def select(self, rows: Tensor | None) -> KVCache:
        """A new cache with these rows (int64, repeats allowed), as beam search needs; None for all.

        Raises:
            InputError: a row that is not there.
        """
        if rows is not None:
            if rows.ndim != 1 or rows.dtype not in (torch.int32, torch.int64) or rows.numel() == 0:
                raise InputError(
                    f"rows must be one axis of row numbers (int64), but {rows.dtype} {tuple(rows.shape)} was given."
                )
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high >= self.batch:
                wrong = low if low < 0 else high
                raise InputError(f"rows must be between 0 and {self.batch - 1}, but {wrong} was given.")
            rows = rows.to(self.device)
        other = KVCache.__new__(KVCache)
        other.__dict__.update(self.__dict__)
        with torch.inference_mode(mode=False):
            for name in ("keys", "values", "_real", "_pads"):
                held: Tensor | None = getattr(self, name)
                if held is not None:
                    setattr(other, name, held.clone() if rows is None else held.index_select(0, rows))
        other.batch = other.keys.shape[0]
        return other

    def view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys, values and padding (True = real, None: all) that are held, in the order of the sequence.

        Views of the memory, except of a ring that has turned, which is copied.
        """
        start = self._oldest
        real = None if self._real is None else self._read(self._real, start, self.length, 1)
        return self._read(self.keys, start, self.length), self._read(self.values, start, self.length), real

    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        copied = self.clone()
        memo[id(self)] = copied
        return copied

    # What the layer uses

    def join(
        self,
        k: Tensor,
        v: Tensor,
        key_padding: Tensor | None = None,
        *,
        write: bool,
        ordered: bool = False,
        window: int | None = None,
    ) -> Seen:
        """The cached keys followed by the new ones. With ``write`` the memory behind ``length`` may be written.

        Nothing that is held changes before :meth:`commit`. ``window`` is the reader's: older keys are left out.
        """
        self._check(k, v, key_padding)
        new = k.shape[2]
        length = self.length + new
        if write and self.max_length is not None and length > self.max_length:
            raise InputError(
                f"The cache holds {self.length} of at most {self.max_length} tokens, and {new} more do not fit. Make "
                f"it with a larger max_length, or crop or reset it."
            )
        tracked = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
        real = self._joined_padding(key_padding, new)
        turns = length > self.slots  # the new keys would overwrite old ones, or do not fit
        if write and not tracked and not turns:
            self._write(k, v)
            # A ring that was cropped starts behind what it had overwritten.
            first = self._oldest if window is None else max(length - new - window + 1, self._oldest)
            k, v = self.keys[:, :, first:length], self.values[:, :, first:length]
            real = None if real is None else real[:, real.shape[1] - k.shape[2] :]
            return Seen(k, v, real, first, True, length, new, written=True)
        if write and not tracked and new == 1 and not ordered:
            self._write(k, v)
            return Seen(self.keys, self.values, self._turned(real, length, window), 0, False, length, 1, written=True)
        first = self._first(window)
        k = torch.cat((self._read(self.keys, first, self.length), k), dim=2)
        v = torch.cat((self._read(self.values, first, self.length), v), dim=2)
        real = None if real is None else real[:, real.shape[1] - k.shape[2] :]
        return Seen(k, v, real, first, True, length, new, written=False)

    def commit(self, seen: Seen, k: Tensor, v: Tensor, key_padding: Tensor | None) -> None:
        """Make the new keys of ``seen`` part of the cache."""
        if not seen.written:
            self._write(k.detach(), v.detach())
        if key_padding is not None or self._real is not None:
            if self._real is None or self._pads is None:
                with torch.inference_mode(mode=False):
                    self._real = torch.ones(self.batch, self.slots, dtype=torch.bool, device=self.device)
                    self._pads = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
            if key_padding is None:
                key_padding = torch.ones(self.batch, seen.new, dtype=torch.bool, device=self.device)
            self._store(self._real, key_padding, self.length, 1)
            self._pads = self._pads + (seen.new - key_padding.sum(dim=1))
        self.length = seen.length

    def _turned(self, real: Tensor | None, length: int, window: int | None) -> Tensor | None:
        """Which slots of a full ring the newest query may see, in the order of the slots; None for all."""
        if real is not None:
            missing = self.slots - real.shape[1]  # positions that were cropped away
            real = torch.nn.functional.pad(real, (max(missing, 0), 0), value=False)[:, -self.slots :]
            real = real.roll(length % self.slots, dims=1)
        reach = min(w for w in (window, self.window, self.slots) if w is not None)
        if reach == self.slots:
            return real
        age = (length - 1 - torch.arange(self.slots, device=self.device)) % self.slots
        near = (age < reach).expand(self.batch, self.slots)
        return near if real is None else near & real

    def _first(self, window: int | None) -> int:
        """The oldest position that the first new query may see, as far as it is held."""
        windows = [w for w in (window, self.window if self.ring else None) if w is not None]
        return max(self._oldest, self.length - min(windows) + 1) if windows else self._oldest

    def _joined_padding(self, key_padding: Tensor | None, new: int) -> Tensor | None:
        """Padding of the held keys and the new ones, in the order of the sequence; None where all are real."""
        if key_padding is None and self._real is None:
            return None
        if self._real is None:
            old = torch.ones(self.batch, self.length - self._oldest, dtype=torch.bool, device=self.device)
        else:
            old = self._read(self._real, self._oldest, self.length, 1)
        if key_padding is None:
            key_padding = torch.ones(self.batch, new, dtype=torch.bool, device=self.device)
        return torch.cat((old, key_padding), dim=1)

    def _read(self, memory: Tensor, start: int, stop: int, dim: int = 2) -> Tensor:
        """Positions ``start`` to ``stop`` in order: a view, or a copy where the ring wraps."""
        slots = memory.shape[dim]
        if start >= stop:
            return memory.narrow(dim, 0, 0)
        low, high = start % slots, (stop - 1) % slots + 1
        if low < high:
            return memory.narrow(dim, low, high - low)
        return torch.cat((memory.narrow(dim, low, slots - low), memory.narrow(dim, 0, high)), dim=dim)

    def _write(self, k: Tensor, v: Tensor) -> None:
        self._store(self.keys, k, self.length)
        self._store(self.values, v, self.length)

    def _store(self, memory: Tensor, new: Tensor, position: int, dim: int = 2) -> None:
        """Write ``new`` at ``position`` and after, of which a ring keeps the last ones."""
        slots, count = memory.shape[dim], new.shape[dim]
        if count > slots:
            position, new, count = position + count - slots, new.narrow(dim, count - slots, slots), slots
        self._oldest = max(self._oldest, position + count - slots)
        low = position % slots
        fits = min(count, slots - low)
        with torch.no_grad():
            memory.narrow(dim, low, fits).copy_(new.narrow(dim, 0, fits))
            if fits < count:
                memory.narrow(dim, 0, count - fits).copy_(new.narrow(dim, fits, count - fits))

    def _check(self, k: Tensor, v: Tensor, key_padding: Tensor | None) -> None:
        for name, new, width in (("keys", k, self.d_k), ("values", v, self.d_v)):
            want = (self.batch, self.n_kv_heads, k.shape[2] if k.ndim == 4 else "n", width)
            if tuple(new.shape) != want:
                shape = ", ".join(map(str, want))
                raise ShapeError(
                    f"The cache takes {name} of shape ({shape}) (batch, key-value heads, tokens, width), but "
                    f"{tuple(new.shape)} came. Make the cache with the layer's new_cache(batch, max_length)."
                )
            if new.dtype != self.dtype or new.device != self.device:
                raise ShapeError(
                    f"The cache is {self.dtype} on {self.device}, but the new {name} are {new.dtype} on {new.device}. "
                    f"Make the cache with dtype={new.dtype}, device={str(new.device)!r}."
                )
        if key_padding is None:
            return
        if key_padding.dtype != torch.bool or tuple(key_padding.shape) != (self.batch, k.shape[2]):
            raise ShapeError(
                f"key_padding must be bool (batch, new tokens) = ({self.batch}, {k.shape[2]}) with True for a real "
                f"token, but it is {key_padding.dtype} {tuple(key_padding.shape)}."
            )
        if self.window is not None and not torch.compiler.is_compiling():
            read = torch.as_tensor(self.real_tokens, device=self.device)
            started = (read > 0).reshape(-1, 1).expand(self.batch, 1)
            row = torch.cat((started, key_padding), dim=1)
            if bool((row[:, :-1] & ~row[:, 1:]).any()):
                raise InputError(
                    "A cache with a window takes padding on the left only, but here padding follows a real token: the "
                    "window counts columns, and would count padding. Pad on the left."
                )

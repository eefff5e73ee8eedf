"""Monotonic alignment for cross-attention: the query at a share of its text looks at the same share of the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InputError, UnsupportedError
from headwise.measures.roles.links import Groups, Ints, Pairs, ragged
from headwise.measures.roles.role import Role
from headwise.measures.roles.tokens import Tokens

__all__ = ["monotonic"]

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class _Monotonic:
    tolerance: float
    ahead: int
    spans: Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]] | None

    def __call__(self, tokens: Tokens) -> Groups | Pairs:
        assert tokens.keys is not None
        first, stop = self._span(tokens)
        text = _text_positions(tokens)
        kept = text >= self.ahead
        if kept.sum() < 2 or stop - first < 2:
            return Pairs.of([], [])
        queries = text[kept] - self.ahead
        middle = first + _progress(tokens, text)[kept] * (stop - first)
        reach = max(0.5, self.tolerance * (stop - first))
        low = np.clip(np.ceil(middle - reach - 0.5), first, stop - 1).astype(np.int64)
        high = np.clip(np.floor(middle + reach - 0.5), first, stop - 1).astype(np.int64)
        return Groups(
            queries=[(int(one),) for one in queries],
            places=np.full(len(queries), -1, np.int64),
            targets=ragged([range(a, max(a, b) + 1) for a, b in zip(low, high, strict=True)]),
            renormalised=False,
        )

    def _span(self, tokens: Tokens) -> tuple[int, int]:
        """The keys that hold what is aligned, ``[first, stop)``."""
        assert tokens.keys is not None
        if self.spans is None:
            keys = _text_positions(tokens.keys)
            return (int(keys[0]), int(keys[-1]) + 1) if len(keys) else (0, 0)
        try:
            first, stop = self.spans[tokens.passage]
        except (KeyError, IndexError):
            raise InputError(
                f"role 'monotonic': spans has no entry for passage {tokens.passage}, {tokens.where}"
            ) from None
        if not 0 <= first < stop <= len(tokens.keys):
            raise InputError(
                f"role 'monotonic': the span {(first, stop)} of {tokens.where} is not within its "
                f"{len(tokens.keys)} keys"
            )
        return first, stop


def _text_positions(tokens: Tokens) -> Ints:
    special = tokens.lexicon.special
    ids = tokens.ids
    kept = [at for at in range(len(tokens)) if not tokens.special[at] and (ids is None or ids[at] not in special)]
    return np.array(kept, np.int64)


def _progress(tokens: Tokens, queries: Ints) -> Floats:
    """Where in the text the middle of each query token stands, from 0 to 1, in characters where they are known."""
    try:
        sizes = np.array([max(1, len(tokens.pieces[at])) for at in queries], np.float64)
    except UnsupportedError:
        sizes = np.ones(len(queries))
    end = np.cumsum(sizes)
    middle: Floats = (end - sizes / 2) / end[-1]
    return middle


def monotonic(
    tolerance: float = 0.05,
    *,
    ahead: int = 1,
    spans: Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]] | None = None,
) -> Role:
    """Keys near the place that is as far along as the query is, for cross-attention.

    Where a token's middle lies at share t of the text's characters, the keys within ``tolerance`` (as a share of all
    keys) of share t count as hit. Speech and close translations run nearly so; free word order does not.

    Args:
        tolerance: half the width of the band, as a share of the keys; at least half a key.
        ahead: which token a query stands for: 1 for the one after it, which a decoder's row predicts, 0 for its own.
        spans: for each passage the keys ``[first, stop)`` that hold something: the frames of the speech, where the
            encoder pads with silence (Whisper: 50 frames a second). All keys that are no special tokens by default.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 0.5:
        raise InputError(f"tolerance must be a share of the keys from 0 to below 0.5, and is {tolerance!r}")
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise InputError(f"ahead must be a whole number of tokens, 0 or more, and is {ahead!r}")
    return Role(
        "monotonic",
        _Monotonic(float(tolerance), ahead, spans),
        kind="cross",
        description="The key as far along its sequence as the query is along its own",
        source="Raffel et al. 2017, Online and Linear-Time Attention by Enforcing Monotonic Alignments, section 2.2",
        hidden="skip",
    )

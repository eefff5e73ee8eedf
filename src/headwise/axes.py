"""The legend: one letter and one word per axis of a tensor.

Names of tensors end in their axes: ``pattern_BHQK`` has batch, query head, query position and
key position, in that order. Public annotations and error messages use the words.
"""

from __future__ import annotations

from typing import Final

__all__ = ["AXES"]

AXES: Final[dict[str, str]] = {
    "B": "batch",
    "Q": "query position",
    "K": "key position",
    "H": "query head",
    "G": "key-value head",
    "D": "width of a head (d_k for queries and keys, d_v for values)",
    "E": "width of the residual stream (d_model)",
    "L": "layer",
    "P": "pair rule (one key named per query)",
}

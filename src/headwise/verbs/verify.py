"""Prove again, from disk, that one model is another without certain heads: ``hw.verify`` and ``headwise verify``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from headwise.models import Model
from headwise.surgery import Verification
from headwise.surgery import verify as compare

__all__ = ["verify"]


def verify(
    original: str | Path | nn.Module | Model,
    pruned: str | Path | nn.Module | Model,
    *,
    example: Mapping[str, Any] | None = None,
) -> Verification:
    """Prove that ``pruned`` is ``original`` without certain heads, and otherwise the same.

    Args:
        original: the model before.
        pruned: the model after, as :func:`headwise.prune` made it or saved it.
        example: keyword arguments of a forward pass for the comparison; default one made for the model.

    Raises:
        InputError: they are not of one model.
        ModelError: a weight that was not cut, or a layer, differs.
    """
    return compare(original, pruned, example=example)

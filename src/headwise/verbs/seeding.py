"""What a seed may be."""

from __future__ import annotations

from typing import Final

from headwise.errors import InputError

__all__ = ["LARGEST", "check_seed"]

#: Seeds end up as 64-bit whole numbers.
LARGEST: Final = 2**63 - 1


def check_seed(seed: object) -> None:
    """Refuse what no generator takes.

    Raises:
        InputError: not a whole number from 0 to 2**63 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST:
        raise InputError(f"seed must be a whole number from 0 to {LARGEST}, got {seed!r}")

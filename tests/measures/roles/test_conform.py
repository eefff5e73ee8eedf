"""Roles as measures: the conformance suite, cases 25 and 26 among its checks."""

from __future__ import annotations

from typing import Any

import pytest

import headwise as hw
from headwise.heads import HeadTable
from headwise.measures import check_measure
from headwise.measures.conformance import CHECKS

ROLES = ("previous", "own", "first", "duplicate", "induction")


def shares(model: hw.Model, inputs: Any, batch_size: int = 8) -> HeadTable:
    """The weight and the share of some roles, which need no tokenizer."""
    found = hw.roles(model, inputs=inputs, batch_size=batch_size, roles=ROLES, confirm=False, replicates=2)
    return found.to_heads(model.layout)


#: Tables of roles are of all rows together, and are not merged.
@pytest.mark.parametrize("check", [one for one in CHECKS if one != "splitting"])
def test_roles_conform(check: str) -> None:
    check_measure(shares, only=[check], on=["causal", "bidirectional"], close=1e-4)

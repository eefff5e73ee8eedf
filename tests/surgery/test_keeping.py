"""Which rows of which layout go: the table of case 27, and groups that become uneven (case 28)."""

from __future__ import annotations

import pytest

from headwise.errors import UnsupportedError
from headwise.layout import Block
from headwise.surgery import fused_rows, kept_of
from headwise.surgery.keeping import head_rows


def block(heads: int, kv_heads: int, width: int = 2) -> Block:
    return Block("attn", heads, kv_heads, width, width, tuple(head // (heads // kv_heads) for head in range(heads)))


def gone(one: Block, removed: set[int], arrangement: str, rows: int) -> list[int]:
    return sorted(set(range(rows)) - set(fused_rows(one, kept_of(one, removed), arrangement)))


def test_case_27_fused_layouts() -> None:
    assert gone(block(4, 4), {1}, "q|k|v", 24) == [2, 3, 10, 11, 18, 19]  # GPT-2 (columns)
    assert gone(block(4, 4), {1}, "(q,k,v) per head", 24) == [6, 7, 8, 9, 10, 11]  # GPT-NeoX, BLOOM
    assert gone(block(4, 1), {1}, "q|k|v", 12) == [2, 3]  # Falcon-7B, GPT-BigCode MQA
    assert gone(block(4, 2), {2, 3}, "(q..,k,v) per group", 16) == list(range(8, 16))  # Falcon-40B, group 1
    assert gone(block(4, 2), {2, 3}, "q|k|v", 16) == [4, 5, 6, 7, 10, 11, 14, 15]  # Phi-3, group 1


def test_case_27_columns_of_the_output() -> None:
    assert sorted(set(range(8)) - set(head_rows(kept_of(block(4, 4), {1}).heads, 2))) == [2, 3]
    assert sorted(set(range(8)) - set(head_rows(kept_of(block(4, 2), {2, 3}).heads, 2))) == [4, 5, 6, 7]


def test_groups_that_lie_together_keep_the_same_number() -> None:
    even = kept_of(block(6, 2), {1, 5})
    assert fused_rows(block(6, 2), even, "(q..,k,v) per group") == [
        0,
        1,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        16,
        17,
        18,
        19,
    ]
    with pytest.raises(UnsupportedError, match="same number from each"):
        fused_rows(block(6, 2), kept_of(block(6, 2), {0, 1}), "(q..,k,v) per group")


def test_case_28_the_map_says_who_reads_whom() -> None:
    six = block(6, 2)
    uneven = kept_of(six, {0, 1})
    assert (uneven.heads, uneven.kv, uneven.kv_map, uneven.even) == ((2, 3, 4, 5), (0, 1), (0, 1, 1, 1), False)
    even = kept_of(six, {0, 4})
    assert (even.kv_map, even.even) == ((0, 0, 1, 1), True)
    group = kept_of(six, {0, 1, 2})
    assert (group.kv, group.kv_map, group.even) == ((1,), (0, 0, 0), True)


def test_unequal_order_is_not_even() -> None:
    """Counts that divide are not enough: after a first uneven cut the order may interleave."""
    interleaved = Block("attn", 4, 2, 2, 2, (0, 1, 0, 1))
    assert not kept_of(interleaved, set()).even
    assert kept_of(interleaved, {1, 3}).even


def test_unknown_arrangement_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'k\\|q' in a weight cannot be cut"):
        fused_rows(block(4, 4), kept_of(block(4, 4), {1}), "k|q")

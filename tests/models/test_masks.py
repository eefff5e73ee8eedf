"""Descriptions of masks say exactly what transformers' own masks say, and fail where a model computes with them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as theirs

from headwise.kernels import Problem, visible_block
from headwise.models.masks import CompactMask, CompactMaskError, compact_mask

PADDING = {
    "none": None,
    "all real": torch.ones(2, 11, dtype=torch.bool),
    "left": torch.arange(11) >= torch.tensor([[3], [0]]),
    "right": torch.arange(11) < torch.tensor([[11], [7]]),
    "short": (torch.arange(5) >= torch.tensor([[1], [0]])),
}
GROUPS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1], [0, 0, -1, -1, -1, -1, -1, -1, 2, 2, 2]])
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(4),
    "window of one": theirs.sliding_window_causal_mask_function(1),
    "window both ways": theirs.sliding_window_bidirectional_mask_function(3),
    "window without causality": theirs.sliding_window_overlay(3),
    "chunks": theirs.chunked_causal_mask_function(4, torch.tensor([3, 0])),
    "causal or blocks": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(GROUPS)),
    "packed": theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(GROUPS)),
    "causal and both ways": theirs.and_masks(
        theirs.causal_mask_function, theirs.sliding_window_bidirectional_overlay(2), theirs.sliding_window_overlay(5)
    ),
}


def seen_by(mask: CompactMask) -> Tensor:
    visible = mask.visible()
    q = torch.zeros(mask.batch, 1, mask.queries, 1)
    k = torch.zeros(mask.batch, 1, mask.keys, 1)
    problem = Problem(q, k, k, visible)
    block = visible_block(problem, (0, mask.queries), (0, mask.keys))
    block = torch.ones(1, 1, 1, 1, dtype=torch.bool) if block is None else block
    return block.expand(mask.batch, 1, mask.queries, mask.keys)


@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_description_equals_the_whole_mask(name: str, padding: str, vmapped: bool) -> None:
    for queries, keys, q_offset, kv_offset in (
        (11, 11, 0, 0),
        (3, 11, 8, 0),
        (1, 11, 10, 0),
        (4, 11, 0, 0),
        (2, 7, 9, 4),
    ):
        arguments = {
            "batch_size": 2,
            "q_length": queries,
            "kv_length": keys,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": FUNCTIONS[name],
            "attention_mask": PADDING[padding],
            "use_vmap": vmapped,
            "dtype": torch.float32,
        }
        expected = theirs.sdpa_mask(**arguments, allow_is_causal_skip=False)
        mask = compact_mask(**arguments)
        assert torch.equal(seen_by(mask), expected), (queries, keys, q_offset, kv_offset)
        eager = mask.own("eager")
        assert torch.equal(eager, theirs.eager_mask(**arguments))
        assert mask.own("eager") is eager


@pytest.mark.parametrize(
    ("name", "causal", "window", "predicate"),
    [
        ("causal", True, None, False),
        ("bidirectional", False, None, False),
        ("window", True, 4, False),
        ("window both ways", False, 4, False),
        ("causal and both ways", True, 3, False),
        ("window without causality", False, None, True),
        ("chunks", True, None, True),
        ("packed", True, None, True),
        ("causal or blocks", False, None, True),
    ],
)
def test_what_is_recognised(name: str, causal: bool, window: int | None, predicate: bool) -> None:
    """transformers' window both ways has |i - j| <= W; ours has |i - j| < W."""
    visible = compact_mask(batch_size=2, q_length=11, kv_length=11, mask_function=FUNCTIONS[name]).visible()
    assert (visible.causal, visible.window, visible.predicate is not None) == (causal, window, predicate)
    assert visible.key_padding is None


def test_padding_that_hides_nothing_is_dropped() -> None:
    mask = compact_mask(batch_size=2, q_length=11, kv_length=11, attention_mask=PADDING["all real"])
    assert mask.visible().key_padding is None


def test_a_user_function_that_is_not_made_of_tensors_is_asked_position_by_position() -> None:
    kinds = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]])

    def same_kind(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return kinds[batch, query] == kinds[batch, key]

    function = theirs.and_masks(theirs.causal_mask_function, same_kind)
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 5, "mask_function": function, "use_vmap": True}
    assert torch.equal(seen_by(compact_mask(**arguments)), theirs.sdpa_mask(**arguments, allow_is_causal_skip=False))


TOUCHES = {
    "add": lambda mask: mask + 1,
    "radd": lambda mask: torch.ones(2) + mask,
    "index": lambda mask: mask[:, :, :3],
    "invert": lambda mask: ~mask,
    "compare": lambda mask: mask == 0,
    "truth": bool,
    "length": len,
    "iterate": list,
    "attribute": lambda mask: mask.dtype,
    "method": lambda mask: mask.to(torch.float32),
    "hasattr": lambda mask: hasattr(mask, "dtype"),
    "where": lambda mask: torch.where(mask, 1.0, 0.0),
    "cat": lambda mask: torch.cat([mask, torch.ones(2)]),
    "softmax": lambda mask: torch.softmax(mask, -1),
    "sdpa": lambda mask: torch.nn.functional.scaled_dot_product_attention(
        *[torch.ones(1, 1, 2, 2)] * 3, attn_mask=mask
    ),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_computing_with_a_description_fails_clearly(touch: str) -> None:
    mask = compact_mask(batch_size=2, q_length=5, kv_length=5)
    with pytest.raises(CompactMaskError, match="the model computes with its attention mask"):
        TOUCHES[touch](mask)


def test_what_a_description_does_say() -> None:
    mask = compact_mask(batch_size=2, q_length=5, kv_length=7)
    assert mask.shape == (2, 1, 5, 7)
    assert mask.ndim == 4
    assert repr(mask) == "CompactMask(batch=2, queries=5, keys=7)"
    assert compact_mask(batch_size=2, q_length=5, kv_length=7, attention_mask=mask) is mask
    assert mask is not None
    assert {mask: 1}[mask] == 1


def test_no_tensor_of_the_masks_size_is_made() -> None:
    length = 20_000
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[0, :3] = False
    visible = compact_mask(batch_size=1, q_length=length, kv_length=length, attention_mask=padding).visible()
    sizes = [value.numel() for value in vars(visible).values() if isinstance(value, Tensor)]
    assert sizes == [length]


def test_every_pair_of_rules_intersects() -> None:
    for first, second in itertools.combinations(FUNCTIONS, 2):
        function = theirs.and_masks(FUNCTIONS[first], FUNCTIONS[second])
        arguments = {
            "batch_size": 2,
            "q_length": 11,
            "kv_length": 11,
            "mask_function": function,
            "attention_mask": PADDING["left"],
        }
        expected = theirs.sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert torch.equal(seen_by(compact_mask(**arguments)), expected), (first, second)

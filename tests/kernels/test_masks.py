"""Who may see whom: blocks, ranges and counts against a brute-force table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.kernels import Problem, ScoreRule, Visible, visible_block, visible_counts
from headwise.kernels.masks import hiding_value, key_range, sure_range


def table(queries, keys, causal, window, offset):
    offset = keys - queries if offset is None else offset

    def sees(i, j):
        if causal and j > i:
            return False
        if window is None:
            return True
        return j > i - window if causal else abs(i - j) < window

    return torch.tensor([[sees(i + offset, j) for j in range(keys)] for i in range(queries)]).view(queries, keys)


structure = st.tuples(
    st.integers(1, 13),
    st.integers(1, 17),
    st.booleans(),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(-6, 20),
)


@settings(max_examples=150, deadline=None)
@given(structure, st.data())
def test_blocks_ranges_and_counts_equal_the_table(shape, data):
    queries, keys, causal, window, offset = shape
    want = table(*shape).bool()
    problem = Problem(
        torch.zeros(1, 1, queries, 1),
        torch.zeros(1, 1, keys, 1),
        torch.zeros(1, 1, keys, 1),
        Visible(causal, window, offset),
    )
    start = data.draw(st.integers(0, queries - 1))
    stop = data.draw(st.integers(start + 1, queries))
    low, high = key_range(problem, start, stop)
    outside = torch.ones(keys, dtype=torch.bool)
    outside[low:high] = False
    assert not want[start:stop][:, outside].any()
    sure = sure_range(problem, start, stop)
    assert want[start:stop, sure[0] : sure[1]].all()
    block = visible_block(problem, (start, stop), (low, high))
    found = (
        torch.ones(stop - start, high - low, dtype=torch.bool)
        if block is None
        else block.expand(1, 1, stop - start, high - low)[0, 0]
    )
    assert torch.equal(found, want[start:stop, low:high])
    assert visible_counts(problem).tolist() == [[want.sum(-1).tolist()]]


def test_every_rule_must_allow_a_key():
    q, k = torch.zeros(2, 2, 3, 1), torch.zeros(2, 2, 5, 1)
    padding = torch.tensor([[True] * 4 + [False], [False] + [True] * 4])
    mask = torch.tensor([True, True, False, True, True]).view(1, 1, 1, 5)
    bias = torch.zeros(1, 2, 1, 5)
    bias[0, 1, 0, 3] = torch.finfo(torch.float32).min
    visible = Visible(causal=True, key_padding=padding, mask=mask, predicate=lambda b, h, i, j: (j != 1) | (b == 0))
    problem = Problem(q, k, k, visible, ScoreRule(bias=bias))
    assert visible_counts(problem)[:, :, 2].tolist() == [[3, 2], [2, 1]]
    block = visible_block(problem, (2, 3), (0, 5))
    assert block.expand(2, 2, 1, 5)[0, 0, 0].tolist() == [True, True, False, True, False]
    assert block.expand(2, 2, 1, 5)[1, 1, 0].tolist() == [False, False, False, False, True]


def test_counts_have_one_head_where_all_see_the_same():
    q = torch.zeros(2, 3, 4, 1)
    assert visible_counts(Problem(q, q, q, Visible(causal=True))).shape == (2, 1, 4)
    assert visible_counts(Problem(q, q, q, Visible(mask=torch.ones(1, 3, 4, 4, dtype=torch.bool)))).shape == (2, 3, 4)


def test_a_predicate_sees_positions_that_include_the_offset():
    met = []

    def predicate(b, h, i, j):
        met.append((b.flatten().tolist(), h.flatten().tolist(), i.flatten().tolist(), j.flatten().tolist()))
        return torch.tensor(True)

    problem = Problem(
        torch.zeros(2, 2, 3, 1), torch.zeros(2, 1, 7, 1), torch.zeros(2, 1, 7, 1), Visible(predicate=predicate)
    )
    assert visible_block(problem, (1, 3), (2, 4), batch=(1, 2)).shape == (1, 1, 1, 1)
    assert met == [([1], [0, 1], [5, 6], [2, 3])]


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_smallest_number_of_a_dtype_hides(narrow):
    assert torch.finfo(narrow).min <= hiding_value(narrow)
    assert hiding_value(narrow) < -60000.0


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_mask_made_in_a_narrow_dtype_hides_also_after_widening(narrow, wide):
    assert torch.tensor(torch.finfo(narrow).min, dtype=narrow).to(wide) <= hiding_value(wide)

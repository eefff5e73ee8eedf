"""The synthetic language says what its docstring says."""

from __future__ import annotations

import pytest

from headwise.lab.language import ASK, CLOSE, ROLES, START, VOCABULARY, Passages, passages

LENGTH = 53


@pytest.fixture(scope="module")
def text() -> Passages:
    return passages(97, LENGTH, seed=5)


def rows(text: Passages, role: str) -> list[tuple[list[int], int, int]]:
    """(passage, query, key) wherever the role names a key."""
    target = text.targets[ROLES.index(role)]
    return [(text.tokens[b].tolist(), q, int(target[b, q])) for b, q in (target >= 0).nonzero().tolist()]


def test_shape_and_range(text: Passages) -> None:
    assert text.tokens.shape == (97, LENGTH)
    assert text.targets.shape == (len(ROLES), 97, LENGTH)
    assert int(text.tokens.min()) == START
    assert int(text.tokens.max()) < VOCABULARY
    assert (text.tokens[:, 0] == START).all()


def test_keys_lie_before_their_queries(text: Passages) -> None:
    for role in ROLES:
        found = rows(text, role)
        assert len(found) > 90
        assert all(0 <= key < query for _, query, key in found)


def test_repeats_say_again_what_was_said(text: Passages) -> None:
    for passage, query, key in rows(text, "induction"):
        assert passage[key - 1] == passage[query]
        if query + 1 < LENGTH:
            assert passage[query + 1] == passage[key]
    for _, query, key in rows(text, "previous"):
        assert key == query - 1


def test_brackets_close_in_order_and_name_their_type(text: Passages) -> None:
    partners = {}
    for passage, query, key in rows(text, "partner"):
        assert passage[query] == CLOSE
        opened = [at for at in range(query) if at == key]
        assert opened == [key]
        if query + 1 < LENGTH:
            partners.setdefault(passage[key], set()).add(passage[query + 1])
    assert len(partners) == 6
    assert all(len(names) == 1 for names in partners.values())
    assert len(set.union(*partners.values())) == 6


def test_some_brackets_are_nested(text: Passages) -> None:
    spans = {}
    target = text.targets[ROLES.index("partner")]
    for b, q in (target >= 0).nonzero().tolist():
        spans.setdefault(b, []).append((int(target[b, q]), q))
    assert any(a[0] < c[0] and c[1] < a[1] for one in spans.values() for a in one for c in one)
    assert not any(a[0] < c[0] < a[1] < c[1] for one in spans.values() for a in one for c in one)


def test_the_rare_token_comes_back_when_asked_for(text: Passages) -> None:
    for passage, query, key in rows(text, "rare"):
        assert passage[query] == ASK
        if query + 1 < LENGTH:
            assert passage[query + 1] == passage[key]


def test_seeds_differ_and_repeat() -> None:
    one, again, other = (passages(3, LENGTH, seed=seed).tokens for seed in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()

"""Heads that were planted are found, and nothing else is; random models have no roles."""

from __future__ import annotations

import pytest

import headwise as hw
from headwise.measures.roles import Criterion, Parse, syntax_roles
from tests.measures.roles import planted, words
from tests.measures.roles.planted import HEADS


def test_each_planted_head_is_found_and_nothing_else() -> None:
    table = hw.roles(planted.model(), planted.texts())
    found = {(one.role, HEADS[one.head.head]) for one in table.assigned()}
    assert found == {(name, name) for name in ("previous", "bracket", "duplicate", "first")}
    for name in ("previous", "bracket", "duplicate", "first"):
        assert table.best(name).share > 0.98  # the duplicate's rows count the four latest occurrences
        assert table.best(name).score > 0.99


def test_the_uniform_and_the_one_hot_head_by_their_entropy() -> None:
    table = hw.scan(planted.model(), planted.texts())
    entropy = dict(zip(HEADS, table["normalized_entropy"].tolist(), strict=True))
    assert entropy["uniform"] == pytest.approx(1.0, abs=1e-5)
    assert entropy["first"] == pytest.approx(0.0, abs=1e-5)
    assert entropy["previous"] == pytest.approx(0.0, abs=1e-5)
    assert all(0.01 < entropy[name] < 0.99 for name in ("bracket", "duplicate"))


def _parse(text: str, seed: int) -> Parse:
    """Words of ``text``, each with a random other word as its head."""
    import random

    chance = random.Random(seed)
    spans, start = [], 0
    for word in text.split():
        spans.append((start, start + len(word)))
        start += len(word) + 1
    heads = [chance.choice([other for other in range(len(spans)) if other != at]) for at in range(len(spans))]
    heads[0] = -1
    relations = [chance.choice(("nsubj", "obj", "det", "amod")) for _ in spans]
    return Parse(text, spans, heads, relations, [], f"passage {seed}")


#: Roles of position and the sink: a random model may have these.
POSITION = ("previous", "next", "own", "first")


def random_models(seeds: int = 1) -> list[hw.Model]:
    made = []
    for seed in range(seeds):
        made += [words.bert(seed), words.bert(seed, 1.0), words.gpt2(seed), words.gpt2(seed, 1.0)]
        made += [words.llama(seed), words.llama(seed, 1.0)]
    return made


@pytest.mark.parametrize("seeds", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_random_models_have_no_roles(seeds: int) -> None:
    """Fewer than 1 of 100 pairs of a role and a head; roles of position and the sink are not counted."""
    texts = planted.texts(40)
    parses = [_parse(text, at) for at, text in enumerate(texts)]
    false, all_of_them = [], 0
    for model in random_models(seeds):
        for table in (
            hw.roles(model, texts, replicates=200),
            hw.roles(model, texts, roles=list(syntax_roles(parses)), replicates=200),
        ):
            counted = [one for one in table if one.role not in POSITION]
            all_of_them += len(counted)
            false += [one for one in counted if one.assigned]
    assert all_of_them > 500 * seeds
    assert len(false) < 0.01 * all_of_them, [str(one) for one in false]


def test_with_no_margin_random_models_would_have_roles() -> None:
    """The margins are what keeps false ones out: the test above can fail."""
    loose = Criterion(margin=0.0, score_margin=0.0, level=0.01)
    found = [
        one
        for model in random_models()
        for one in hw.roles(model, planted.texts(12), criterion=loose, replicates=50).assigned()
        if one.role not in POSITION
    ]
    assert found

"""Every score and share of every role equals a loop over full float64 patterns of the model alone with each passage."""

from __future__ import annotations

from typing import Any

import pytest

import headwise as hw
from headwise.data import batches
from headwise.measures.roles import Groups, Parse, Role, RoleObserver, RoleTable, resolve_roles, syntax_roles
from headwise.trace import run
from tests.measures.roles import words
from tests.measures.roles.truth import Truth, truth_of

MODELS = {"bert": words.bert, "gpt2": words.gpt2, "llama": words.llama}


def table_of(model: hw.Model, roles: Any, texts: list[str], *, batch_size: int = 4, **more: Any) -> RoleTable:
    data = batches(model, texts, batch_size=batch_size)
    counts: dict[int, int] = {}
    for batch in data:
        for one in batch.inputs["input_ids"][batch.input_rows == 1].tolist():
            counts[one] = counts.get(one, 0) + 1
    observer = RoleObserver(roles, model.tokenizer, counts=counts, **more)
    run(model, data, [observer])
    return RoleTable.build(model.layout, observer)


def compare(table: RoleTable, truth: Truth, names: set[str]) -> None:
    seen = set()
    for one in table:
        key = (one.role, str(one.head.site))
        assert key in truth.rows, f"{key} has {one.rows} rows and should have none"
        seen.add(key)
        assert one.rows == len(truth.rows[key]), key
        assert one.score == pytest.approx(truth.score(*key)[one.head.head], abs=2e-5), key
        assert one.share == pytest.approx(truth.share(*key)[one.head.head], abs=1e-9), key
    assert seen == set(truth.rows)
    assert {name for name, _ in seen} == names


def of_tokens(model: hw.Model, texts: list[str]):
    """The rows of the named roles, written down anew from the pieces."""
    from collections import Counter

    tokenizer = model.tokenizer
    framed = [tokenizer(text)["input_ids"] for text in texts]
    counts = Counter(one for ids in framed for one in ids if one > 3)

    def rows(_: int, ids: list[int]) -> dict[str, list[tuple]]:
        names = [words.PIECES[one].removeprefix("##") for one in ids]
        special = [one in (2, 3) for one in ids]
        units = [(at,) for at in range(len(ids))]
        everything = range(len(ids))
        queries = [at for at in everything if not special[at]]
        real = queries[1:]
        least = min((counts[ids[at]] for at in real), default=0)
        rarest = [at for at in real if counts[ids[at]] == least]
        found: dict[str, dict[int, list[int]]] = {
            "previous": {at: [at - 1] for at in queries if at},
            "next": {at: [at + 1] for at in queries if at + 1 < len(ids)},
            "own": {at: [at] for at in queries},
            "first": {at: [0] for at in queries if at},
            "separator": {at: [key for key in everything if ids[key] == 3] for at in queries},
            "punctuation": {at: [key for key in everything if names[key] in ".,()[]:\"“”'"] for at in queries},
            "duplicate": {at: _earlier(ids, at, 0) for at in queries},
            "induction": {at: _earlier(ids, at, 1) for at in queries},
            "rarest": {at: rarest if len(rarest) <= 3 else [] for at in queries},
            "bracket": _partners(names, {")": "(", "]": "["}),
            "quote": _partners(names, {"”": "“", '"': '"'}),
        }
        return {
            role: [
                ((query,), targets, units, everything, False) for query, targets in sorted(listed.items()) if targets
            ]
            for role, listed in found.items()
        }

    return framed, rows


def _earlier(ids: list[int], at: int, step: int) -> list[int]:
    found = [key for key in range(at - 1, -1, -1) if ids[key] == ids[at]][:4]
    return [key + step for key in found if key + step < at]


def _partners(names: list[str], closing: dict[str, str]) -> dict[int, list[int]]:
    stack: list[int] = []
    found: dict[int, list[int]] = {}
    for at, name in enumerate(names):
        if name in closing and stack and names[stack[-1]] == closing[name]:
            other = stack.pop()
            found[at], found[other] = [other], [at]
        elif name in closing.values():
            stack.append(at)
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_named_roles(kind: str, batch_size: int) -> None:
    model = MODELS[kind]()
    framed, rows = of_tokens(model, words.TEXTS)
    roles = [role for role in resolve_roles() if role.kind == "self"]
    table = table_of(model, roles, words.TEXTS, batch_size=batch_size)
    names = {"previous", "own", "first", "punctuation", "duplicate", "induction", "rarest", "bracket", "quote"}
    names |= {"next", "separator"} if kind == "bert" else set()
    compare(table, truth_of(model, framed, rows), names)


def test_many_members_take_another_road() -> None:
    """A class of more than eight keys is measured by indicator columns; the numbers are those of the loop."""
    model = words.bert()
    text = "the cat ( , . , . ( [ ] ) , . , . ) sat"
    framed, rows = of_tokens(model, [text])
    assert sum(name in "()[].," for name in text.split()) > 8
    table = table_of(model, resolve_roles("punctuation"), [text])
    truth = truth_of(model, framed, lambda at, ids: {"punctuation": rows(at, ids)["punctuation"]})
    compare(table, truth, {"punctuation"})


PARSES = [
    # "the cats saw them ." with heads the->cats, cats->saw, saw root, them->saw, .->saw
    Parse(
        "the cats saw them .", [(0, 3), (4, 8), (9, 12), (13, 17), (18, 19)], [1, 2, -1, 2, 2],
        ["det", "nsubj", "root", "obj", "punct"],
    ),
    Parse("unhappy dogs run", [(0, 7), (8, 12), (13, 16)], [1, 2, -1], ["amod", "nsubj", "root"]),
]  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_words_of_several_pieces(kind: str) -> None:
    """Weight to a word is the sum over its pieces, from a word the mean; other words compete (Clark et al. 2019)."""
    model = MODELS[kind]()
    texts = [parse.text for parse in PARSES]
    shift = 1 if kind == "bert" else 0
    #           the  cat+s  saw them .      un+happy dog+s run
    pieces = [[(0,), (1, 2), (3,), (4,), (5,)], [(0, 1), (2, 3), (4,)]]

    def rows(at: int, _: list[int]) -> dict[str, list[tuple]]:
        units = [tuple(one + shift for one in unit) for unit in pieces[at]]
        parse, found = PARSES[at], {}
        reverse: dict[tuple[int, str], list[int]] = {}
        for word, (head, relation) in enumerate(zip(parse.heads, parse.relations, strict=True)):
            if head < 0:
                continue
            others = [one for one in range(len(units)) if one != word]
            row = (units[word], [head], units, others, True)
            for name in ("head", f"head:{relation}"):
                found.setdefault(name, []).append(row)
            reverse.setdefault((head, relation), []).append(word)
        for (head, relation), words_of in reverse.items():
            others = [one for one in range(len(units)) if one != head]
            for name in ("dependent", f"dependent:{relation}"):
                found.setdefault(name, []).append((units[head], words_of, units, others, True))
        return found

    framed = [model.tokenizer(text)["input_ids"] for text in texts]
    truth = truth_of(model, framed, rows)
    compare(table_of(model, syntax_roles(PARSES), texts), truth, {name for name, _ in truth.rows})


def test_candidates_of_one_row_each() -> None:
    """Candidates may differ from query to query; weights are renormalised over them."""
    model = words.bert()
    text = "the cat saw the dog"
    ids = model.tokenizer(text)["input_ids"]
    allowed = {3: [1, 2, 4], 4: [2, 5]}
    role = Role("chosen", lambda tokens: [(3, 2), (4, 5)], candidates=lambda tokens: allowed)
    units = [(at,) for at in range(len(ids))]
    truth = truth_of(
        model,
        [ids],
        lambda *_: {"chosen": [((3,), [2], units, allowed[3], True), ((4,), [5], units, allowed[4], True)]},
    )
    compare(table_of(model, [role], [text]), truth, {"chosen"})


def test_blocks_of_rows_give_what_one_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.measures.roles import blocks

    model, texts = words.bert(), [parse.text for parse in PARSES]
    whole = table_of(model, syntax_roles(PARSES), texts)
    monkeypatch.setattr(blocks, "_HELD", 1)
    again = table_of(model, syntax_roles(PARSES), texts)
    for one, other in zip(whole, again, strict=True):
        assert (one.role, one.head, one.rows, one.passages) == (other.role, other.head, other.rows, other.passages)
        assert one.score == pytest.approx(other.score, abs=1e-6)
        assert (one.fixed, one.fixed_share, one.share) == (other.fixed, other.fixed_share, other.share)


@pytest.mark.parametrize("kind", MODELS)
def test_batches_change_nothing(kind: str) -> None:
    """Neither scores nor nulls nor intervals depend on which passages share a batch."""
    model = MODELS[kind]()
    roles = [role for role in resolve_roles() if role.kind == "self"]
    tables = [table_of(model, roles, words.TEXTS, batch_size=size, replicates=37) for size in (1, 3, 6)]
    for other in tables[1:]:
        for one, again in zip(tables[0], other, strict=True):
            assert (one.role, one.head, one.rows, one.passages, one.fixed) == (
                again.role, again.head, again.rows, again.passages, again.fixed,
            )  # fmt: skip
            for name in ("score", "share", "score_low", "share_high", "null_score", "null_share", "fixed_share"):
                assert getattr(one, name) == pytest.approx(getattr(again, name), abs=1e-5, nan_ok=True), (one, name)


def test_sliding_window_hides_pairs() -> None:
    """Rows whose key lies outside a window are left out; the others are those of the loop."""
    import torch
    from transformers import MistralConfig, MistralModel

    torch.manual_seed(5)
    config = MistralConfig(
        vocab_size=len(words.PIECES), hidden_size=24, intermediate_size=29, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=97, sliding_window=3,
    )  # fmt: skip
    model = hw.wrap(words.sharp(MistralModel(config), 5.0), words.tokenizer(frame=False))
    table = table_of(model, resolve_roles(["previous", "first"]), [words.TEXTS[2]])
    count = len(model.tokenizer(words.TEXTS[2])["input_ids"])
    assert {one.rows for one in table["previous"]} == {count - 1}
    assert {one.rows for one in table["first"]} == {2}


def test_groups_may_be_named_by_a_rule() -> None:
    """A rule may give groups itself: from two tokens to two others."""
    import numpy as np

    def rule(tokens):
        return Groups([(1, 2)], np.array([0]), np.array([[1]]), groups=[(1, 2), (3, 4), (5,)])

    model = words.bert()
    text = "the cat saw the dog"
    ids = model.tokenizer(text)["input_ids"]
    units = [(1, 2), (3, 4), (5,)]
    truth = truth_of(model, [ids], lambda *_: {"pairs": [((1, 2), [1], units, [0, 1, 2], True)]})
    compare(table_of(model, [Role("pairs", rule)], [text]), truth, {"pairs"})


def test_more_classes_than_one_pass_takes() -> None:
    """Five large classes at once give what each gives alone."""
    model = words.gpt2()
    texts = [" ".join(["the cat sat on the mat and the dog saw her"] * 3)] * 2

    def of(rest: int) -> Role:
        def find(tokens: Any) -> Any:
            keys = [at for at in range(len(tokens)) if at % 3 != rest % 3 or at % 2 == rest // 3]
            return [(at, key) for at in range(len(tokens)) for key in keys]

        return Role(f"class_{rest}", find, hidden="skip")

    roles = [of(rest) for rest in range(5)]
    together = table_of(model, roles, texts)
    assert set(together.roles) == {role.name for role in roles}
    for role in roles:
        alone = table_of(model, [role], texts)
        for one, other in zip(together[role.name], alone[role.name], strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-6)
            assert (one.share, one.rows, one.null_share) == (other.share, other.rows, other.null_share)

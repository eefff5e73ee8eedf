"""Bad input to roles: one clear error each, naming the passage; and the model is as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.errors import DataError, InputError
from headwise.measures.roles import Role, given_pairs, monotonic, read_pairs
from headwise.verbs.roles import roles_run
from tests.measures.roles import words

#: Two sentences of words that the small tokenizer knows.
CONLLU = """\
# text = the cat sat
1\tthe\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tcat\t_\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tsat\t_\tVERB\t_\t_\t0\troot\t_\t_

# text = a dog saw her
1\ta\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tdog\t_\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tsaw\t_\tVERB\t_\t_\t0\troot\t_\t_
4\ther\t_\tPRON\t_\t_\t3\tobj\t_\t_

"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "trees.conllu"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_reads_and_gives_its_own_text(tmp_path: Path) -> None:
    table = hw.roles(words.bert(), conllu=_file(tmp_path, CONLLU), roles=["head", "dependent"])
    assert {one.role for one in table} >= {"head", "head:det", "head:nsubj", "head:obj", "dependent"}
    assert table["head:det"][0].rows == 2


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ["the cat sat", "a dog saw him"],
            ["passage 1 (counted from 0) does not match", "sentence 1 (counted from 0)", "'im'", "'er'"],
        ),
        (["the cat sat"], ["the text has 1 passages and the CoNLL-U file 2", "passage 1 (counted from 0)"]),
        (["a dog saw her", "the cat sat"], ["does not match", "differ at character 0"]),
    ],
)
def test_a_treebank_of_another_text(tmp_path: Path, texts: list[str], said: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        hw.roles(words.bert(), texts, conllu=_file(tmp_path, CONLLU), roles="head")
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("2\tcat", "2\tcow"), ["sentence 0 (counted from 0)", "do not spell its # text", "'ow sat'", "'at sat'"]),
        (
            ("4\ther\t_\tPRON\t_\t_\t3", "4\ther\t_\tPRON\t_\t_\t9"),
            ["sentence 1 (counted from 0)", "word 4 (her)", "9"],
        ),
        (("3\tsat\t_\tVERB\t_\t_\t0\troot\t_\t_", "3 sat"), ["is not CoNLL-U"]),
    ],
)
def test_a_broken_treebank(tmp_path: Path, change: tuple[str, str], said: list[str]) -> None:
    assert change[0] in CONLLU
    with pytest.raises(DataError) as caught:
        hw.roles(words.bert(), conllu=_file(tmp_path, CONLLU.replace(*change)), roles="head")
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("content", ["", "# text = nothing\n\n"])
def test_an_empty_treebank(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError):
        hw.roles(words.bert(), conllu=_file(tmp_path, content), roles="head")


TEXTS = ["the cat sat on the mat", "she saw her"]


def _rule(pairs: Any) -> Role:
    """Names ``pairs`` in the second passage, and nothing in the first."""
    return Role("mine", lambda tokens: pairs if tokens.passage == 1 else [])


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            [(1, 0), (2, 7)],
            ["'mine'", "passage 1 (counted", "the pair (2, 7) is out of range", "key 7", "positions 0 to 2"],
        ),
        ([(-1, 0)], ["'mine'", "passage 1 (counted from 0)", "the pair (-1, 0) is out of range", "query -1"]),
        (
            [(1, 2)],
            ["'mine'", "passage 1 (counted", "the pair (1, 2)", "may not see", "(causal)", "hidden='skip'"],
        ),
        ([(1, 0.5)], ["'mine'", "passage 1 (counted from 0)", "0.5"]),
        ([(1, 0, 0)], ["'mine'", "passage 1 (counted from 0)", "(query, key) pairs"]),
        ("nothing", ["'mine'", "passage 1 (counted from 0)", "(query, key) pairs"]),
        (7, ["'mine'", "passage 1 (counted from 0)", "(query, key) pairs"]),
    ],
)
def test_a_rule_that_names_what_is_not_there(pairs: Any, said: list[str]) -> None:
    model = words.gpt2()
    before = model.module.config._attn_implementation
    with pytest.raises(InputError) as caught:
        hw.roles(model, TEXTS, roles=_rule(pairs))
    for part in said:
        assert part in str(caught.value), str(caught.value)
    assert model.module.config._attn_implementation == before
    assert hw.roles(model, TEXTS, roles="previous").roles == ("previous",)


@pytest.mark.parametrize(
    ("pair", "candidates", "said"),
    [
        ((1, 0), [0, 99], "99"),
        ((1, 0), [2], "not among its candidates"),
        ((1, 2), [0, 1, 2], "may not see"),
    ],
)
def test_candidates_that_do_not_fit(pair: tuple[int, int], candidates: list[int], said: str) -> None:
    role = Role("mine", lambda _: [pair], lambda _: candidates)
    with pytest.raises(InputError, match="passage") as caught:
        hw.roles(words.gpt2(), TEXTS, roles=role)
    assert said in str(caught.value)


def test_hidden_pairs_may_be_skipped() -> None:
    role = given_pairs("mine", [[(1, 0), (2, 1)], [(1, 2), (2, 0)]], hidden="skip")
    assert hw.roles(words.gpt2(), TEXTS, roles=role)["mine"][0].rows == 3


def test_pairs_for_too_few_passages() -> None:
    with pytest.raises(DataError, match=r"'mine'.*1 passages were given.*passage 1"):
        hw.roles(words.gpt2(), TEXTS, roles=given_pairs("mine", [[(1, 0)]]))


def test_pairs_for_too_many_passages() -> None:
    """They are of another text, or lines are shifted."""
    role = given_pairs("mine", [[(1, 0)]] * (len(TEXTS) + 1))
    with pytest.raises(DataError, match=rf"'mine': pairs of {len(TEXTS) + 1} passages .* has {len(TEXTS)}; give pairs"):
        hw.roles(words.gpt2(), TEXTS, roles=role)
    assert hw.roles(words.gpt2(), TEXTS, roles=role, limit=1)["mine"][0].rows == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"pairs": [[1, 0]]}\n{"pairs": ', "line 2: is not JSON"),
        ('{"pairs": 3}\n', "line 1: must be an object"),
        ('{"pairs": [], "candidates": {"a": [0]}}\n', "line 1: candidates is an object"),
        ("\n", "holds no line of pairs"),
    ],
)
def test_files_of_pairs(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "gold.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    assert said in str(caught.value)


def test_files_of_pairs_from_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "gold.jsonl"
    path.write_bytes('\ufeff{"pairs": [[1, 0]], "text": "one\u2028line"}\r\n{"pairs": [[2, 1]]}\r\n'.encode())
    assert hw.roles(words.gpt2(), TEXTS, roles=read_pairs(path))["gold"][0].rows == 2
    path.write_bytes(b'{"pairs": [[1, 0]], "text": "\xff"}')
    with pytest.raises(DataError, match="is not UTF-8 text"):
        read_pairs(path)


def test_text_shorter_than_two_tokens() -> None:
    with pytest.raises(DataError, match=r"passage 0.*fewer than two tokens"):
        hw.roles(words.gpt2(), ["cat", "dog"])
    result = roles_run(words.gpt2(), ["cat", "the cat sat"], roles="previous")
    assert any("passage 0" in note and "fewer than two tokens" in note for note in result.run["notes"])


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("previos", "did you mean 'previous'"),
        ("head", "needs a parse"),
        ([], "roles is empty"),
        ([given_pairs("a", [[]]), given_pairs("a", [[(1, 0)]])], "two different roles named 'a'"),
        (3, "a role is a Role or a function"),
    ],
)
def test_roles_that_are_none(roles: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        hw.roles(words.gpt2(), TEXTS, roles=roles)
    assert said in str(caught.value)


@pytest.mark.parametrize(("options", "said"), [({"tolerance": 0.5}, "tolerance"), ({"ahead": -1}, "ahead")])
def test_alignment_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        monotonic(**options)

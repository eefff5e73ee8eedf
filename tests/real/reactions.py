"""The ten mapped reactions of the rxnmapper package's own tests: token ids, gold pairs of atoms, candidate keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: The tokens of a reaction SMILES, as rxnmapper cuts them.
_TOKEN = re.compile(
    r"(%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$"
    r"|%[0-9]{2}|[0-9])"
)
_ATOM = re.compile(r"\[(\d*)([A-Za-z]{1,2}?)(@{0,2})(H\d?)?([+-]\d?)?:(\d+)\]")
_PLAIN = ("B", "C", "N", "O", "P", "S", "F", "I", "Cl", "Br", "b", "c", "n", "o", "s", "p")


@dataclass(frozen=True)
class Reaction:
    """Token ids; pairs of a product atom and its reactant atom; the reactant atoms, which compete."""

    ids: list[int]
    pairs: list[tuple[int, int]]
    candidates: list[int]


def _unmapped(token: str) -> tuple[str, int | None]:
    """A token as the model reads it, and the number of its atom map."""
    found = _ATOM.fullmatch(token)
    if not found:
        return token, None
    _, element, chiral, hydrogen, charge, number = found.groups()
    plain = element in _PLAIN and not charge and not chiral and not (element == "n" and hydrogen)
    return (element if plain else f"[{element}{chiral or ''}{hydrogen or ''}{charge or ''}]"), int(number)


def reactions(tests: Path, vocabulary: Path) -> list[Reaction]:
    """Those of ``test_mapper.py`` that have a mapped atom."""
    known = {line.strip(): at for at, line in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    mapped = re.findall(r'"mapped_rxn": "([^"]+)"', tests.read_text(encoding="utf-8"))
    return [one for one in (_reaction(text, known) for text in mapped) if one.pairs]


def _reaction(text: str, known: dict[str, int]) -> Reaction:
    cut = [_unmapped(token) for token in _TOKEN.findall(text)]
    tokens = ["[CLS]", *(token for token, _ in cut), "[SEP]"]
    numbers = [None, *(number for _, number in cut), None]
    arrow = tokens.index(">>")
    source = {numbers[at]: at for at in range(1, arrow) if numbers[at] is not None}
    pairs = [(at, source[number]) for at, number in enumerate(numbers) if at > arrow and number in source]
    atoms = [at for at in range(1, arrow) if re.match(r"[A-Za-z\[]", tokens[at])]
    return Reaction([known.get(token, known["[UNK]"]) for token in tokens], pairs, atoms)

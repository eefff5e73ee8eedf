"""A small synthetic language with three things to learn, and the key that each query should look at.

A passage is a sequence of random letters with

* *repeats*: a block of letters that comes a second time;
* *brackets*: an opening token of one of several types, some content, a closing token that is the same for all types,
  and then a token that names the type: to predict it, look at the partner of the closing token;
* *a rare token*: one token per passage out of many, early, and later the token ``ask``, which is followed by it again.

Everything else is random, so a model that predicts these has found the rule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

__all__ = ["ROLES", "VOCABULARY", "Passages", "passages"]

LETTERS: Final = 16
TYPES: Final = 6
RARE: Final = 24
START, CLOSE, ASK = 0, 1, 2
_LETTER, _OPEN = 3, 3 + LETTERS
_NAME = _OPEN + TYPES
_RARE = _NAME + TYPES
VOCABULARY: Final = _RARE + RARE
#: Rules that name one key per query, in the order of ``Passages.targets``: the token before, within the first copy of a
#: block (what an induction head needs to have been told); the opening bracket, at the closing one; the rare token, at
#: ``ask``; the token after the same token's first copy, within the second copy of a block.
ROLES: Final = ("previous", "partner", "rare", "induction")


@dataclass(frozen=True)
class Passages:
    """A batch of passages of equal length.

    Attributes:
        tokens: (B, N) int64.
        targets: (P, B, N) int64, for each role and query the key it should look at, -1 for none.
    """

    tokens: Tensor
    targets: Tensor


@dataclass
class _Writer:
    """Writes one passage and notes the roles' keys."""

    length: int
    chance: random.Random
    tokens: list[int] = field(default_factory=lambda: [START])
    previous: dict[int, int] = field(default_factory=dict)
    partner: dict[int, int] = field(default_factory=dict)
    rare: dict[int, int] = field(default_factory=dict)
    induction: dict[int, int] = field(default_factory=dict)
    rare_at: int | None = None

    def write(self) -> None:
        """Fill the passage."""
        pieces = (self.repeat, self.bracket, self.ask)
        self.letters(self.chance.randint(0, 2))
        self.rare_at = len(self.tokens)
        self.tokens.append(_RARE + self.chance.randrange(RARE))
        while len(self.tokens) < self.length:
            self.chance.choice(pieces)()
        del self.tokens[self.length :]

    def letters(self, count: int) -> None:
        """Random letters."""
        self.tokens.extend(_LETTER + self.chance.randrange(LETTERS) for _ in range(count))

    def repeat(self) -> None:
        """A block of letters, a gap, and the block again: after its first token the rest can be known."""
        block = [_LETTER + letter for letter in self.chance.sample(range(LETTERS), self.chance.randint(4, 6))]
        start = len(self.tokens)
        self.tokens.extend(block)
        self.letters(self.chance.randint(0, 2))
        again = len(self.tokens)
        self.tokens.extend(block)
        for at in range(len(block) - 1):
            self.induction[again + at] = start + at + 1
            self.previous[start + at + 1] = start + at

    def bracket(self, depth: int = 1) -> None:
        """An opening token, content that may hold another bracket, the closing token, the name of the type."""
        kind, opened = self.chance.randrange(TYPES), len(self.tokens)
        self.tokens.append(_OPEN + kind)
        self.letters(self.chance.randint(1, 3))
        if depth < 2 and self.chance.random() < 0.3:
            self.bracket(depth + 1)
        self.partner[len(self.tokens)] = opened
        self.tokens.extend([CLOSE, _NAME + kind])

    def ask(self) -> None:
        """The rare token again, after the token that asks for it."""
        assert self.rare_at is not None
        self.rare[len(self.tokens)] = self.rare_at
        self.tokens.extend([ASK, self.tokens[self.rare_at]])


def passages(count: int, length: int, seed: int) -> Passages:
    """``count`` random passages of ``length`` tokens.

    Example:
        >>> batch = passages(2, 48, seed=0)
        >>> tuple(batch.tokens.shape), tuple(batch.targets.shape)
        ((2, 48), (4, 2, 48))
    """
    chance = random.Random(seed)
    tokens, targets = [], []
    for _ in range(count):
        writer = _Writer(length, chance)
        writer.write()
        tokens.append(writer.tokens)
        named = (writer.previous, writer.partner, writer.rare, writer.induction)
        targets.append([[one.get(at, -1) for at in range(length)] for one in named])
    return Passages(torch.tensor(tokens), torch.tensor(targets).transpose(0, 1).contiguous())

"""A GPT-2 whose weights are set by hand: every head of its one layer follows a rule that is known."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

import headwise as hw
from tests.measures.roles import words

#: What each head does.
HEADS = ("previous", "bracket", "duplicate", "uniform", "first")
POSITIONS = 64
#: Width of a head: a place for every token, and one for every position.
WIDTH = len(words.PIECES) + POSITIONS
_SHARP = 40.0


def model() -> hw.Model:
    """Tokens and positions are one-hot in the residual stream, and layer norm hands them on as they are."""
    tokens, width = len(words.PIECES), WIDTH * len(HEADS)
    config = GPT2Config(
        n_layer=1, n_head=len(HEADS), n_embd=width, n_inner=7, vocab_size=tokens, n_positions=POSITIONS,
        bos_token_id=0, eos_token_id=0, layer_norm_epsilon=0.0,
    )  # fmt: skip
    module = GPT2Model(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.wte.weight[:, :tokens] = torch.eye(tokens)
        module.wpe.weight[:, tokens:WIDTH] = torch.eye(POSITIONS)
        block = module.h[0]
        mean = 2 / width
        deviation = (mean * (1 - mean)) ** 0.5
        block.ln_1.weight.fill_(deviation)
        block.ln_1.bias.fill_(mean)
        for head, rule in enumerate((_previous, _bracket, _duplicate, None, _first)):
            if rule is not None:
                queries, keys = rule(tokens)
                start = head * WIDTH
                block.attn.c_attn.weight[:WIDTH, start : start + WIDTH] = queries * _SHARP * WIDTH**0.5
                block.attn.c_attn.weight[:WIDTH, width + start : width + start + WIDTH] = keys
    return hw.wrap(module, words.tokenizer(frame=False))


def _empty() -> tuple[Tensor, Tensor]:
    """From what stands in the residual stream to a query, and to a key."""
    return torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)


def _previous(tokens: int) -> tuple[Tensor, Tensor]:
    queries, keys = _empty()
    queries[tokens:, tokens:] = torch.eye(POSITIONS).roll(-1, 1)
    queries[tokens] = 0  # the first position has none before it
    keys[tokens:, tokens:] = torch.eye(POSITIONS)
    return queries, keys


def _bracket(tokens: int) -> tuple[Tensor, Tensor]:
    """From a closing bracket to the latest opening one; evenly from any other token."""
    queries, keys = _empty()
    for opening, closing in ("()", "[]"):
        one, other = words.PIECES.index(opening), words.PIECES.index(closing)
        queries[other, one] = 1
        keys[one, one] = 1
        queries[other, tokens] = 1
    keys[tokens:, tokens] = torch.arange(POSITIONS) / POSITIONS
    return queries, keys


def _duplicate(tokens: int) -> tuple[Tensor, Tensor]:
    """To the same token, and not to itself; from a token that is new, hither and thither: some words are liked more."""
    queries, keys = torch.eye(WIDTH), torch.eye(WIDTH)
    queries[:tokens, :tokens] += 0.05 * torch.rand(tokens, generator=torch.Generator().manual_seed(2))
    queries[tokens:] *= -2
    return queries, keys


def _first(tokens: int) -> tuple[Tensor, Tensor]:
    queries, keys = _empty()
    queries[tokens:, tokens] = 1
    keys[tokens, tokens] = 1
    return queries, keys


def texts(count: int = 24, seed: int = 5) -> list[str]:
    """Random words, of which the first does not come again, with brackets that do not nest."""
    chance = random.Random(seed)
    plain = [one for one in words.PIECES[4:] if one.isalpha() and one != "said"]
    made = []
    for _ in range(count):
        said = ["said", *(chance.choice(plain) for _ in range(chance.randint(44, 58)))]
        for opening, closing in ("()", "[]"):
            start = chance.randrange(2, len(said) - 9)
            if all(one not in "()[]" for one in said[start - 1 : start + 9]):
                stop = start + chance.randint(2, 7)
                said = [*said[:start], opening, *said[start:stop], closing, *said[stop:]]
        made.append(" ".join(said))
    return made

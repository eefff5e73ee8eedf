"""Errors put into sentences, and whether the grammar tagger repairs them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.pruning import DATA
from benchmarks.pruning_tasks import Counted
from headwise.models import Model

#: What is right, and what is put in its place.
MISTAKES = {"their": "there", "than": "then", "its": "it's", "has": "have", "to": "too"}
KEEP = "$KEEP"


@dataclass(frozen=True)
class Injected:
    """A right sentence, the same with one wrong word, the word's number in it, and the tag that puts it right."""

    right: str
    wrong: str
    at: int
    tag: str


def injected() -> list[Injected]:
    """The handbook's sentences that have a word to get wrong, shuffled once for all."""
    text = (DATA / "handbook_en.txt").read_text(encoding="utf-8")
    found = [one.strip() for part in text.split("\n\n") for one in re.split(r"(?<=[.!?]) ", part)]
    found = [one for one in found if 40 < len(one) < 150 and re.fullmatch(r"[A-Za-z ,.'\-;:()]+", one)]
    random.Random(0).shuffle(found)
    made = []
    for sentence in dict.fromkeys(found):
        for right, wrong in MISTAKES.items():
            if place := re.search(rf"\b{right}\b", sentence):
                spoilt = sentence[: place.start()] + wrong + sentence[place.end() :]
                made.append(Injected(sentence, spoilt, place.start(), f"$REPLACE_{right}"))
                break
    return made


def labelled(model: Model, one: Injected) -> dict[str, list[int]]:
    """The wrong sentence with the tags that put it right."""
    assert model.tokenizer is not None
    read = model.tokenizer(one.wrong)
    labels = [model.config.label2id[KEEP]] * len(read["input_ids"])
    labels[read.char_to_token(one.at)] = model.config.label2id[one.tag]
    labels[0] = labels[-1] = -100
    return {"input_ids": list(read["input_ids"]), "labels": labels}


@dataclass
class Marking:
    """Errors that are left standing, and right sentences in which something is marked.

    Attributes:
        model: the tagger.
        items: what it is given.
    """

    model: Model
    items: Sequence[Injected]

    def __call__(self, _changed: Sequence[str] = ()) -> dict[str, Counted]:
        """Both."""
        repaired = [
            one.tag in tags for one, tags in zip(self.items, self._tags([i.wrong for i in self.items]), strict=True)
        ]
        flagged = [bool(tags) for tags in self._tags([one.right for one in self.items])]
        ones = torch.ones(len(self.items), dtype=torch.float64)
        return {
            "errors left standing": Counted(1 - torch.tensor(repaired).double(), ones),
            "right sentences flagged": Counted(torch.tensor(flagged).double(), ones),
        }

    def _tags(self, sentences: Sequence[str], batch: int = 30) -> list[set[str]]:
        """The tags of each sentence's tokens, but for those that stay as they are."""
        assert self.model.tokenizer is not None
        module, names, found = self.model.module, self.model.config.id2label, []
        for at in range(0, len(sentences), batch):
            read = self.model.tokenizer(list(sentences[at : at + batch]), padding=True, return_tensors="pt")
            ids, mask = read["input_ids"], read["attention_mask"]
            tags: Tensor = module(input_ids=ids, attention_mask=mask).logits.argmax(-1)
            for row, length in zip(tags.tolist(), mask.sum(1).tolist(), strict=True):
                found.append({names[tag] for tag in row[1 : length - 1]} - {KEEP})
        return found


def apart(seen: int, measured: int) -> tuple[list[Injected], list[Injected]]:
    """So many sentences to choose and repair by, and so many others to measure on."""
    found = injected()
    assert len(found) >= seen + measured, len(found)
    return found[measured : measured + seen], found[:measured]

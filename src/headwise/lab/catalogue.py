"""The experiments by name, with their claims. Imports nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from headwise.errors import InputError

__all__ = ["CATALOGUE", "Entry", "find"]


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue.

    Attributes:
        name: what ``headwise lab NAME`` takes.
        title: the heading on the results page.
        claim: what is said about attention heads, in one sentence: true or not is for the experiment to say.
    """

    name: str
    title: str
    claim: str

    @property
    def module(self) -> str:
        """The module that holds the experiment."""
        return "headwise.lab.experiments." + self.name.replace("-", "_")


CATALOGUE: Final[tuple[Entry, ...]] = (
    Entry(
        "sum-of-scores",
        "One wide head against many: scores add, softmaxes do not",
        "A wide head's scores are the sum of the scores of the heads that its columns split into, but one softmax"
        " over that sum is not the sum of the heads' softmaxes.",
    ),
    Entry(
        "several-reads",
        "Three reads at once",
        "A query that has to fetch three positions needs several heads: one head of the same total width cannot do it.",
    ),
    Entry(
        "saturation",
        "When a softmax saturates",
        "When one wide head's softmax saturates, almost no gradient reaches W_Q and W_K; split into heads, the layer "
        "keeps learning.",
    ),
    Entry(
        "rank",
        "What each product can span",
        "A head's scores have rank at most d_k, what the layer writes has rank at most d_model and what an average of"
        " heads writes at most d_model / h, and the cap d_model binds only where there are more than d_model"
        " positions.",
    ),
    Entry(
        "head-count",
        "The number of heads as a dial",
        "At fixed d_model the number of heads is a free dial: parameters and FLOPs of the matrix products stay the"
        " same, and 1/sqrt(d_k) keeps the spread of the logits the same.",
    ),
    Entry(
        "worked-split",
        "Four numbers, two heads",
        "With d_model = 4, the query [0.9, 0.1 | 0.2, 0.8] split into two heads reads A and B at once, while a single"
        " head blurs them.",
    ),
    Entry(
        "uniform-head",
        "A head that looks everywhere",
        "A head whose pattern is nearly uniform only averages the values, so a constant can replace it.",
    ),
    Entry(
        "redundancy",
        "Redundant is not useless",
        "The heads that can go are those with the lowest scores, each judged on its own.",
    ),
    Entry(
        "specialisation",
        "Specialisation emerges",
        "Nobody tells heads what to do: training gives each head a job of its own.",
    ),
    Entry(
        "cache",
        "What a decoded token waits for",
        "A decode step takes as long as it takes to read the cache, not to compute, so fewer KV heads make it "
        "proportionally faster.",
    ),
    Entry(
        "tiling",
        "Attention without the n x n matrix",
        "Exact attention needs memory linear in the length: the n x n scores never have to exist.",
    ),
)


def find(name: str) -> Entry:
    """The entry called ``name``.

    Raises:
        InputError: there is none; the message gives the nearest.

    Example:
        >>> find("rank").title
        'What each product can span'
    """
    names = [entry.name for entry in CATALOGUE]
    for entry in CATALOGUE:
        if entry.name == name:
            return entry
    near = get_close_matches(name.lower().replace("_", "-").replace(" ", "-"), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "the experiments are " + ", ".join(names)
    raise InputError(f"the lab has no experiment {name!r}; {hint}")

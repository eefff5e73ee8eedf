"""What measuring costs beside the plain forward pass of the same base model, at 2,048 tokens.

    python -m benchmarks.measures                   every case, 3 rounds
    python -m benchmarks.measures together          the cases with this word in their name, 7 rounds
    python -m benchmarks.measures together 512 4096     the same at other lengths

*Together* is one traced pass over one passage of random token ids, with what is computed at its end: every named role
of self-attention that finds pairs (nine do) with its shuffled pairs, the ten pattern measures, the six ranks of weights
and the three of scores, and C. Of one passage no bootstrap replicates are drawn.
Answers are checked first: the measured pass computes the plain pass's hidden states, the gate gradients of one head
agree with a finite difference.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

import headwise as hw
from benchmarks.pairs import Pairs, paired
from benchmarks.scan import READY, check, plain_once, smollm2
from headwise.data import Batch, batches
from headwise.measures import MeasureObserver, resolve
from headwise.measures.covariance import CovarianceObserver
from headwise.measures.importance import NextToken, gate_gradients
from headwise.measures.roles import RoleObserver, RoleTable, resolve_roles
from headwise.models import Model, gate
from headwise.trace import run

LENGTH = 2048


def language_model() -> nn.Module:
    """SmolLM2 with its head, or a random Llama of its shape."""
    if (READY / "smollm2" / "config.json").is_file():
        return hw.load(READY / "smollm2").module
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def tokens(length: int = LENGTH) -> torch.Tensor:
    """Token ids (1, length)."""
    return torch.randint(3, 40000, (1, length), generator=torch.Generator().manual_seed(1))


def observers(parts: tuple[str, ...], model: Model, ids: torch.Tensor) -> list[object]:
    """Observers of the parts named; ``"roles"``: every named role of self-attention, with 1,000 replicates."""
    made: list[object] = []
    groups = [part for part in parts if part not in ("covariance", "roles")]
    if groups:
        made.append(MeasureObserver(resolve(groups)))
    if "covariance" in parts:
        made.append(CovarianceObserver())
    if "roles" in parts:
        named = [role for role in resolve_roles() if role.kind == "self"]
        made.append(RoleObserver(named, model.tokenizer, counts=Counter(ids[0].tolist())))
    return made


def traced(model: Model, ids: torch.Tensor, parts: tuple[str, ...]) -> list[object]:
    """One traced pass, with the numbers of heads computed at its end."""
    made = observers(parts, model, ids)
    run(model, batches(model, [{"input_ids": ids}]), made)
    for one in made:
        if isinstance(one, MeasureObserver):
            one.finish()
        elif isinstance(one, CovarianceObserver):
            one.statistics(model.layout)
        elif isinstance(one, RoleObserver):
            RoleTable.build(model.layout, one)
    return made


def gradients(model: Model, batch: Batch) -> torch.Tensor:
    """One importance pass; the gradients of the first site."""
    loss = NextToken()
    found = gate_gradients(model, loss.prepare(model, batch), loss, layout=model.layout)
    first = found.gradients[model.layout.sites[0].key]
    assert first is not None
    return first


def check_gradients(model: Model) -> None:
    """A gate gradient must equal the finite difference of the loss."""
    batch = next(iter(batches(model, [{"input_ids": tokens(64)}])))
    ours = gradients(model, batch)[0, 1].item()
    loss, site = NextToken(), model.layout.sites[0].key
    task, values = loss.prepare(model, batch), []
    for scale in (1.02, 0.98):
        with torch.no_grad(), gate(model, {site: [1]}, scale=scale):
            values.append(float(loss(model.module(**task.inputs), task)))
    theirs = (values[0] - values[1]) / 0.04
    if abs(ours - theirs) > 1e-2 * max(1.0, abs(theirs)):
        raise SystemExit(f"gate gradient {ours:.5g}, finite difference {theirs:.5g}: not timed")


CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("entropy and the other pattern measures", ("pattern",)),
    ("C alone", ("covariance",)),
    ("ranks alone (weights and scores)", ("rank",)),
    ("roles alone", ("roles",)),
    ("roles, pattern, rank and C together", ("roles", "pattern", "rank", "covariance")),
    ("replaceable shares alone", ("replaceable",)),
)


GRADIENTS = "gate gradients of the language model"


def cases(full: bool, word: str = "", length: int = LENGTH) -> list[Pairs]:
    """Ratios of measuring to the plain pass, of the cases with ``word`` in their names."""
    name, base = smollm2()
    folder = READY / "smollm2"
    model = hw.wrap(base, hw.load(folder).tokenizer if folder.is_dir() else None)
    ids = tokens(length)
    check(model, ids, lambda: traced(model, ids, ("roles", "pattern", "rank", "covariance")))

    def plain() -> torch.Tensor:
        return plain_once(base, ids)

    def of(parts: tuple[str, ...]) -> Callable[[], object]:
        return lambda: traced(model, ids, parts)

    rounds = 7 if full or word else 3
    found = [
        paired(f"{text} / plain pass, {name}, {length} tokens", of(parts), plain, rounds=rounds)
        for text, parts in CASES
        if word in text
    ]
    if word not in GRADIENTS:
        return found
    whole = hw.wrap(language_model())
    check_gradients(whole)
    batch = next(iter(batches(whole, [{"input_ids": ids}])))
    found.append(
        paired(
            f"{GRADIENTS} / plain base pass, {name}, {length} tokens",
            lambda: gradients(whole, batch),
            plain,
            rounds=rounds,
        )
    )
    return found


if __name__ == "__main__":
    torch.set_num_threads(torch.get_num_threads())
    lengths = [int(one) for one in sys.argv[1:] if one.isdigit()] or [LENGTH]
    asked = " ".join(one for one in sys.argv[1:] if not one.isdigit())
    for tokens_of_passage in lengths:
        for pairs in cases(full=False, word=asked, length=tokens_of_passage):
            print(" | ".join(pairs.row()), flush=True)

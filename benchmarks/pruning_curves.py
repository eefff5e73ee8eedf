"""Quality against heads removed on four more real models: the default, the random control and Michel.

    python -m benchmarks.pruning_curves flan_t5 | grammar | rxnmapper | whisper [--json FILE] [--plot FILE]

flan_t5: teacher-forced loss; grammar: errors left standing; rxnmapper: masked tokens, and the order in every layer;
whisper: word errors and teacher-forced loss, for heads of the encoder, of the decoder's self- and cross-attention, and
of all. Everything is measured on passages kept apart from the choice and the repair. Models and texts are looked for as
in benchmarks.pruning; speech is spoken by espeak-ng, and words are counted by jiwer (the extra ``bench``).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from benchmarks.mistakes import Marking, apart, labelled
from benchmarks.pruning import CONSOLE, DATA, MODELS, show
from benchmarks.pruning_tasks import CRITERIA, Tasks, table
from benchmarks.spoken import Listening, clips
from headwise.cli.plan_plot import draw
from headwise.measures.covariance import Statistics
from headwise.measures.importance import MaskedToken
from headwise.models import Model
from headwise.plans import LayerCost
from headwise.verbs.choosing import Asked, output_weights
from headwise.verbs.plan_compare import Comparison, compare

AT = (0.2, 0.4, 0.6)
#: What all comparisons have in common.
HOW: Any = {"criteria": CRITERIA, "repairs": ("least_squares",), "seeds": 2}


def treebank(count: int, pattern: str = r"[A-Za-z ,.'\-]{40,120}") -> list[str]:
    """Sentences of the English Web Treebank, from all over it."""
    lines = (DATA / "en_ewt-ud-dev.conllu").read_text(encoding="utf-8").splitlines()
    found = [line[9:] for line in lines if line.startswith("# text = ")]
    found = [one for one in found if re.fullmatch(pattern, one)]
    return found[:: max(1, len(found) // count)][:count]


def handbook(count: int) -> list[str]:
    """Sentences of the handbook, from all over it."""
    text = (DATA / "handbook_en.txt").read_text(encoding="utf-8")
    found = [" ".join(one.split()) for part in text.split("\n\n") for one in re.split(r"(?<=[.!?]) ", part)]
    found = [one for one in found if re.fullmatch(r"[A-Za-z ,.'\-;:()]{40,150}", one)]
    return found[:: max(1, len(found) // count)][:count]


def translations(model: Model, sentences: Sequence[str]) -> list[tuple[str, str]]:
    """Sentences and what the model makes of them in German, greedily."""
    assert model.tokenizer is not None
    module: Any = model.module
    sources = [f"translate English to German: {one}" for one in sentences]
    found: dict[str, str] = {}
    by_length = sorted(sources, key=len)
    for at in range(0, len(by_length), 30):
        some = by_length[at : at + 30]
        read = model.tokenizer(some, padding=True, return_tensors="pt")
        with torch.no_grad():
            made = module.generate(**read, max_new_tokens=60, do_sample=False)
        found |= zip(some, model.tokenizer.batch_decode(made, skip_special_tokens=True), strict=True)
    return [(one, found[one]) for one in sources]


def flan_t5(asked: argparse.Namespace) -> Comparison:
    """Teacher-forced loss of the model's own translations of 300 sentences into German, half of the handbook."""
    model = hw.load(MODELS / "flan_t5")
    sentences = [one for two in zip(treebank(150), handbook(150), strict=True) for one in two]
    how = {**HOW, "criteria": asked.criteria, "seeds": 3}
    return compare(model, translations(model, sentences), at=(0.1, *AT), batch_size=25, **how)


def statistics_of(model: Model, inputs: Sequence[Any], batch_size: int, file: Path | None) -> Statistics:
    """Statistics as ``hw.plan`` takes them; from the file where it is there, otherwise written to it."""
    if file is not None and file.is_file():
        return Statistics.load(file)
    found = hw.statistics(model, inputs=list(inputs), relative=True, batch_size=batch_size)
    if file is not None:
        found.save(file)
    return found


def grammar(asked: argparse.Namespace) -> Iterator[Comparison]:
    """Errors that the tagger leaves standing in 150 sentences; 300 others to choose and repair by.

    Only Michel's criterion reads the labels of those, which say how the error is put right.
    """
    model = hw.load(MODELS / "grammar")
    seen, measured = apart(300, 150)
    inputs = [labelled(model, one) for one in seen]
    found = statistics_of(model, inputs, 20, asked.statistics)
    tasks = Tasks(
        model, inputs, found, Marking(model, measured), len(measured), loss="labels", batch_size=20,
        criteria=asked.criteria,
    )  # fmt: skip
    yield from tasks.curves(AT).values()


def reactions(root: Path) -> list[list[str]]:
    """The tokens of the reactions in rxnmapper's own tests, without atom maps."""
    token = re.compile(
        r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
    )
    found = set()
    for file in sorted((root / "tests").glob("*.py")):
        for one in re.findall(r"[\"']([^\"'\s]{20,}>>[^\"'\s]+)[\"']", file.read_text(encoding="utf-8")):
            found.add(re.sub(r"\[([A-Za-z]{1,2})H?\d?:\d+\]", r"\1", one))
    return [token.findall(one) for one in sorted(found)]


def rxnmapper(_asked: argparse.Namespace) -> Comparison:
    """Masked tokens of reactions; the one block's head 5, which maps atoms, is to go last."""
    root = MODELS / "rxnmapper"
    folder = root / "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
    words = {one.strip(): at for at, one in enumerate((folder / "vocab.txt").open(encoding="utf-8"))}
    model = hw.load(folder, allow_pickle=True)
    unknown = words["[UNK]"]
    inputs = [
        {"input_ids": [words["[CLS]"], *(words.get(one, unknown) for one in tokens), words["[SEP]"]]}
        for tokens in reactions(root)
        if len(tokens) < 500
    ]
    loss = MaskedToken(mask_id=words["[MASK]"])
    found = hw.statistics(model, inputs=inputs, relative=True)
    for criterion, seed in (("set-aware", 0), ("michel", 0), ("random", 0), ("random", 1), ("random", 2)):
        plan = hw.plan(model, inputs=inputs, keep=1 / 8, criterion=criterion, loss=loss, statistics=found, seed=seed)
        CONSOLE.print(f"{criterion}: order of removal {[cut.head for cut in plan.cuts]}", highlight=False)
        assert criterion != "set-aware" or 5 not in plan.removed[plan.cuts[0].block], "head 5 went before the last"
    for layer, (ours, michel) in enumerate(orders_by_layer(model, inputs, found, loss)):
        CONSOLE.print(f"layer {layer:>2} alone: set-aware {ours}, michel {michel}", highlight=False)
    at = (1 / 8, 2 / 8, 3 / 8, 0.5)
    return compare(model, inputs=inputs, criteria=CRITERIA, at=at, asked=Asked(loss=loss))


def orders_by_layer(
    model: Model, inputs: Sequence[Any], found: Statistics, loss: MaskedToken
) -> Iterator[tuple[list[int], list[int]]]:
    """The orders in which all heads would go by each call of the one layer alone."""
    ((path, weight),) = output_weights(model, list(model.layout.blocks)).items()
    heads = len(weight)
    scores = hw.importance(model, inputs=inputs, loss=loss)["gate_gradient"].reshape(-1, heads)
    for key, michel in zip(found, scores, strict=True):
        one = found[key]
        cost = LayerCost(
            one.covariance.numpy(),
            weight.reshape(-1, weight.shape[2]),
            heads,
            energy=one.input_energy or 1.0,
            name=path,
        )
        gone: list[int] = []
        while len(gone) < heads:
            gone.append(min(set(range(heads)) - set(gone), key=lambda head: cost([*gone, head])))
        yield gone, michel.argsort().tolist()


#: Parts of Whisper whose heads go, as ``hw.plan(only=...)`` takes them.
PARTS = {"encoder": ["encoder"], "decoder/self": ["decoder/self"], "decoder/cross": ["decoder/cross"], "all": []}


def whisper(asked: argparse.Namespace) -> Iterator[Comparison]:
    """Word errors and teacher-forced loss of 32 spoken sentences; 140 others, five a clip, to choose and repair by."""
    model = hw.load(MODELS / "whisper")
    sentences = treebank(190, r"[A-Za-z ,.']{30,60}")
    measured = sentences[::4][:32]
    seen = clips(model, [one for at, one in enumerate(sentences) if at % 4][:140], together=5)
    found = statistics_of(model, seen, 4, asked.statistics)
    listening = Listening(model, measured, clips(model, measured))
    tasks = Tasks(model, seen, found, listening, len(measured), batch_size=4, criteria=asked.criteria)
    for part in asked.parts:
        yield from tasks.curves((0.1, 0.2, 0.4), PARTS[part]).values()


def stem(path: Path, found: Comparison, several: bool) -> Path:
    """The file of one comparison of several."""
    if not several:
        return path
    return path.with_name(f"{path.stem}-{re.sub('[^a-z]+', '-', found.loss.lower()).strip('-')}{path.suffix}")


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["flan_t5", "grammar", "rxnmapper", "whisper"])
    parser.add_argument("--criteria", type=lambda given: given.split(","), default=list(CRITERIA))
    parser.add_argument("--parts", type=lambda given: given.split(","), default=list(PARTS), help="of whisper")
    parser.add_argument("--statistics", type=Path, help="read from here where it exists, otherwise written")
    parser.add_argument("--json", type=Path, help="documents of the comparisons")
    parser.add_argument("--plot", type=Path, help="figures of the comparisons; needs matplotlib")
    asked = parser.parse_args()
    if asked.what in ("grammar", "whisper"):
        made = (grammar if asked.what == "grammar" else whisper)(asked)
    else:
        made = iter([(flan_t5 if asked.what == "flan_t5" else rxnmapper)(asked)])
    several = asked.what in ("grammar", "whisper")
    for found in made:
        found = replace(found, model=Path(found.model).name)
        if several:
            CONSOLE.print(table(found))
        else:
            show(found, None)
        if asked.json is not None:
            found.save(stem(asked.json, found, several))
        if asked.plot is not None:
            draw(found, stem(asked.plot, found, several))


if __name__ == "__main__":
    main()

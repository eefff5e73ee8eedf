"""Quality against heads removed on four more real models: the default, the random control and Michel.

    python -m benchmarks.pruning_curves flan_t5 | grammar | rxnmapper | whisper [--json FILE]

Everything is measured on passages kept apart from the choice and the repair. Models and texts are looked for as in
benchmarks.pruning; speech is spoken by espeak-ng.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwise as hw
from benchmarks.pruning import CONSOLE, DATA, MODELS, show
from headwise.measures.importance import MaskedToken
from headwise.models import Model
from headwise.verbs.choosing import Asked
from headwise.verbs.plan_compare import Comparison, compare

CRITERIA = ("set-aware", "michel", "random")
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


def flan_t5() -> Comparison:
    """Teacher-forced loss of the model's own translations into German."""
    model = hw.load(MODELS / "flan_t5")
    assert model.tokenizer is not None
    pairs = []
    for sentence in treebank(32):
        source = f"translate English to German: {sentence}"
        ids = torch.tensor([model.tokenizer(source)["input_ids"]])
        with torch.no_grad():
            made: Any = model.module.generate(ids, max_new_tokens=60, do_sample=False)  # type: ignore[operator]
        pairs.append((source, model.tokenizer.decode(made[0], skip_special_tokens=True)))
    return compare(model, pairs, at=AT, batch_size=16, **HOW)


def grammar() -> Comparison:
    """Divergence of the tagger's tag distributions from its own."""
    model = hw.load(MODELS / "grammar")
    texts = [*handbook(120), *treebank(120)]
    return compare(model, texts, at=AT, batch_size=16, asked=Asked(loss="fidelity_kl"), **HOW)


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


def rxnmapper() -> Comparison:
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
    plan = hw.plan(model, inputs=inputs, keep=1 / 8, loss=loss)
    CONSOLE.print(f"order of removal: {[cut.head for cut in plan.cuts]}", highlight=False)
    found = compare(model, inputs=inputs, criteria=CRITERIA, at=(1 / 8, 2 / 8, 3 / 8, 0.5), asked=Asked(loss=loss))
    assert plan.removed[plan.cuts[0].block].count(5) == 0, "head 5 went before the last"
    return found


def spoken(sentence: str, folder: Path) -> np.ndarray[Any, Any]:
    """Samples at 16 kHz."""
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", folder / "a.wav", sentence], check=True)
    subprocess.run(
        ["sox", folder / "a.wav", "-r", "16000", "-c", "1", folder / "b.wav"], check=True, stderr=subprocess.DEVNULL
    )
    with wave.open(str(folder / "b.wav")) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def whisper_inputs(model: Model, count: int) -> list[dict[str, torch.Tensor]]:
    """Spectrograms of spoken sentences, and what the decoder is to write."""
    from transformers import WhisperFeatureExtractor

    assert model.tokenizer is not None
    extract = WhisperFeatureExtractor(feature_size=80)
    start = [model.tokenizer.convert_tokens_to_ids(one) for one in ("<|startoftranscript|>", "<|notimestamps|>")]
    end = model.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for sentence in treebank(count, r"[A-Za-z ,.']{40,90}"):
            features = extract(spoken(sentence, Path(folder)), sampling_rate=16000, return_tensors="pt").input_features
            said = model.tokenizer(f" {sentence}", add_special_tokens=False)["input_ids"]
            found.append({"input_features": features, "decoder_input_ids": torch.tensor([[*start, *said, end]])})
    return found


def whisper() -> Comparison:
    """Teacher-forced loss of spoken sentences."""
    model = hw.load(MODELS / "whisper")
    inputs = whisper_inputs(model, 16)
    for part in ("decoder/self", "decoder/cross"):
        CONSOLE.print(f"only {part} (shares of all 72 heads):")
        show(compare(model, inputs=inputs, at=(0.1, 0.2), asked=Asked(only=[part]), **HOW), None)
    CONSOLE.print("only encoder (shares of all 72 heads):")
    return compare(model, inputs=inputs, at=(0.1, 0.2), asked=Asked(only=["encoder"]), **HOW)


def main() -> None:
    """Run one of them."""
    made = {"flan_t5": flan_t5, "grammar": grammar, "rxnmapper": rxnmapper, "whisper": whisper}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(made))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    show(made[asked.what](), asked.json)


if __name__ == "__main__":
    main()

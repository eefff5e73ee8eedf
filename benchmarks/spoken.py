"""Sentences spoken by espeak-ng, what Whisper makes of them, and how wrong that is."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.pruning_tasks import Counted
from headwise.models import Model

RATE = 16000
#: Silence between the sentences of a clip, seconds.
PAUSE = 0.4


def speak(sentence: str, folder: Path) -> np.ndarray[Any, Any]:
    """Samples at 16 kHz."""
    if not (shutil.which("espeak-ng") and shutil.which("sox")):
        raise SystemExit("espeak-ng or sox is not installed, so no sentence can be spoken")
    loud, plain = folder / "loud.wav", folder / "plain.wav"
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", loud, sentence], check=True)
    subprocess.run(["sox", loud, "-r", str(RATE), "-c", "1", plain], check=True, stderr=subprocess.DEVNULL)
    with wave.open(str(plain)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def marks(model: Model) -> tuple[list[int], int]:
    """Ids that begin a transcript without times, and the one that ends it."""
    assert model.tokenizer is not None
    start, plain, end = model.tokenizer.convert_tokens_to_ids(
        ["<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"]
    )
    return [start, plain], end


def clips(model: Model, sentences: Sequence[str], together: int = 1) -> list[dict[str, Tensor]]:
    """Spectrograms of half a minute with so many sentences one after another, and what the decoder is to write."""
    from transformers import WhisperFeatureExtractor

    assert model.tokenizer is not None
    extract, (start, end), found = WhisperFeatureExtractor(feature_size=80), marks(model), []
    silence = np.zeros(round(PAUSE * RATE), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for at in range(0, len(sentences), together):
            some = sentences[at : at + together]
            sound = np.concatenate([piece for one in some for piece in (speak(one, Path(folder)), silence)])
            assert len(sound) <= 30 * RATE, f"{len(sound) / RATE:.1f} s of speech do not fit half a minute"
            features = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
            said = model.tokenizer(" " + " ".join(some), add_special_tokens=False)["input_ids"]
            found.append({"input_features": features, "decoder_input_ids": torch.tensor([[*start, *said, end]])})
    return found


def words(text: str) -> str:
    """Small letters and single blanks, so that case and punctuation do not count."""
    return " ".join(re.sub(r"[^a-z ]", "", text.lower()).split())


@dataclass
class Listening:
    """Word errors of greedy transcripts, and the loss of the right ones.

    Attributes:
        model: Whisper.
        sentences: what was said.
        inputs: of each, as :func:`clips` gives them.
        longest: tokens after which a transcript is broken off.
    """

    model: Model
    sentences: Sequence[str]
    inputs: Sequence[dict[str, Tensor]]
    longest: int = 24
    _heard: Any = field(default=None, repr=False)

    def __call__(self, changed: Sequence[str]) -> dict[str, Counted]:
        """Both, with the encoder's pass of the whole model where no layer of the encoder changed."""
        module: Any = self.model.module
        if self._heard is None or any(".encoder.layers." in f".{path}" for path in changed):
            heard = torch.cat([module.model.encoder(one["input_features"]).last_hidden_state for one in self.inputs])
            if not changed:
                self._heard = heard
        else:
            heard = self._heard
        return {"teacher-forced loss": self._loss(heard), "word error rate": self._errors(heard)}

    def _loss(self, heard: Tensor) -> Counted:
        ids = [one["decoder_input_ids"][0] for one in self.inputs]
        begin = len(marks(self.model)[0])
        targets = torch.nn.utils.rnn.pad_sequence([one[begin:] for one in ids], batch_first=True, padding_value=-100)
        padded = torch.nn.utils.rnn.pad_sequence([one[:-1] for one in ids], batch_first=True, padding_value=0)
        logits = self._write(heard, padded).logits[:, begin - 1 :].float()
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return Counted(each.sum(1).double(), (targets != -100).sum(1).double())

    def _write(self, heard: Tensor, ids: Tensor, **more: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        module: Any = self.model.module
        return module(encoder_outputs=BaseModelOutput(last_hidden_state=heard), decoder_input_ids=ids, **more)

    def transcripts(self, heard: Tensor) -> list[str]:
        """The likeliest token each time."""
        assert self.model.tokenizer is not None
        start, end = marks(self.model)
        now = torch.tensor([start] * len(heard))
        written, done, past = (
            torch.empty(len(heard), 0, dtype=torch.long),
            torch.zeros(len(heard), dtype=torch.bool),
            None,
        )
        for _ in range(self.longest):
            out = self._write(heard, now, cache=past, use_cache=True)
            past, now = out.cache, out.logits[:, -1:].argmax(-1)
            done |= now[:, 0] == end
            if bool(done.all()):
                break
            written = torch.cat([written, now.masked_fill(done[:, None], end)], 1)
        return list(self.model.tokenizer.batch_decode(written, skip_special_tokens=True))

    def _errors(self, heard: Tensor) -> Counted:
        try:
            import jiwer
        except ImportError:
            raise SystemExit("counting word errors needs jiwer: pip install 'headwise[bench]'") from None
        wrong, of = [], []
        for said, got in zip(self.sentences, self.transcripts(heard), strict=True):
            one = jiwer.process_words(words(said), words(got))
            wrong.append(one.substitutions + one.deletions + one.insertions)
            of.append(one.hits + one.substitutions + one.deletions)
        return Counted(torch.tensor(wrong).double(), torch.tensor(of).double())

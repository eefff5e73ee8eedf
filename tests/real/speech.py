"""Sentences spoken by espeak-ng, as Whisper's input features."""

from __future__ import annotations

import subprocess
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SENTENCES = (
    "The committee will meet on Thursday morning to discuss the plans for the summer.",
    "A small boat crossed the river before the rain began.",
    "She opened the window and looked out over the quiet garden.",
    "My brother sold his old car and bought a bicycle instead.",
    "The train to the coast was late again this evening.",
    "He has written three letters to the editor of the newspaper.",
    "They painted the kitchen walls yellow and the ceiling white.",
    "Nobody in the village could remember such a cold winter.",
)
#: Encoder positions of a second of sound.
FRAMES = 50


@dataclass(frozen=True)
class Spoken:
    """The features (1, mel, time) of half a minute with the sentence at its beginning, and its encoder positions."""

    text: str
    features: torch.Tensor
    frames: int


def spoken(folder: Path, extractor: object) -> list[Spoken]:
    """Every sentence, by ``espeak-ng`` and ``sox``."""
    return [_spoken(text, folder, extractor) for text in SENTENCES]


def _spoken(text: str, folder: Path, extractor: object) -> Spoken:
    loud, plain = folder / "loud.wav", folder / "plain.wav"
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(loud), text], check=True)
    subprocess.run(["sox", str(loud), "-r", "16000", "-c", "1", str(plain)], check=True, stderr=subprocess.DEVNULL)
    with wave.open(str(plain)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    features = extractor(samples, sampling_rate=16000, return_tensors="pt").input_features  # type: ignore[operator]
    return Spoken(text, features, min(1500, round(len(samples) / 16000 * FRAMES)))

"""The tokenizer and the processor that lie beside a model's weights."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

__all__ = ["FAILURES", "Companion", "load_processor", "load_tokenizer"]

#: any of these says that a tokenizer was saved here
_TOKENIZER: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "source.spm",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "bpe.codes",
    "tiktoken.model",
    "tekken.json",
)
_PROCESSOR: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

#: what building a tokenizer or processor from files of any content can raise
FAILURES: Final = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OSError,
    ImportError,
    RuntimeError,
    NotImplementedError,
    AssertionError,
    ArithmeticError,
    EOFError,
    MemoryError,
    struct.error,
    SafetensorError,
    StrictDataclassError,
    UnpicklingError,
)


@dataclass(frozen=True)
class Companion:
    """A tokenizer or processor; ``reason`` says why there is none."""

    thing: Any | None
    reason: str | None = None


def load_tokenizer(path: Path, *, gguf: str | None, trust_remote_code: bool) -> Companion:
    """The tokenizer of a folder. A tokenizer that knows no words is none: its files were not found."""
    from transformers import AutoTokenizer

    if gguf is None and not any((path / name).exists() for name in _TOKENIZER):
        return Companion(None, f"there are no tokenizer files in {path}")
    extra = {"gguf_file": gguf} if gguf is not None else {}
    try:
        found = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code, **extra
        )
    except FAILURES as error:
        return Companion(None, f"the tokenizer files cannot be used: {_first_sentence(error)}")
    longest = getattr(found, "model_max_length", None)
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int | float)):
        return Companion(None, f"model_max_length in tokenizer_config.json is {longest!r}, and a number is needed")
    if not _knows_words(found):
        return Companion(None, f"{type(found).__name__} found no vocabulary in {path}")
    return Companion(found)


def _knows_words(tokenizer: Any) -> bool:
    words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) - {"\u2581", ""}
    return bool(words)


def load_processor(path: Path, *, trust_remote_code: bool) -> Companion:
    """The processor (feature extractor, image processor) of a folder."""
    from transformers import AutoProcessor

    if not any((path / name).exists() for name in _PROCESSOR):
        return Companion(None)
    try:
        return Companion(
            AutoProcessor.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
        )
    except FAILURES as error:
        return Companion(None, f"the processor cannot be used: {_first_sentence(error)}")


def _first_sentence(error: BaseException) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 160 else line[:157] + "..."

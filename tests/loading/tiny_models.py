"""Small models and a tokenizer of ten words; what tests do to saved folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, LlamaConfig, PreTrainedTokenizerFast

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "dog")


def word_tokenizer(*, frame: bool = True, pad: bool = True, side: str = "right") -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]"}
    if frame:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    if pad:
        special |= {"pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side=side, **special)


def bert_config(**extra: Any) -> BertConfig:
    sizes = {
        "hidden_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 23,
        "vocab_size": 29,
        "max_position_embeddings": 17,
    }
    return BertConfig(**(sizes | extra))


def llama_config(**extra: Any) -> LlamaConfig:
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 31,
        "vocab_size": 37,
        "max_position_embeddings": 41,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(sizes | extra))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        config.pop(name, None) if value is ... else config.__setitem__(name, value)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return change

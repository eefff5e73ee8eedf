"""A tokenizer that cuts words into pieces, and small models that read it."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

import headwise as hw

WORDS = """
    [PAD] [UNK] [CLS] [SEP] the a cat dog sat saw on mat big red run ##ning ##s un ##happy she he her them . , ( ) [ ]
    “ ” it was and not do n ##' ##t said : house of stone "
"""
PIECES = WORDS.split()


def tokenizer(*, frame: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {piece: at for at, piece in enumerate(PIECES)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    if frame:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sharp(module: Any, factor: float) -> Any:
    """Larger query and key projections, so that patterns are not flat."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "query", "key", "c_attn")):
                parameter.mul_(factor)
    return module.eval()


def bert(seed: int = 3, factor: float = 8.0) -> hw.Model:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(PIECES), hidden_size=20, num_hidden_layers=2, num_attention_heads=5, intermediate_size=23,
        max_position_embeddings=97,
    )  # fmt: skip
    return hw.wrap(sharp(BertModel(config), factor), tokenizer())


def gpt2(seed: int = 3, factor: float = 4.0) -> hw.Model:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_head=3, n_embd=21, vocab_size=len(PIECES), n_positions=97, bos_token_id=0, eos_token_id=0
    )
    return hw.wrap(sharp(GPT2Model(config), factor), tokenizer(frame=False))


def llama(seed: int = 3, factor: float = 6.0, **more: Any) -> hw.Model:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(PIECES), hidden_size=24, intermediate_size=29, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=97, **more,
    )  # fmt: skip
    return hw.wrap(sharp(LlamaModel(config), factor), tokenizer(frame=False))


TEXTS = [
    'The big red cat saw the dog (and the cat) on the mat. It said: "not running".',
    "She was unhappy, and he saw her run.",
    "the dog sat on the mat and the dog saw a house of stone [ big ] .",
    "A house was not a house of stone, and it was red.",
    "He said “the cat runs” and the cat sat.",
    "the cats saw them (the dogs (big) and cats).",
]

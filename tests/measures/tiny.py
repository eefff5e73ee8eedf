"""Tiny random models and data for the tests of measures. Sizes are distinct."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 53


def llama(seed: int = 7, sharp: float = 9.0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    }  # fmt: skip
    return sharpened(LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval(), sharp)


def sharpened(module: Any, factor: float) -> Any:
    """Larger projections, so that heads matter."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2 and any(part in name for part in ("_proj", "query", "key", "value", "output.dense")):
                parameter.mul_(factor)
    return module


BERT = {
    "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip


def bert(kind: type[nn.Module] = BertModel, **changes: Any) -> Any:
    torch.manual_seed(7)
    return sharpened(kind(BertConfig(**(BERT | changes))).eval(), 5.0)


def masked() -> Any:
    return bert(BertForMaskedLM)


def classifier(**changes: Any) -> Any:
    return bert(BertForSequenceClassification, num_labels=3, **changes)


def tagger() -> Any:
    return bert(BertForTokenClassification, num_labels=3)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(7)
    config = GPT2Config(n_layer=2, n_head=3, n_embd=15, vocab_size=VOCABULARY, n_positions=64)
    return GPT2LMHeadModel(config).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(7)
    config = T5Config(
        d_model=24, d_kv=7, d_ff=29, num_layers=2, num_heads=3, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config).eval()


def albert() -> AlbertModel:
    torch.manual_seed(7)
    config = AlbertConfig(
        hidden_size=24, embedding_size=11, intermediate_size=29, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=64,
    )  # fmt: skip
    return sharpened(AlbertModel(config).eval(), 4.0)


def ids(*lengths: int, seed: int = 11) -> list[dict[str, list[int]]]:
    """Passages of these lengths, as ready inputs."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()} for length in lengths]


def pairs(*lengths: int, seed: int = 11) -> list[dict[str, list[int]]]:
    """Passages with a decoder's input."""
    targets = ids(*(length // 2 + 2 for length in lengths), seed=seed + 1)
    return [
        {**source, "decoder_input_ids": [0, *target["input_ids"]]}
        for source, target in zip(ids(*lengths, seed=seed), targets, strict=True)
    ]


def tensor(example: dict[str, list[int]]) -> dict[str, Tensor]:
    """One passage as a batch of one."""
    return {name: torch.tensor([value]) for name, value in example.items()}


def heads_of(module: nn.Module, path: str, inputs: dict[str, Tensor], heads: int) -> Tensor:
    """What enters an output projection, by head: (B, Q, H, D_v), by a hook of our own."""
    found: list[Tensor] = []
    handle = module.get_submodule(path).register_forward_pre_hook(lambda _m, args: found.append(args[0].detach()))
    try:
        with torch.no_grad():
            module(**inputs)
    finally:
        handle.remove()
    return found[0].unflatten(-1, (heads, -1))

"""What the tests of surgery share: small models with noise on every weight, and the masked reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from headwise.layout import HeadId
from headwise.models import discover, gate
from headwise.models.probe import run_model, tensors_of
from headwise.models.restore import unchanged

logging.set_verbosity_error()

IDS = torch.tensor([[3, 5, 7, 11, 13], [17, 19, 23, 29, 2]])


def noisy(model: nn.Module, scale: float = 0.2) -> nn.Module:
    """``model`` in eval mode with noise on every parameter, so that no two heads are alike."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=draw) * scale)
    return model.eval()


def outputs(model: nn.Module, **inputs: Any) -> list[Tensor]:
    """Every tensor that the model gives."""
    with unchanged(model):
        return tensors_of(run_model(model, inputs))


def masked(model: nn.Module, plan: Mapping[str, list[int]], **inputs: Any) -> list[Tensor]:
    """The masked reference, by gates."""
    layout = discover(model)
    heads = [HeadId(site.key, head) for site in layout.sites for head in plan.get(site.block, ())]
    with gate(model, heads):
        return outputs(model, **inputs)


def apart(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest difference."""
    assert [one.shape for one in left] == [one.shape for one in right]
    return max(
        (float((one - two).abs().max()) for one, two in zip(left, right, strict=True) if one.numel()), default=0.0
    )


def bert(**extra: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {
        "vocab_size": 31,
        "hidden_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 23,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    return noisy(BertModel(BertConfig(**(sizes | extra))))


def decoder(name: str, **extra: Any) -> nn.Module:
    """A small model of the Llama kind: 4 query heads, 2 key-value heads, 2 layers."""
    import transformers

    sizes = {
        "vocab_size": 31,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 29,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(sizes | extra))
    return noisy(getattr(transformers, f"{name}ForCausalLM")(config))


def gpt2(**extra: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 31, "eos_token_id": None, "bos_token_id": 1}
    torch.manual_seed(0)
    return noisy(GPT2LMHeadModel(GPT2Config(**(sizes | extra))))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=31,
        d_model=20,
        d_kv=5,
        d_ff=23,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return noisy(T5ForConditionalGeneration(config))


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=31,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=23,
    )
    torch.manual_seed(0)
    return noisy(AlbertModel(config))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=31,
        d_model=20,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=23,
        decoder_ffn_dim=23,
        num_mel_bins=7,
        max_source_positions=11,
        max_target_positions=29,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    return noisy(WhisperForConditionalGeneration(config))

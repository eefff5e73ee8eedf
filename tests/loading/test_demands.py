"""What a model demands of its input is read from its weights, and is true: at the limit it runs, beyond it does not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tiny_models import bert_config, llama_config
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModel,
    BartConfig,
    BloomConfig,
    CLIPTextConfig,
    DistilBertConfig,
    FSMTConfig,
    GPT2Config,
    GPTJConfig,
    MarianConfig,
    MPNetConfig,
    OPTConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)

from headwise.data import batches
from headwise.models import Model, wrap

SMALL = {
    "vocab_size": 43,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 23,
    "pad_token_id": 1,
}
BARTISH = {
    "vocab_size": 43,
    "d_model": 20,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 23,
    "decoder_ffn_dim": 23,
    "max_position_embeddings": 19,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
GPT2 = {
    "vocab_size": 43,
    "n_embd": 20,
    "n_layer": 2,
    "n_head": 5,
    "n_positions": 19,
    "bos_token_id": 2,
    "eos_token_id": 3,
}

CONFIGS: dict[str, Any] = {
    "bert": bert_config(vocab_size=43, max_position_embeddings=19),
    "roberta": RobertaConfig(**SMALL, max_position_embeddings=21, type_vocab_size=1),
    "mpnet": MPNetConfig(**SMALL, max_position_embeddings=21),
    "albert": AlbertConfig(**SMALL, embedding_size=11, max_position_embeddings=19),
    "distilbert": DistilBertConfig(
        vocab_size=43, dim=20, n_layers=2, n_heads=5, hidden_dim=23, max_position_embeddings=19
    ),
    "opt": OPTConfig(**(SMALL | {"ffn_dim": 23, "word_embed_proj_dim": 20}), max_position_embeddings=19),
    "gpt2": GPT2Config(**GPT2),
    "gptj": GPTJConfig(**(GPT2 | {"rotary_dim": 4})),
    "bart": BartConfig(**BARTISH),
    "marian": MarianConfig(**BARTISH),
    "fsmt": FSMTConfig(**(BARTISH | {"src_vocab_size": 43, "tgt_vocab_size": 41})),
    "llama": llama_config(vocab_size=43),
    "bloom": BloomConfig(vocab_size=43, hidden_size=20, n_layer=2, n_head=5),
    "t5": T5Config(vocab_size=43, d_model=20, d_kv=4, d_ff=23, num_layers=2, num_heads=5, decoder_start_token_id=0),
    "clip_text": CLIPTextConfig(**SMALL, max_position_embeddings=19, bos_token_id=2, eos_token_id=3),
}
#: family -> (positions, trained length, decoder positions)
LIMITS: dict[str, tuple[int | None, int | None, int | None]] = {
    "bert": (19, None, None),
    "roberta": (19, None, None),
    "mpnet": (19, None, None),
    "albert": (19, None, None),
    "distilbert": (19, None, None),
    "opt": (19, None, None),
    "gpt2": (19, None, None),
    "gptj": (19, None, None),
    "bart": (19, None, 19),
    "marian": (19, None, 19),
    "fsmt": (None, None, None),
    "llama": (None, 41, None),
    "bloom": (None, None, None),
    "t5": (None, None, None),
    "clip_text": (19, None, None),
}


def built(family: str) -> Model:
    torch.manual_seed(0)
    return wrap(AutoModel.from_config(CONFIGS[family]).eval())


def hidden(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    extra = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
    with torch.no_grad():
        return module(**inputs, **extra).last_hidden_state


def example(model: Model, length: int, decoder: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.arange(length)[None] % 29 + 5
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs | ({"decoder_input_ids": torch.full((1, decoder), 7)} if model.input_rules.encoder_decoder else {})


@pytest.mark.parametrize("family", CONFIGS)
def test_limits(family: str) -> None:
    rules = built(family).input_rules
    assert (rules.positions, rules.trained_length, rules.decoder_positions) == LIMITS[family]
    assert rules.vocabulary == 43
    assert rules.main_input == "input_ids"


@pytest.mark.parametrize("family", [name for name, limits in LIMITS.items() if limits[0] is not None])
def test_limit_is_true(family: str) -> None:
    model = built(family)
    limit = model.input_rules.positions
    assert limit is not None
    hidden(model.module, example(model, limit))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        hidden(model.module, example(model, limit + 1))


@pytest.mark.parametrize("family", [name for name, limits in LIMITS.items() if limits[0] is None])
def test_no_limit_is_true(family: str) -> None:
    model = built(family)
    assert hidden(model.module, example(model, 150)).shape[0] == 1


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_decoder_limit_is_true(family: str) -> None:
    model = built(family)
    hidden(model.module, example(model, 3, decoder=19))
    with pytest.raises((IndexError, RuntimeError)):
        hidden(model.module, example(model, 3, decoder=20))


def test_other_inputs() -> None:
    whisper = WhisperConfig(
        vocab_size=43,
        d_model=20,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=5,
        decoder_attention_heads=5,
        max_source_positions=11,
        max_target_positions=13,
        num_mel_bins=7,
        pad_token_id=1,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
    )
    rules = wrap(AutoModel.from_config(whisper)).input_rules
    assert (rules.main_input, rules.encoder_decoder, rules.decoder_start) == ("input_features", True, 2)
    assert (rules.decoder_positions, rules.decoder_vocabulary) == (13, 43)
    vit = ViTConfig(
        hidden_size=20, num_hidden_layers=1, num_attention_heads=5, intermediate_size=23, image_size=8, patch_size=4
    )
    assert wrap(AutoModel.from_config(vit)).input_rules.main_input == "pixel_values"


def test_plain_module() -> None:
    rules = wrap(nn.Linear(3, 5)).input_rules
    assert rules.main_input == "input"
    assert rules.vocabulary is None
    assert rules.float_dtype == torch.float32


PROMPTS = [[5, 6], [5, 6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in ("clip_text", "mpnet")])
def test_a_padded_prompt_behaves_as_if_alone(family: str, side: str) -> None:
    """Case 14: learned positions, rotary, ALiBi, relative; the prompts [5, 6] and [5, 6, 7, 8]."""
    model = built(family)
    rules = model.input_rules
    source = [
        {"input_ids": ids, **({"decoder_input_ids": [2, *ids]} if rules.encoder_decoder else {})} for ids in PROMPTS
    ]
    if side == "left" and family in ("bart", "marian", "fsmt", "bloom"):
        with pytest.raises(ValueError, match="would give short passages wrong positions"):
            batches(model, source, padding_side="left")
        return
    alone = {index: _rows(model, [one])[0] for index, one in enumerate(source)}
    together = _rows(model, source, padding_side=side)
    for index, truth in alone.items():
        torch.testing.assert_close(together[index], truth, rtol=0, atol=1e-5)


def _rows(model: Model, source: list[dict[str, Any]], **options: Any) -> dict[int, torch.Tensor]:
    found = {}
    for batch in batches(model, source, **options):
        out = hidden(model.module, batch.inputs)
        kinds = batch.decoder_rows if model.input_rules.encoder_decoder else batch.input_rows
        assert kinds is not None
        found |= {passage: out[row][kinds[row] != 0] for row, passage in enumerate(batch.passages)}
    return found


def test_left_padding_without_positions_would_be_wrong() -> None:
    """Case 14: a tiny GPT-2 without position ids is off by far more than rounding."""
    model = built("gpt2")
    (batch,) = batches(model, [{"input_ids": ids} for ids in PROMPTS], padding_side="left")
    right = hidden(model.module, batch.inputs)
    wrong = hidden(model.module, {name: value for name, value in batch.inputs.items() if name != "position_ids"})
    shown = batch.inputs["attention_mask"] == 1
    assert (right - wrong)[shown].abs().max() > 1e-3

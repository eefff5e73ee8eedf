"""Models read from a config without weights, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BertConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)

from headwise.costs import block_parameters, grid, ledger
from headwise.errors import InputError, ModelError, UnsupportedError
from headwise.models import wrap
from headwise.verbs import cost, sweep
from headwise.verbs.bandwidth import measure_bandwidth
from headwise.verbs.cost_model import numbers_of

SMALL = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def folder_of(tmp_path: Path, **fields: Any) -> Path:
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL, **fields}
    values = {name: value for name, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return tmp_path


def test_a_folder_a_file_a_config_and_a_model_agree(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    books = [
        cost(given, context=7, batch=3, dtype="float32")
        for given in (folder, str(folder), folder / "config.json", LlamaConfig(**SMALL), model, wrap(model))
    ]
    assert len({book.parameters for book in books}) == 1
    assert books[0].parameters.total == sum(weight.numel() for weight in model.parameters())
    assert len({book.cache for book in books}) == 1
    assert len({book.prefill for book in books}) == 1
    assert [cost.site.block for cost in books[0].sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert books[0].numbers.name == str(folder)


def test_a_width_of_its_own_is_read_from_the_weights(tmp_path: Path) -> None:
    """Case 39: 24 / 4 is 6, the heads are 8 wide."""
    book = cost(folder_of(tmp_path), context=7, dtype="float16")
    assert book.sites[0].site.d_k == 8
    assert book.cache.token_bytes == 2 * 2 * 2 * 8 * 2


def test_plain_numbers_agree_with_the_config(tmp_path: Path) -> None:
    plain = grid(24, 4, 2, kv_heads=2, head_dim=8, d_ff=19, vocab=31)
    left, right = ledger(plain, context=7, dtype="float32"), cost(folder_of(tmp_path), context=7, dtype="float32")
    assert left.prefill == right.prefill
    assert left.decode == right.decode
    assert left.cache == right.cache
    assert left.traffic == right.traffic
    norms = (2 * 2 + 1) * 24
    assert (right.parameters.total or 0) - (left.parameters.total or 0) == norms
    assert cost(plain, context=7, dtype="float32") == left


COMPLETE = {
    "n_head": GPT2Config(),
    "num_heads": T5Config(),
    "num_attention_heads": BertConfig(),
    "hidden_size": LlamaConfig(),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_missing_fields_are_named(name: str, tmp_path: Path) -> None:
    """transformers would fill in the numbers of another model without a word."""
    COMPLETE[name].save_pretrained(tmp_path)
    assert cost(tmp_path, context=7).parameters.total is not None
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del raw[name]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ModelError, match=f"config.json lacks {name}, which decide"):
        cost(tmp_path)


def test_several_missing_fields(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks hidden_size, num_hidden_layers, which"):
        cost(folder_of(tmp_path, hidden_size=None, num_hidden_layers=None))


def test_defaults_inside_a_composite_config_are_said(tmp_path: Path) -> None:
    config = Gemma3Config(text_config={**SMALL, "sliding_window": 5})
    raw = config.to_dict()
    for name in ("num_attention_heads", "vocab_size"):
        del raw["text_config"][name]
    raw["vision_config"] |= {
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "intermediate_size": 19,
        "num_attention_heads": 2,
    }
    raw["architectures"] = ["Gemma3ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    book = cost(tmp_path, context=7)
    assert "text_config lacks num_attention_heads, vocab_size: defaults of transformers were taken" in book.notes
    assert any(note.startswith("the vision part is counted over its own 196 positions") for note in book.notes)


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    return tmp_path


BROKEN = {
    "is not valid JSON": lambda path: write(path, "{"),
    "is not valid JSON (Exceeds the limit": lambda path: write(path, '{"foo": %s}' % ("9" * 5000)),
    "holds a JSON list": lambda path: write(path, "[]"),
    "has no config.json; it has weights.bin": lambda path: ((path / "weights.bin").write_bytes(b"") and path) or path,
    "has no model_type": lambda path: write(path, "{}"),
    "model type 'llamma' is not known": lambda path: folder_of(path, model_type="llamma"),
    "cannot be used": lambda path: folder_of(path, num_attention_heads="many"),
    "4 query heads are no multiple of 3 key-value heads": lambda path: folder_of(path, num_key_value_heads=3),
    "there is no such folder": lambda path: path / "nowhere",
    "a config file is called config.json": lambda path: (folder_of(path) / "config.json").rename(path / "other.json"),
}


@pytest.mark.parametrize("words", BROKEN)
def test_broken_configs(words: str, tmp_path: Path) -> None:
    given = BROKEN[words](tmp_path)
    with pytest.raises(ModelError) as caught:
        cost(given)
    assert words in str(caught.value)


def test_an_id_that_is_not_in_the_cache() -> None:
    with pytest.raises(ModelError, match="it is in neither"):
        cost("nobody/no-such-model")


def test_quantised_configs_are_accounted_for(tmp_path: Path) -> None:
    """Only numbers are needed, so packed weights are no obstacle."""
    folder = folder_of(tmp_path, quantization_config={"quant_method": "fp8"})
    assert cost(folder, context=7).parameters.total == cost(LlamaConfig(**SMALL), context=7).parameters.total


def test_an_output_matrix_that_is_stored_apart_is_said(tmp_path: Path) -> None:
    """Only names and shapes of the checkpoint are read; a damaged one is no obstacle, and is said."""
    folder = folder_of(tmp_path, tie_word_embeddings=True)
    assert not any("stores both" in note for note in cost(folder, context=7).notes)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file({name: torch.zeros(31, 24) for name in names}, folder / "model.safetensors")
    notes = cost(folder, context=7).notes
    assert any("stores both: if they differ, the model has 744 parameters more" in note for note in notes)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    assert any(note.startswith("the weights were not looked at") for note in cost(folder, context=7).notes)


def test_torchs_own_attention() -> None:
    module = nn.TransformerEncoderLayer(24, 4, 19, batch_first=True)
    read = numbers_of(module)
    (site,) = read.attention
    assert (site.query_heads, site.kv_heads, site.d_k, site.causal) == (4, 4, 6, False)
    assert block_parameters(site).total == sum(weight.numel() for weight in module.self_attn.parameters())
    assert read.rest.matrices == {"encoder": 2 * 24 * 19}
    assert read.rest.parameters == sum(weight.numel() for weight in module.parameters())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)


def test_a_model_without_attention() -> None:
    with pytest.raises(UnsupportedError, match="Plain has no attention that the ledger understands; looked for"):
        cost(Plain())


def test_what_is_no_model() -> None:
    for given in (3, None, {"hidden_size": 3}):
        with pytest.raises(InputError):
            cost(given)


def test_weights_that_contradict_the_module() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    attention: Any = model.model.layers[1].self_attn
    attention.k_proj = nn.Linear(24, 7, bias=False)
    with pytest.raises(ModelError, match=r"layers.1.self_attn: keys are 7 numbers wide, no multiple of 8"):
        numbers_of(model)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    assert cost(model, context=7).parameters.total == cost(LlamaConfig(**SMALL), context=7).parameters.total


def test_sweep_of_a_config() -> None:
    table = sweep(LlamaConfig(**{**SMALL, "head_dim": 16}), "kv-heads", context=7)
    assert table.column("kv_heads") == [1, 2, 4]
    assert table.own == 1


def test_logits_spread_as_the_config_draws_weights() -> None:
    table = sweep(LlamaConfig(**{**SMALL, "head_dim": 16}), "heads", context=7)
    assert table.column("logit_std") == pytest.approx([24 * 0.02**2] * len(table.rows))


def test_measured_bandwidth_is_plausible() -> None:
    rate = measure_bandwidth(size=2**22, seconds=0.05)
    assert 1e8 < rate < 1e14
    assert cost(LlamaConfig(**SMALL), bandwidth=rate).traffic.seconds > 0  # type: ignore[union-attr, operator]
    with pytest.raises(InputError, match="seconds positive"):
        measure_bandwidth(seconds=0)


def test_plain_numbers_need_neither_torch_nor_transformers() -> None:
    code = """
import sys
from headwise.costs import grid, ledger, sweep
ledger(grid(64, 4, 2)).to_document()
sweep(grid(64, 4, 2), "heads")
print([name for name in ("torch", "transformers", "pandas", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

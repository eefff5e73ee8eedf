"""Tiny models saved once, and copies of them that a test may damage."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, BertModel, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import bert_config, llama_config, word_tokenizer

logging.set_verbosity_error()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders bert, bert_mlm, llama, t5, and llama_shards (in several files)."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    BertModel(bert_config()).save_pretrained(root / "bert")
    BertForMaskedLM(bert_config()).save_pretrained(root / "bert_mlm")
    llama = LlamaForCausalLM(llama_config())
    llama.save_pretrained(root / "llama")
    llama.save_pretrained(root / "llama_shards", max_shard_size="12KB")
    t5 = T5Config(d_model=12, d_kv=5, d_ff=13, num_layers=2, num_heads=3, vocab_size=29, decoder_start_token_id=0)
    T5ForConditionalGeneration(t5).save_pretrained(root / "t5")
    word_tokenizer().save_pretrained(root / "bert")
    return root


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a saved folder, for the test to damage."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(saved / name, tmp_path / name))

    return copied

"""What the tests of the seam share: small models, the truth from eager attention in float64, an observer."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.utils import logging

from headwise.kernels import Wanted
from headwise.models import AttentionCall

sys.path.insert(0, str(Path(__file__).parent))

logging.set_verbosity_error()


class Collector:
    """Keeps the calls that it sees."""

    def __init__(self, wanted: Wanted | None = None) -> None:
        self.wanted = wanted or Wanted(rows=True)
        self.calls: list[AttentionCall] = []

    def want(self, site: Any, problem: Any) -> Wanted:
        return self.wanted

    def see(self, call: AttentionCall) -> None:
        self.calls.append(call)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def collect() -> type[Collector]:
    return Collector


@contextmanager
def finite_eager_masks() -> Iterator[None]:
    """Eager masks whose minimum is float32's: some models take their softmax in float32, where float64's is -inf."""
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = lambda **given: eager_mask(**{**given, "dtype": torch.float32})
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]


def eager_attentions(model: nn.Module, inputs: Mapping[str, Any]) -> dict[tuple[str, str], list[Tensor]]:
    """(stack of the output, kind) -> weights of each layer, from the model in float64 with eager attention."""
    truth = copy.deepcopy(model).double().eval()
    truth.set_attn_implementation("eager")
    doubled = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.no_grad(), finite_eager_masks():
        try:
            output = truth(**doubled, output_attentions=True)
        except RuntimeError as failure:
            if "ouble" not in str(failure):
                raise
            output = truth.float()(**inputs, output_attentions=True)
    found = {
        ("encoder", "self"): output.get("encoder_attentions"),
        ("decoder", "self"): output.get("decoder_attentions"),
        ("decoder", "cross"): output.get("cross_attentions"),
        ("", "self"): output.get("attentions"),
    }
    return {key: [weights.double() for weights in value] for key, value in found.items() if value}


@pytest.fixture
def truth() -> Any:
    return eager_attentions


def entropy_of(weights: Tensor) -> Tensor:
    """Entropy in nats of rows that may sum to less than 1 (a sink took the rest)."""
    share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return -torch.special.xlogy(share, share).sum(-1)


@pytest.fixture
def entropies() -> Any:
    return entropy_of


@pytest.fixture
def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=31,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=23,
        max_position_embeddings=64,
    )
    return BertModel(config).eval()


@pytest.fixture
def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=29,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny_albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertModel

    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=31,
        embedding_size=8,
        hidden_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=23,
    )
    return AlbertModel(config).eval()


@pytest.fixture
def tiny_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=31, d_model=20, d_kv=5, d_ff=23, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.tensor([[3, 5, 7, 11, 13, 17, 19], [23, 29, 2, 4, 6, 8, 10]])

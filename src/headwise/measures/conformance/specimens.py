"""Tiny models and data on which a measure is tried: causal with grouped heads, bidirectional, encoder-decoder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.data import PADDING, Batch, batches
from headwise.layout import Block, Projection
from headwise.models import Model, wrap

__all__ = ["MODELS", "Specimen", "padded", "permuted", "specimens", "without_columns"]

_LENGTHS: Final = (11, 3, 7, 13, 5)
_VOCABULARY: Final = 53

Example = Mapping[str, list[int]]


@dataclass(frozen=True)
class Specimen:
    """A model and passages for it.

    Attributes:
        name: for messages.
        model: the model.
        examples: passages of different lengths, as ready inputs.
        left: whether padding on the left leaves the model's numbers as they are.
    """

    name: str
    model: Model
    examples: tuple[Example, ...]
    left: bool

    def batch(self, examples: Sequence[Example] | None = None) -> Batch:
        """All passages (or those given) in one batch."""
        given = list(self.examples if examples is None else examples)
        return next(iter(batches(self.model, given, batch_size=len(given))))


def specimens(kinds: Iterable[str] | None = None) -> tuple[Specimen, ...]:
    """The models of these kinds (all by default), made anew: nobody else holds them."""
    with torch.random.fork_rng(devices=[]):
        return tuple(MODELS[kind]() for kind in (MODELS if kinds is None else kinds))


def _ids(generator: torch.Generator, length: int) -> list[int]:
    found: list[int] = torch.randint(3, _VOCABULARY, (length,), generator=generator).tolist()
    return found


def _sharpened(module: nn.Module) -> nn.Module:
    """Larger query and key projections, so that patterns are far from uniform."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", ".query.", ".key.")):
                parameter.mul_(9.0)
            elif any(part in name for part in ("v_proj", "o_proj", ".value.", "attention.output.dense")):
                parameter.mul_(4.0)
    return module.eval()


def _llama() -> Specimen:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=29,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_VOCABULARY,
        max_position_embeddings=64,
    )
    generator = torch.Generator().manual_seed(11)
    examples = tuple({"input_ids": _ids(generator, length)} for length in _LENGTHS)
    return Specimen("a causal model", wrap(_sharpened(LlamaForCausalLM(config))), examples, left=True)


def _bert() -> Specimen:
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    config = BertConfig(
        hidden_size=20,
        intermediate_size=29,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=_VOCABULARY,
        max_position_embeddings=64,
    )
    generator = torch.Generator().manual_seed(13)
    examples = tuple({"input_ids": _ids(generator, length)} for length in _LENGTHS)
    return Specimen("a bidirectional model", wrap(_sharpened(BertModel(config))), examples, left=False)


def _t5() -> Specimen:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(7)
    config = T5Config(
        d_model=24, d_kv=7, d_ff=29, num_layers=2, num_heads=3, vocab_size=_VOCABULARY, decoder_start_token_id=0
    )
    generator = torch.Generator().manual_seed(17)
    examples = tuple(
        {"input_ids": _ids(generator, length), "decoder_input_ids": [0, *_ids(generator, length // 2 + 2)]}
        for length in _LENGTHS
    )
    model = wrap(T5ForConditionalGeneration(config).eval())  # its initial projections are sharp as they are
    return Specimen("an encoder-decoder model", model, examples, left=False)


#: Kinds of models, and what makes one.
MODELS: Final[Mapping[str, Callable[[], Specimen]]] = {"causal": _llama, "bidirectional": _bert, "encoder-decoder": _t5}


def padded(batch: Batch, extra: int, *, left: bool = False) -> Batch:
    """``batch`` with so many more columns of padding."""
    sides = (extra, 0) if left else (0, extra)
    inputs = {name: nn.functional.pad(value, sides) for name, value in batch.inputs.items()}
    for name, ids in (("attention_mask", "input_ids"), ("decoder_attention_mask", "decoder_input_ids")):
        if ids in batch.inputs and name not in inputs:
            inputs[name] = nn.functional.pad(torch.ones_like(batch.inputs[ids]), sides)
    rows = [_rows(kinds, sides) for kinds in (batch.input_rows, batch.decoder_rows)]
    return replace(batch, inputs=inputs, input_rows=rows[0], decoder_rows=rows[1])


def _rows(kinds: Tensor | None, sides: tuple[int, int]) -> Tensor | None:
    return None if kinds is None else nn.functional.pad(kinds, sides, value=PADDING)


def permuted(model: Model) -> tuple[Model, dict[str, list[int]]]:
    """A copy of a model whose heads stand in another order, and for each block which old head stands at each place.

    Key-value heads change places as wholes, and the query heads of a group among themselves, so that every head
    computes what it did.
    """
    module = copy.deepcopy(model.module)
    order = {}
    for path, block in model.layout.blocks.items():
        share = block.query_heads // block.kv_heads
        groups = list(range(block.kv_heads))[::-1]
        heads = [group * share + inner for group in groups for inner in range(share)[::-1]]
        order[path] = heads
        _permute(module, block, heads, groups)
    return wrap(module, name=model.name), order


def _permute(module: nn.Module, block: Block, heads: Sequence[int], groups: Sequence[int]) -> None:
    parts = ((block.q, heads, block.d_k), (block.k, groups, block.d_k), (block.v, groups, block.d_v))
    with torch.no_grad():
        for projection, index, width in parts:
            linear = _linear(module, projection)
            for parameter in (linear.weight, linear.bias):
                if parameter is not None:
                    old = parameter.unflatten(0, (len(index), width))
                    parameter.copy_(old[list(index)].flatten(0, 1).clone())
            bias = getattr(module.get_submodule(block.module), "relative_attention_bias", None)
        weight = _linear(module, block.o).weight
        old = weight.unflatten(1, (len(heads), block.d_v))
        weight.copy_(old[:, list(heads)].flatten(1, 2).clone())
        if bias is not None:
            bias.weight.copy_(bias.weight[:, list(heads)].clone())


def _linear(module: nn.Module, projection: Projection | None) -> Any:
    assert projection is not None
    assert projection.arrangement == "heads"
    return module.get_submodule(projection.parameter)


def without_columns(model: Model, block: Block, head: int) -> Model:
    """A copy of a model in which the columns of one head in the output projection are zero."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        _linear(module, block.o).weight[:, head * block.d_v : (head + 1) * block.d_v] = 0.0
    return wrap(module, name=model.name)

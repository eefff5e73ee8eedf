"""The ledger of models with parts that one token does not go through: experts, towers, models inside models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headwise.costs import ledger
from headwise.verbs.cost import numbers
from headwise.verbs.cost_model import numbers_of

_spec = importlib.util.spec_from_file_location("zoo", Path(__file__).parents[1] / "models" / "zoo.py")
assert _spec is not None
assert _spec.loader is not None
zoo: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

BATCH, LENGTH, SOURCE = 2, 11, 7


def built(name: str, **fields: Any) -> nn.Module:
    model = zoo.build(name, fields, attention="eager")
    assert isinstance(model, nn.Module)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    return model.requires_grad_(False)


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.arange(BATCH * length).view(BATCH, length) + 10


def counted(model: nn.Module, **inputs: Any) -> int:
    """What torch's counter sees, without convolutions."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    products = counter.get_flop_counts()["Global"]
    return sum(number for operation, number in products.items() if "conv" not in str(operation))


def book_of(model: nn.Module, **more: Any) -> Any:
    return ledger(numbers_of(model), **{"batch": BATCH, "context": LENGTH, "dtype": "float32", **more})


# Experts

SMALL_EXPERTS = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24}


@pytest.mark.parametrize(("zero", "chosen"), [(0, 2), (3, 7)])
def test_experts_that_hand_on_what_they_get_multiply_nothing(zero: int, chosen: int) -> None:
    """LongCat-Flash without such experts, and with a token that goes through all seven, three of which do nothing."""
    model = built("longcat_flash", zero_expert_num=zero, moe_topk=chosen, **SMALL_EXPERTS)
    book = book_of(model)
    assert counted(model, input_ids=ids()) == book.prefill.full
    assert book.parameters.total == sum(weight.numel() for weight in model.parameters())


def test_how_many_experts_do_nothing_is_said() -> None:
    """Four experts of 7 multiply; a token that picks 2 of 7 goes through 4 * 2 / 7 of them."""
    model = built("longcat_flash", zero_expert_num=3, moe_topk=2, **SMALL_EXPERTS)
    book = book_of(model)
    rest = book.numbers.rest
    experts = [part for path, part in model.named_modules() if path.endswith("mlp.experts")]
    every = sum(part.gate_up_proj.numel() + part.down_proj.numel() for part in experts)  # type: ignore[union-attr, operator]
    idle = sum(part.gate_up_proj[4:].numel() for part in experts)  # type: ignore[index]
    assert (rest.experts, rest.idle_experts) == (every, idle)
    assert rest.active_experts == round((every - idle) * 2 / 7)
    assert rest.expert_share == pytest.approx(2 / 7, rel=1e-3)
    assert (
        "3 of 7 experts hand on what they get (zero_expert_num): counted is the share of the others when all are "
        "picked alike, and a router picks as it does"
    ) in book.notes


def test_weights_that_no_token_meets_are_not_read_by_any_batch() -> None:
    model = built("longcat_flash", zero_expert_num=3, moe_topk=2, **SMALL_EXPERTS)
    rest = numbers_of(model).rest
    one, many = (book_of(model, batch=batch).traffic.weight_bytes for batch in (1, 10**6))
    assert many - one == pytest.approx(4 * (rest.experts - rest.idle_experts - rest.active_experts))


def test_a_norm_of_what_experts_put_out_is_no_expert() -> None:
    """Muse Spark normalises behind its experts, with one vector for all of them."""
    model = built("muse_spark_text", moe_hidden_size=40)
    book = book_of(model)
    assert counted(model, input_ids=ids()) == book.prefill.full
    matrices = [weight.numel() for path, weight in model.named_parameters() if "experts" in path and weight.ndim == 3]
    assert book.parameters.experts == sum(matrices)


# Relative positions


@pytest.mark.parametrize("name", ["inkling_text", "inkling_mm_model"])
def test_a_bank_of_biases_by_distance_is_counted(name: str) -> None:
    """Inkling: every head mixes profiles over distances; its shared experts are tensors, not layers."""
    model = built(name)
    book = book_of(model)
    assert counted(model, input_ids=ids()) == book.prefill.full
    assert book.prefill.attention.relative > 0
    assert book.parameters.total == sum(weight.numel() for weight in model.parameters())
    assert {site.stack for site in book.numbers.attention} == {"decoder"}
    assert book.decode is not None
    assert book.decode.attention.relative * BATCH * LENGTH == book.prefill.attention.relative * BATCH


def test_a_head_takes_its_part_of_what_meets_the_bank() -> None:
    """Its rows of W_Q, its columns of W_O, and its rows of what makes the vectors for the bank."""
    model = built("inkling_text")
    for cost_of in book_of(model).sites:
        module: Any = model.get_submodule(cost_of.site.block)
        parts = (module.q_proj, module.o_proj, module.r_proj)
        assert cost_of.parameters.per_head * module.num_heads == sum(part.weight.numel() for part in parts)


def test_an_indexer_is_what_is_missing() -> None:
    """Dots: what the counter has beyond the ledger are the products of the indexer, which a note names."""
    model = built("dots3_note_text")
    book = book_of(model)
    indexers = [part for part in model.modules() if type(part).__name__.endswith("Indexer")]
    scores = sum(2 * BATCH * LENGTH * LENGTH * part.n_heads * (part.head_dim + 1) for part in indexers)  # type: ignore[operator]
    assert scores > 0
    assert counted(model, input_ids=ids()) == book.prefill.full + scores
    assert any("its scores are not counted" in note for note in book.notes)


# Towers


def test_heads_whose_projections_clip_are_found() -> None:
    """Gemma 4's towers wrap every matrix."""
    model = built("gemma4_vision", pooling_kernel_size=1)
    book = book_of(model, source=9)
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="xy"), -1).view(1, 9, 2)
    pixels = torch.zeros(BATCH, 9, 3 * 8 * 8)
    assert counted(model, pixel_values=pixels, pixel_position_ids=grid.expand(BATCH, -1, -1)) == book.prefill.full
    for cost_of in book.sites:
        module = model.get_submodule(cost_of.site.block)
        assert cost_of.parameters.total == sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
def test_text_goes_through_no_tower(name: str) -> None:
    model = built(name)
    book = book_of(model)
    text = sum(cost_of.prefill.full for cost_of in book.sites if cost_of.site.stack == "decoder")
    assert counted(model, input_ids=ids()) == text + 2 * BATCH * LENGTH * book.numbers.rest.matrices["decoder"]
    assert ("vision" in {site.stack for site in book.numbers.attention}) == (name == "gemma4")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma4_unified", "embed_vision (2 matrices of no text), embed_audio (1 matrix of no text)"),
        ("fuyu", "vision_embed_tokens (1 matrix of no text)"),
    ],
)
def test_a_tower_without_heads_is_named(name: str, said: str) -> None:
    model = built(name)
    book = book_of(model)
    assert book.prefill.full == counted(model, input_ids=ids())
    (note,) = [note for note in book.notes if note.startswith("operations not counted")]
    assert said in note


# A model inside a model


@pytest.mark.parametrize("name", ["seamless_m4t", "seamless_m4t_v2"])
def test_what_writes_after_a_model_is_not_in_its_decode_step(name: str) -> None:
    """SeamlessM4T: text is written by the text decoder; units of sound are written from it by another model."""
    model = built(name, t2u_decoder_layers=3)
    with torch.no_grad():
        output: Any = model(input_ids=ids(SOURCE), decoder_input_ids=ids(), use_cache=True)
    kept = output.cache if getattr(output, "cache", None) is not None else output.past_key_values
    tensors = [
        tensor
        for half in (kept.self_attention_cache, kept.cross_attention_cache)
        for layer in half.layers
        for tensor in (layer.keys, layer.values)
    ]
    book = book_of(model, source=SOURCE)
    assert book.cache.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    more = book_of(built(name, t2u_decoder_layers=4), source=SOURCE)
    assert more.parameters.total > book.parameters.total
    assert more.decode == book.decode
    assert more.traffic == book.traffic
    assert (
        "t2u_model writes tokens of its own after those of this model: it is counted over as many positions as source "
        "says, and neither in a decode step nor in the cache"
    ) in book.notes


def test_a_forward_pass_shows_the_same_cache() -> None:
    """The cross-attention of ``text_decoder`` belongs to the decoder, whatever comes first in its name."""
    model = built("seamless_m4t", t2u_decoder_layers=1)
    seen = ledger(numbers(model), batch=BATCH, context=LENGTH, source=SOURCE, dtype="float32")
    read = book_of(model, source=SOURCE)
    assert seen.cache == read.cache
    assert seen.decode == read.decode


def test_units_of_sound_are_made_all_at_once_in_version_2() -> None:
    for name, causal in (("seamless_m4t", True), ("seamless_m4t_v2", False)):
        sites = numbers_of(built(name)).attention
        decoders = {
            site.causal for site in sites if site.block.startswith("t2u_model.model.decoder") and site.kind == "self"
        }
        assert decoders == {causal}

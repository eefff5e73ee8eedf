"""The ledger where attention is not text that writes: disentangled attention, images, towers, code of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, CLIPConfig, GPT2Config, ViTConfig, ViTModel

from headwise.costs import ledger
from headwise.models import discover
from headwise.verbs import cost
from headwise.verbs.cost import numbers
from headwise.verbs.cost_model import numbers_of

_spec = importlib.util.spec_from_file_location("zoo", Path(__file__).parents[1] / "models" / "zoo.py")
assert _spec is not None
assert _spec.loader is not None
zoo: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

BATCH, LENGTH = 2, 11


def built(name: str, **fields: Any) -> nn.Module:
    model = zoo.build(name, fields, attention="eager")
    assert isinstance(model, nn.Module)
    return model.requires_grad_(False)


def counted(model: nn.Module, **inputs: Any) -> int:
    """What torch's counter sees, without convolutions, which the ledger names and does not count."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    products = counter.get_flop_counts()["Global"]
    return sum(number for operation, number in products.items() if "conv" not in str(operation))


# Disentangled attention

BOTH = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DISENTANGLED = {
    "deberta": ("deberta", BOTH),
    "deberta, distances clipped": ("deberta", {**BOTH, "max_relative_positions": 4}),
    "deberta-v2": ("deberta-v2", BOTH),
    "one product": ("deberta-v2", {**BOTH, "pos_att_type": ["c2p"]}),
    "buckets": ("deberta-v2", {**BOTH, "position_buckets": 6}),
    "shared keys": ("deberta-v2", {**BOTH, "position_buckets": 6, "share_att_key": True}),
}


@pytest.mark.parametrize("name", DISENTANGLED)
def test_disentangled_attention_counts_its_products_with_positions(name: str) -> None:
    kind, fields = DISENTANGLED[name]
    model = built(kind, **fields)
    book = ledger(numbers_of(model), batch=BATCH, context=LENGTH, source=LENGTH, dtype="float32")
    assert book.prefill is not None
    assert book.prefill.attention.relative > 0
    assert counted(model, input_ids=torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)) == book.prefill.full
    assert book.parameters.total == sum(weight.numel() for weight in model.parameters())


def test_a_head_takes_its_part_of_the_position_projections() -> None:
    """Without them a head has 4 x 8 x 32 weights and 3 x 8 biases; both tables add 8 rows of 32 with a bias each."""
    site = numbers_of(built("deberta-v2", **BOTH)).attention[0]
    plain = numbers_of(built("deberta-v2")).attention[0]
    heads = [ledger_head(one) for one in (plain, site)]
    assert heads == [4 * 8 * 32 + 3 * 8, 4 * 8 * 32 + 3 * 8 + 2 * 8 * 33]


def ledger_head(site: Any) -> int:
    from headwise.costs import block_parameters

    return block_parameters(site).per_head


# Notes where nothing could be run


@pytest.mark.parametrize("given", ["folder", "config", "meta"])
def test_code_of_its_own_is_said_where_only_shapes_are_known(given: str, tmp_path: Path) -> None:
    bloom = zoo.small_config(CONFIG_MAPPING["bloom"])
    bloom.save_pretrained(tmp_path)
    with torch.device("meta"):
        skeleton = zoo.model_class("bloom")(bloom)
    notes = cost({"folder": tmp_path, "config": bloom, "meta": skeleton}[given], context=7).notes
    assert (
        "BloomAttention computes its attention in code of its own: its heads are read from the shapes of the weights "
        "alone, and products beyond queries x keys and weights x values are not counted"
    ) in notes


def test_deberta_is_said_to_be_read_from_shapes_and_counted() -> None:
    notes = cost(zoo.small_config(CONFIG_MAPPING["deberta-v2"], BOTH), context=7).notes
    assert [note for note in notes if "its own" in note] == [
        "DisentangledSelfAttention computes its attention in code of its own: its heads are read from the shapes of "
        "the weights alone"
    ]


def test_what_transformers_interface_calls_needs_no_note() -> None:
    assert not any("its own" in note for note in cost(GPT2Config(n_layer=1), context=7).notes)


def test_a_live_model_that_shows_its_heads_needs_no_note() -> None:
    assert not any("its own" in note for note in cost(built("bloom"), context=7).notes)


def test_an_indexer_is_named() -> None:
    """Sparse attention of DeepSeek-V3.2: which keys are read is chosen by scores of another kind."""
    model = built("deepseek_v32")
    (note,) = [note for note in cost(model.config, context=7).notes if "chooses" in note]
    assert note == (
        "DeepseekV32Indexer chooses the keys that are read: its scores are not counted, and heads are counted over all "
        "visible keys"
    )


# Images

POSITIONS = {
    "vit": 17,
    "deit": 18,
    "beit": 17,
    "dinov2": 17,
    "dinov2_with_registers": 21,
    "ijepa": 16,
    "yolos": 22,
    "clip_vision_model": 17,
    "data2vec-vision": 17,
}


@pytest.mark.parametrize("name", POSITIONS)
def test_an_image_has_the_positions_that_its_config_fixes(name: str) -> None:
    """Of 32 x 32 pixels in patches of 8 x 8, with the tokens that the tower adds."""
    model = built(name)
    book = ledger(numbers_of(model), batch=BATCH, dtype="float32")
    assert book.source == POSITIONS[name]
    assert book.prefill is not None
    assert counted(model, pixel_values=torch.zeros(BATCH, 3, 32, 32)) == book.prefill.full


def test_a_length_that_does_not_change_an_image_is_answered() -> None:
    model = ViTModel(ViTConfig(image_size=32, patch_size=8, num_hidden_layers=1))
    own, asked = ledger(numbers_of(model)), cost(model, source=2048)
    assert asked.source == own.source == 17
    assert asked.prefill == own.prefill
    assert (
        "the vision part is counted over its own 17 positions, one image; source 2,048 does not change that"
        in asked.notes
    )


@pytest.mark.parametrize("name", ["swin", "vit_mae"])
def test_a_tower_whose_positions_change_says_what_it_is_counted_over(name: str) -> None:
    book = ledger(numbers_of(built(name)))
    assert "the vision part is counted over as many positions as source says: 2,048" in book.notes


@pytest.mark.parametrize("name", ["siglip_vision_model", "pixtral"])
def test_a_pooling_head_and_packed_images_are_counted_as_they_run(name: str) -> None:
    """SigLIP's head asks once per image; Pixtral lays the images of a batch end to end."""
    model = built(name)
    book = ledger(numbers_of(model), batch=BATCH, dtype="float32")
    assert book.prefill is not None
    assert counted(model, pixel_values=torch.zeros(BATCH, 3, 32, 32)) == book.prefill.full


def test_the_probe_of_a_pooling_head_is_one_query() -> None:
    """4 heads of width 8 ask once about 16 positions; keys and values are of all of them."""
    book = ledger(numbers_of(built("siglip_vision_model")), batch=BATCH, dtype="float32")
    (head,) = [cost_of for cost_of in book.sites if cost_of.site.kind == "cross"]
    assert head.prefill is not None
    assert head.prefill.scores == head.prefill.visible_scores == 2 * BATCH * 4 * 16 * 8
    assert head.prefill.projections == 2 * BATCH * 32 * 32 * (2 * 1 + 2 * 16)
    assert head.decode is None


def test_packed_images_do_not_see_one_another() -> None:
    read = numbers_of(built("pixtral"))
    one, two = (ledger(read, batch=batch, dtype="float32").prefill for batch in (1, 2))
    assert one is not None
    assert two is not None
    assert two.attention.scores == 4 * one.attention.scores
    assert two.attention.visible_scores == 2 * one.attention.visible_scores
    assert any("the images of a batch are one sequence" in note for note in ledger(read).notes)


# Layers and patterns that are used more than once


@pytest.mark.parametrize("name", ["diffllama", "hrm_text"])
def test_repeated_patterns_and_layers_count_as_often_as_they_run(name: str) -> None:
    """DiffLlama's patterns are computed for both halves of the values; HRM's stacks run in cycles."""
    model = built(name)
    real = counted(model, input_ids=torch.arange(BATCH * LENGTH).view(BATCH, LENGTH))
    for read in (numbers_of(model), numbers(model)):
        book = ledger(read, batch=BATCH, context=LENGTH, dtype="float32")
        assert book.prefill is not None
        assert real == book.prefill.full
    assert book.parameters.total == sum(weight.numel() for weight in model.parameters())


def test_experts_that_all_compute_are_named() -> None:
    (note,) = [note for note in cost(built("llama4_text"), context=7).notes if "every expert" in note]
    assert note == (
        "Llama4TextExperts multiplies every token by every expert; counted are only those that the router picks"
    )


# Towers


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_text_tower_that_only_reads_is_an_encoder(name: str) -> None:
    """CLIP's text is causal and SigLIP's is not; neither writes. By shapes and by a forward pass alike."""
    model = built(name)
    read = numbers_of(model).attention
    seen = discover(model).sites
    text = {("encoder", name == "clip")}
    assert {(site.stack, site.causal) for site in read if site.stack != "vision"} == text
    assert {(site.key.stack, site.causal) for site in seen if site.key.stack != "vision"} == text


def test_the_two_towers_of_clip_have_lengths_of_their_own() -> None:
    text = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**text, "vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**text, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    book = cost(config, source=5)
    lengths = {cost_of.site.stack: cost_of.prefill.pairs for cost_of in book.sites if cost_of.prefill}
    assert lengths == {"encoder": 5 * 5, "vision": 17 * 17}


# All types

#: Types where the ledger and torch's counter differ, by the words of the note that says why. A note is words of any of
#: the ledger's notes; nothing may differ without one.
OTHERWISE = {
    "keep a state of constant size": {
        "bailing_hybrid",
        "kimi_linear",
        "lara_mini",
        "minimax",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    },
    "chooses the keys that are read": {
        "deepseek_v32",
        "dots3_note_text",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl_text",
        "mistral_large4_text",
    },
    "counted are queries x keys and weights x values over the whole rectangle": {
        "canine",
        "fastspeech2_conformer",
        "led",
        "longformer",
        "longt5",
        "mra",
        "pegasus_x",
        "prophetnet",
        "vits",
    },
    "hand on what they get": {"longcat_flash"},
    "multiplies every token by every expert": {"llama4_text"},
    "only its own are counted": {"t5gemma2"},
    "every token is counted through both": {"higgs_audio_v2"},
    "every token is counted through all of them": {"luke"},
    "positions that come from outside this model": {"trocr"},
    "its scores and mixing are not": {"granite_speech", "granite_speech_plus"},
    "though an input need not reach it there": {
        "dpr",
        "esm",
        "fsmt",
        "layoutlmv3",
        "markuplm",
        "visual_bert",
    },
}


@pytest.mark.slow
def test_operations_of_every_type_that_runs_on_ids() -> None:
    same, other, silent = set(), set(), []
    reasons = {name: words for words, names in OTHERWISE.items() for name in names}
    for name in sorted(CONFIG_MAPPING):
        try:
            model = built(name)
            for module in model.modules():
                if hasattr(module, "config"):
                    module.config._experts_implementation = "eager"
            inputs = {"input_ids": torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) + 10}
            if getattr(model.config, "is_encoder_decoder", False):
                inputs["decoder_input_ids"] = inputs["input_ids"]
            real = counted(model, **inputs)
            book = ledger(numbers_of(model), batch=BATCH, context=LENGTH, source=LENGTH, dtype="float32")
        except Exception:  # noqa: BLE001  (types that do not build or run are not this test's subject)
            continue
        if {cost_of.site.stack for cost_of in book.sites} <= {"encoder", "decoder"}:
            assert book.prefill is not None
            (same if real == book.prefill.full else other).add(name)
            if real != book.prefill.full and not any(reasons.get(name, "\n") in note for note in book.notes):
                silent.append(name)
    assert silent == []
    assert other == set(reasons)
    assert len(same) > 130

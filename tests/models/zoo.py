"""Small random models of every type that transformers knows, made from their configs.

A table of small values for the usual fields does most of the work; what a type needs beside that is in
``FIELDS``. ``build`` returns a model in eval mode; ``build_all`` is what the conformance run goes over.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

from headwise.models.families import values_of

#: Largest number of parameters of a model that is called small.
LARGEST = 100_000_000

#: Small values for fields of text, vision and audio configs, by name.
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "embedding_size": 32,
    "hidden_dim": 32,
    "encoder_hidden_size": 32,
    "projection_dim": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "image_size": 32,
    "img_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "sliding_window": 5,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "type_vocab_size": 2,
    "codebook_size": 16,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "top_k_experts": 2,
}

#: What a type needs beside the table: fields of its config, and of configs inside it by ``name.field``.
_SWIN = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
FIELDS: dict[str, dict[str, Any]] = {
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "swin2sr": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "xmod": {"default_language": "en_XX"},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 32},
    "xlm": {"emb_dim": 32},
    "flaubert": {"emb_dim": 32},
    "time_series_transformer": {"prediction_length": 3},
    "informer": {"prediction_length": 3},
    "patchtst": {"context_length": 32, "patch_length": 4, "patch_stride": 4, "num_input_channels": 3},
    "patchtsmixer": {
        "context_length": 32,
        "patch_length": 4,
        "patch_stride": 4,
        "num_input_channels": 3,
        "self_attn": True,
    },
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "vjepa2": {"crop_size": 32, "frames_per_clip": 4, "tubelet_size": 2, "pred_hidden_size": 32},
    "videomae": {"num_frames": 4},
    "timesformer": {"num_frames": 2},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "dots1": {"num_key_value_heads": 2, "n_shared_experts": 1, "n_routed_experts": 4},
    "yolos": {"num_detection_tokens": 5, "image_size": [32, 32]},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "unlimited_ocr": {"text_config.num_key_value_heads": 4},
    "perceiver": {"num_latents": 16, "d_latents": 32},
}


#: Types whose rotary sections of time, height and width are given outside their config.
SECTIONS: dict[str, list[int]] = {
    **{f"{name}_text": [2, 1, 1] for name in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "qwen2_5_omni", "glm46v")},
    **{f"{name}_text": [2, 1, 1] for name in ("glm4v", "glm_image", "glm_ocr")},
    "glm4v_moe_text": [1, 1, 0],
}


def small_config(kind: type[PretrainedConfig], fields: dict[str, Any] | None = None) -> PretrainedConfig:
    """A config of ``kind`` with small values, also in the configs inside it."""
    fields = {**FIELDS.get(kind.model_type, {}), **(fields or {})}
    own = {name: value for name, value in fields.items() if "." not in name}
    names = set(inspect.signature(kind.__init__).parameters) | {name for name in dir(kind) if not name.startswith("_")}
    default = _default(kind)
    values: dict[str, Any] = {}
    for name, value in SMALL.items():
        if (
            name in names
            and not isinstance(getattr(kind, name, None), property)
            and not callable(getattr(kind, name, None))
        ):
            before = next(iter(values_of(default, name)), None)
            if isinstance(before, (list, tuple)) and not isinstance(value, (list, tuple)):
                continue
            if name in ("sliding_window", "q_lora_rank", "head_dim") and before is None and name != "head_dim":
                continue
            if name == "head_dim" and before is None:
                continue
            values[name] = value
    for name, sub in (kind.sub_configs or {}).items():
        inner = getattr(default, name, None) if default is not None else None
        sub_kind = type(inner) if isinstance(inner, PretrainedConfig) else sub
        if sub_kind is PretrainedConfig or not hasattr(sub_kind, "model_type") or sub_kind.__name__ == "AutoConfig":
            continue
        given = {key.split(".", 1)[1]: value for key, value in fields.items() if key.startswith(name + ".")}
        values[name] = small_config(sub_kind, given)
    if "kv_lora_rank" in names:
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(default, name, None)
        if isinstance(given, dict) and ("mrope_section" in given or kind.model_type in SECTIONS):
            sections = SECTIONS.get(kind.model_type, [2, 1, 1])
            values[name] = {**given, "mrope_section": sections}
    values |= own
    if "num_hidden_layers" in names and getattr(default, "layer_types", None) and "layer_types" not in own:
        values["layer_types"] = _layer_types(default.layer_types)
    return kind(**values)


def _layer_types(types: list[str]) -> list[str]:
    """Two layers, of two types where there are two."""
    kinds = list(dict.fromkeys(types))
    return (kinds + kinds)[:2]


def _default(kind: type[PretrainedConfig]) -> PretrainedConfig | None:
    try:
        return kind()
    except Exception:  # noqa: BLE001
        return None


def model_class(model_type: str) -> type[nn.Module] | None:
    """The class of the bare model of a type, or the first class with a head where there is none."""
    kind = CONFIG_MAPPING[model_type]
    if kind in MODEL_MAPPING:
        found = MODEL_MAPPING[kind]
        return found[0] if isinstance(found, tuple) else found
    for name in sorted(dir(modeling_auto)):
        if name.endswith("_MAPPING") and name.startswith("MODEL_FOR") and kind in getattr(modeling_auto, name):
            found = getattr(modeling_auto, name)[kind]
            return found[0] if isinstance(found, tuple) else found
    return None


def build(
    model_type: str,
    fields: dict[str, Any] | None = None,
    *,
    kind: type[nn.Module] | None = None,
    attention: str | None = None,
) -> nn.Module:
    """A small random model of ``model_type`` in eval mode; ``attention`` sets its implementation."""
    config = small_config(CONFIG_MAPPING[model_type], fields)
    kind = kind or model_class(model_type)
    assert kind is not None, model_type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if attention is not None:
            config._attn_implementation = attention
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in kind(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{size} parameters")
        torch.manual_seed(0)
        return kind._from_config(config).eval() if hasattr(kind, "_from_config") else kind(config).eval()


def safe_class(model_type: str) -> type[nn.Module] | None:
    """:func:`model_class`, or None for a type without a model that can be imported here."""
    try:
        return model_class(model_type)
    except Exception:  # noqa: BLE001
        return None

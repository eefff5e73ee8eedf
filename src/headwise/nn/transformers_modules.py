"""To and from the attention modules of BERT, GPT-2 and Llama in transformers, by copying the same numbers.

What those modules do beside attention stays theirs: BERT's residual and LayerNorm, GPT-2's dropout on the output.
Causality is an argument of the layer's call (``causal=True`` for GPT-2 and Llama).
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.nn.attention import MultiHeadAttention
from headwise.nn.interchange import Weights, adopt, copy_weights, refuse_misfits, weights_of
from headwise.nn.rotary import Rotary

__all__ = ["from_transformers", "to_transformers"]

Family = Literal["bert", "gpt2", "llama"]

#: Variants of rotary whose frequencies do not change with the length of the input.
STATIC_ROTARY = ("linear", "llama3", "yarn")


def _family(module: object) -> Family:
    """Which of the three modules this is, by its exact class: a subclass may compute something else."""
    from transformers.models.bert.modeling_bert import BertAttention, BertCrossAttention, BertSelfAttention
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention

    known: dict[type, Family] = {BertAttention: "bert", GPT2Attention: "gpt2", LlamaAttention: "llama"}
    if type(module) in known:
        return known[type(module)]
    if type(module) in (BertSelfAttention, BertCrossAttention):
        raise InputError(
            f"{type(module).__name__} has no output projection. Give the BertAttention that holds it (its parent)."
        )
    names = ", ".join(cls.__name__ for cls in known)
    raise UnsupportedError(f"{type(module).__name__} is none of the modules that can be converted: {names}.")


def _weights(module: Any, family: Family) -> Weights:
    """Views of the module's numbers in the layer's orientation."""
    if family == "gpt2":
        fused, split = module.c_attn, module.embed_dim
        W, b = [*fused.weight.split(split, dim=1)], [*fused.bias.split(split)]
        if module.is_cross_attention:
            W, b = [module.q_attn.weight, *W], [module.q_attn.bias, *b]
        W_Q, W_K, W_V = W
        b_Q, b_K, b_V = b
        return Weights(W_Q, W_K, W_V, module.c_proj.weight, b_Q, b_K, b_V, module.c_proj.bias)
    if family == "bert":
        parts = (module.self.query, module.self.key, module.self.value, module.output.dense)
    else:
        parts = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    W_Q, W_K, W_V, W_O = (part.weight.t() for part in parts)
    b_Q, b_K, b_V, b_O = (part.bias for part in parts)
    return Weights(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O)


def _rotary(config: Any, d_k: int) -> Rotary:
    """Llama's rotary embedding as its config describes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return Rotary(d_k, theta=rope["rope_theta"])
    if kind not in STATIC_ROTARY:
        raise UnsupportedError(
            f"rope_type {kind!r} changes its frequencies with the length of the input, which the layer's rotary does "
            f"not do. It can take: default, {', '.join(STATIC_ROTARY)}."
        )
    frequencies, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rotary(
        d_k, theta=rope["rope_theta"], frequencies=frequencies.tolist(), attention_scaling=float(attention_scaling)
    )


def _options(module: Any, family: Family) -> tuple[int, int, dict[str, Any]]:
    """d_model, n_heads and the layer's other options."""
    if family == "bert":
        inner = module.self
        return module.output.dense.out_features, inner.num_attention_heads, {
            "d_k": inner.attention_head_size, "dropout": inner.dropout.p, "scale": inner.scaling,
            "d_context": inner.key.in_features if module.is_cross_attention else None,
        }  # fmt: skip
    if family == "gpt2":
        return module.embed_dim, module.num_heads, {
            "d_k": module.head_dim, "dropout": module.attn_dropout.p, "scale": module.scaling,
            "d_context": module.embed_dim if module.is_cross_attention else None,
        }  # fmt: skip
    config, d_k = module.config, module.head_dim
    return config.hidden_size, config.num_attention_heads, {
        "n_kv_heads": config.num_key_value_heads, "d_k": d_k, "dropout": module.attention_dropout,
        "scale": module.scaling, "rotary": _rotary(config, d_k),
    }  # fmt: skip


def from_transformers(module: nn.Module) -> MultiHeadAttention:
    """A layer with the weights of a ``BertAttention``, ``GPT2Attention`` or ``LlamaAttention``.

    BERT: the layer is the attention up to ``output.dense``, before dropout, residual and LayerNorm.
    GPT-2 and Llama: up to ``c_proj`` / ``o_proj``; call the layer with ``causal=True``. Llama's rotary comes from
    its config and is part of the layer.

    Raises:
        UnsupportedError: another module, or a rotary variant that depends on the input's length.
        InputError: a part of BERT's module that lacks the output projection.
    """
    family = _family(module)
    with torch.enable_grad():
        source = _weights(module, family)
    d_model, n_heads, options = _options(module, family)
    layer = MultiHeadAttention(
        d_model, n_heads, bias=source.b_Q is not None, device=source.W_Q.device, dtype=source.W_Q.dtype, **options
    )
    return adopt(layer, source, module)


def to_transformers(layer: MultiHeadAttention, like: nn.Module | Family) -> nn.Module:
    """The layer as an attention module of transformers.

    Args:
        layer: the layer, which is only read.
        like: a ``BertAttention``, ``GPT2Attention`` or ``LlamaAttention`` of the same sizes, of which a copy with
            the layer's weights is returned (LayerNorm and config are the copy's); or "bert", "gpt2", "llama" to
            make one anew, with PyTorch's defaults for what the layer does not have.

    Raises:
        UnsupportedError: an option that the module has no place for, or sizes that differ from those of ``like``.
    """
    family: Family
    if isinstance(like, str):
        if like not in ("bert", "gpt2", "llama"):
            raise InputError(f'like must be a module, "bert", "gpt2" or "llama", but {like!r} was given.')
        family = like
    else:
        family = _family(like)
    kept = {"bert": ("d_k", "d_context"), "gpt2": ("d_context", "scale"), "llama": ("d_k", "n_kv_heads", "rotary")}
    refuse_misfits(layer, {"bert": "BertAttention", "gpt2": "GPT2Attention", "llama": "LlamaAttention"}[family],
                   kept=kept[family])  # fmt: skip
    module: Any = _new(layer, family) if isinstance(like, str) else copy.deepcopy(like)
    _compare(layer, module, family)
    with torch.no_grad():
        target = _weights(module, family)
        copy_weights(weights_of(layer), target)
    for parameter in _attention_parameters(module, family):
        parameter.requires_grad_(layer.W_Q.requires_grad)
    trained: nn.Module = module.train(layer.training)
    return trained


def _attention_parameters(module: Any, family: Family) -> list[nn.Parameter]:
    """The parameters that the layer's numbers went into."""
    parts = {"bert": ("self", "output.dense"), "gpt2": ("",), "llama": ("",)}[family]
    return [parameter for part in parts for parameter in module.get_submodule(part).parameters()]


def _new(layer: MultiHeadAttention, family: Family) -> nn.Module:
    """An attention module of the layer's sizes."""
    module: nn.Module
    if family == "bert":
        from transformers.models.bert.modeling_bert import BertAttention, BertConfig

        if layer.d_k * layer.n_heads != layer.d_model:
            raise UnsupportedError(
                f"BertAttention has no place for d_k={layer.d_k}: it must be d_model / n_heads. Give a module to copy."
            )
        bert = BertConfig(
            hidden_size=layer.d_model, num_attention_heads=layer.n_heads, attention_probs_dropout_prob=layer.dropout
        )
        bert._attn_implementation = "sdpa"
        module = BertAttention(bert, layer_idx=0, is_cross_attention=layer.cross)
    elif family == "gpt2":
        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config

        gpt2 = GPT2Config(n_embd=layer.d_model, n_head=layer.n_heads, attn_pdrop=layer.dropout)
        gpt2._attn_implementation = "sdpa"
        module = GPT2Attention(gpt2, layer_idx=0, is_cross_attention=layer.cross)
    else:
        module = _new_llama(layer)
    return module.to(device=layer.W_Q.device, dtype=layer.W_Q.dtype)


def _new_llama(layer: MultiHeadAttention) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    rotary = layer.rotary
    if rotary is None or rotary.scaled or rotary.interleaved or rotary.dims != rotary.d_k:
        raise UnsupportedError(
            "LlamaAttention turns all channels of every head with plain rotary in halves, which this layer does not. "
            "Give a LlamaAttention with the right config to copy."
        )
    if layer.d_model % layer.n_heads:
        raise UnsupportedError(
            f"LlamaConfig wants d_model to be a multiple of n_heads, which {layer.d_model} and {layer.n_heads} are not."
        )
    config = LlamaConfig(
        hidden_size=layer.d_model, num_attention_heads=layer.n_heads, num_key_value_heads=layer.n_kv_heads,
        head_dim=layer.d_k, attention_bias=layer.b_O is not None, attention_dropout=layer.dropout,
        rope_parameters={"rope_type": "default", "rope_theta": rotary.theta},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module: nn.Module = LlamaAttention(config, layer_idx=0)
    return module


def _compare(layer: MultiHeadAttention, module: nn.Module, family: Family) -> None:
    """Refuse a module whose sizes, scale, rotary or biases are not the layer's."""
    d_model, n_heads, options = _options(module, family)
    theirs = {
        "d_model": d_model, "n_heads": n_heads, "n_kv_heads": options.get("n_kv_heads") or n_heads,
        "d_k": options["d_k"], "d_context": options.get("d_context") or d_model,
    }  # fmt: skip
    differ = [
        f"{name} {getattr(layer, name)} and {size}" for name, size in theirs.items() if getattr(layer, name) != size
    ]
    if abs(layer.scale - options["scale"]) > 1e-6 * layer.scale:
        differ.append(f"scale {layer.scale:g} and {options['scale']:g}")
    if layer.b_O is not None and _weights(module, family).b_O is None:
        differ.append("bias True and False")
    theirs_rotary = options.get("rotary")
    if theirs_rotary is not None and not theirs_rotary.turns_like(layer.rotary):
        differ.append(f"rotary {layer.rotary} and {theirs_rotary}")
    if differ:
        raise UnsupportedError(
            f"The layer and the {type(module).__name__} to copy it into differ (layer's first): {'; '.join(differ)}."
        )

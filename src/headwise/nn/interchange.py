"""To and from ``torch.nn.MultiheadAttention``: the same numbers in the same places, copied bit for bit.

Its projections are stored as (out, in), ours as (in, out); its masks say True = may not attend, ours True = may.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.nn.attention import MultiHeadAttention

__all__ = ["Weights", "fill", "from_torch", "misfits", "to_torch", "weights_of"]


@dataclass(frozen=True)
class Weights:
    """The matrices of a layer in the orientation of the formulas, (in, out), and its biases."""

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor | None = None
    b_K: Tensor | None = None
    b_V: Tensor | None = None
    b_O: Tensor | None = None


def weights_of(layer: MultiHeadAttention) -> Weights:
    """The layer's own."""
    return Weights(*(getattr(layer, name) for name in Weights.__dataclass_fields__))


def fill(layer: MultiHeadAttention, weights: Weights, source: nn.Module) -> MultiHeadAttention:
    """Copy the weights into the layer; training mode and whether they are trained come from the source."""
    trained = any(parameter.requires_grad for parameter in source.parameters())
    with torch.no_grad():
        for name in Weights.__dataclass_fields__:
            value, parameter = getattr(weights, name), getattr(layer, name)
            if value is not None:
                parameter.copy_(value)
    layer.requires_grad_(trained)
    return layer.train(source.training)


def misfits(layer: MultiHeadAttention, target: str, *, kept: tuple[str, ...] = ()) -> None:
    """Refuse a layer with options that the target has no place for.

    Raises:
        UnsupportedError: naming every such option at once.
    """
    default = (layer.n_heads * layer.d_k if layer.softmax == "summed" else layer.d_k) ** -0.5
    special = {
        f"n_kv_heads={layer.n_kv_heads}": layer.n_kv_heads != layer.n_heads and "n_kv_heads" not in kept,
        f"d_k={layer.d_k}": layer.d_k * layer.n_heads != layer.d_model and "d_k" not in kept,
        f"d_v={layer.d_v}": layer.d_v != layer.d_k,
        f"d_context={layer.d_context}": layer.cross and "d_context" not in kept,
        "rotary": layer.rotary is not None and "rotary" not in kept,
        f"window={layer.window}": layer.window is not None,
        f"softcap={layer.softcap}": layer.softcap is not None,
        f"scale={layer.scale:g}": layer.scale != default and "scale" not in kept,
        "qk_norm=True": layer.qk_norm,
        "sinks=True": layer.sinks is not None,
        f'combine="{layer.combine}"': layer.combine != "concat",
        f'softmax="{layer.softmax}"': layer.softmax != "per_head",
        "heads split over ranks": len(layer.local_heads) != layer.n_heads,
    }
    found = [option for option, used in special.items() if used]
    if found:
        raise UnsupportedError(
            f"{target} has no place for {', '.join(found)} of this layer, so it cannot be converted."
        )


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer with the weights of ``nn.MultiheadAttention``: same numbers, same output.

    The layer is always (batch, tokens, width), whatever ``batch_first`` says. Where torch's masks are True for
    what is left out, the layer's are True for what may be seen: ``key_padding=~key_padding_mask``.

    Raises:
        UnsupportedError: ``add_bias_kv``, ``add_zero_attn``, or keys and values of different widths.

    Example:
        >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> ours, x = from_torch(theirs), torch.randn(1, 3, 8)
        >>> torch.allclose(ours(x), theirs(x, x, x, need_weights=False)[0], atol=1e-6)
        True
    """
    found = {
        "add_bias_kv=True": module.bias_k is not None or module.bias_v is not None,
        "add_zero_attn=True": module.add_zero_attn,
        f"kdim={module.kdim} with vdim={module.vdim}": module.kdim != module.vdim,
    }
    if any(found.values()):
        named = ", ".join(name for name, used in found.items() if used)
        raise UnsupportedError(
            f"nn.MultiheadAttention with {named} cannot be converted: the layer has no place for it."
        )
    if module._qkv_same_embed_dim:
        W_Q, W_K, W_V = module.in_proj_weight.chunk(3)
    else:
        W_Q, W_K, W_V = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    biased = module.in_proj_bias is not None
    b_Q, b_K, b_V = module.in_proj_bias.chunk(3) if biased else (None, None, None)
    layer = MultiHeadAttention(
        module.embed_dim, module.num_heads, d_context=None if module._qkv_same_embed_dim else module.kdim, bias=biased,
        dropout=module.dropout, device=W_Q.device, dtype=W_Q.dtype,
    )  # fmt: skip
    out = module.out_proj
    return fill(layer, Weights(W_Q.t(), W_K.t(), W_V.t(), out.weight.t(), b_Q, b_K, b_V, out.bias), module)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """An ``nn.MultiheadAttention(batch_first=True)`` with the layer's weights, bit for bit.

    Raises:
        UnsupportedError: an option that torch's layer has no place for, such as grouped heads or rotary.
    """
    misfits(layer, "nn.MultiheadAttention", kept=("d_context",))
    weights = weights_of(layer)
    width = layer.d_context if layer.cross else None
    module = nn.MultiheadAttention(
        layer.d_model, layer.n_heads, dropout=layer.dropout, bias=weights.b_O is not None, kdim=width, vdim=width,
        batch_first=True, device=weights.W_Q.device, dtype=weights.W_Q.dtype,
    )  # fmt: skip
    with torch.no_grad():
        projections = [W.t() for W in (weights.W_Q, weights.W_K, weights.W_V)]
        if module._qkv_same_embed_dim:
            module.in_proj_weight.copy_(torch.cat(projections))
        else:
            for name, projection in zip("qkv", projections, strict=True):
                getattr(module, f"{name}_proj_weight").copy_(projection)
        module.out_proj.weight.copy_(weights.W_O.t())
        if weights.b_Q is not None and weights.b_K is not None and weights.b_V is not None and weights.b_O is not None:
            module.in_proj_bias.copy_(torch.cat((weights.b_Q, weights.b_K, weights.b_V)))
            module.out_proj.bias.copy_(weights.b_O)
    module.requires_grad_(weights.W_Q.requires_grad)
    return module.train(layer.training)

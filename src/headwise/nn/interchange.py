"""To and from ``torch.nn.MultiheadAttention``: the same numbers in the same places, copied bit for bit.

Its projections are stored as (out, in), ours as (in, out); its masks say True = may not attend, ours True = may.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.nn.attention import MultiHeadAttention

__all__ = ["Weights", "copy_weights", "from_torch", "refuse_misfits", "to_torch", "torch_weights", "weights_of"]


@dataclass(frozen=True)
class Weights:
    """Views of a module's matrices in the orientation of the formulas, (in, out), and of its biases."""

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor | None = None  # noqa: N815
    b_K: Tensor | None = None  # noqa: N815
    b_V: Tensor | None = None  # noqa: N815
    b_O: Tensor | None = None  # noqa: N815


def weights_of(layer: MultiHeadAttention) -> Weights:
    """The layer's own."""
    return Weights(**{f.name: getattr(layer, f.name) for f in fields(Weights)})


def torch_weights(module: nn.MultiheadAttention) -> Weights:
    """Those of torch's layer."""
    if module._qkv_same_embed_dim:
        W_Q, W_K, W_V = module.in_proj_weight.chunk(3)
    else:
        W_Q, W_K, W_V = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    b_Q, b_K, b_V = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    out = module.out_proj
    return Weights(W_Q.t(), W_K.t(), W_V.t(), out.weight.t(), b_Q, b_K, b_V, out.bias)


@torch.no_grad()
def copy_weights(source: Weights, target: Weights) -> None:
    """Write the numbers of ``source`` into ``target``; biases that only the target has become 0."""
    for field in fields(Weights):
        given, place = getattr(source, field.name), getattr(target, field.name)
        if place is not None:
            place.zero_() if given is None else place.copy_(given)


def adopt(layer: MultiHeadAttention, source: Weights, module: nn.Module) -> MultiHeadAttention:
    """Fill the new layer with the numbers of ``module``; what is frozen or in eval mode there is so here."""
    copy_weights(source, weights_of(layer))
    for field in fields(Weights):
        given, parameter = getattr(source, field.name), getattr(layer, field.name)
        if given is not None:
            parameter.requires_grad_(given.requires_grad)
    return layer.train(module.training)


def refuse_misfits(layer: MultiHeadAttention, target: str, *, kept: tuple[str, ...] = ()) -> None:
    """Refuse a layer with options that the target has no place for.

    Raises:
        UnsupportedError: naming every such option at once.
    """
    plain_scale = (layer.n_heads * layer.d_k if layer.softmax == "summed" else layer.d_k) ** -0.5
    special = {
        "n_kv_heads": layer.n_kv_heads != layer.n_heads,
        "d_k": layer.d_k * layer.n_heads != layer.d_model,
        "d_v": layer.d_v != layer.d_k,
        "d_context": layer.cross,
        "rotary": layer.rotary is not None,
        "window": layer.window is not None,
        "softcap": layer.softcap is not None,
        "scale": layer.scale != plain_scale,
        "qk_norm": layer.qk_norm,
        "sinks": layer.sinks is not None,
        "combine": layer.combine != "concat",
        "softmax": layer.softmax != "per_head",
    }
    found = [name for name, used in special.items() if used and name not in kept]
    if found:
        values = ", ".join(f"{name}={_shown(getattr(layer, name))}" for name in found)
        raise UnsupportedError(f"{target} has no place for {values} of this layer, so it cannot be converted.")
    if len(layer.local_heads) != layer.n_heads:
        raise InputError("The layer's heads are split over ranks; convert it before they are split.")


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, nn.Module | Tensor) else repr(value)


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer with the weights of ``nn.MultiheadAttention``: same numbers, same output.

    The layer is always (batch, tokens, width), whatever ``batch_first`` says. Where torch's boolean masks are
    True for what is left out, the layer's are True for what may be seen: ``key_padding=~key_padding_mask``.

    Raises:
        UnsupportedError: ``add_bias_kv``, ``add_zero_attn``, or keys and values of different widths.
        InputError: another module.

    Example:
        >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> ours, x = from_torch(theirs), torch.randn(1, 3, 8)
        >>> torch.allclose(ours(x), theirs(x, x, x, need_weights=False)[0], atol=1e-6)
        True
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise InputError(
            f"from_torch takes an nn.MultiheadAttention, but {type(module).__name__} was given. For attention modules "
            f"of transformers use from_transformers."
        )
    found = {
        "add_bias_kv=True": module.bias_k is not None or module.bias_v is not None,
        "add_zero_attn=True": module.add_zero_attn,
        f"kdim={module.kdim} and vdim={module.vdim}": module.kdim != module.vdim,
    }
    if any(found.values()):
        named = ", ".join(name for name, used in found.items() if used)
        raise UnsupportedError(
            f"nn.MultiheadAttention with {named} cannot be converted: the layer has no place for it."
        )
    with torch.enable_grad():
        source = torch_weights(module)
    layer = MultiHeadAttention(
        module.embed_dim, module.num_heads, d_context=None if module._qkv_same_embed_dim else module.kdim,
        bias=source.b_Q is not None, dropout=module.dropout, device=source.W_Q.device, dtype=source.W_Q.dtype,
    )  # fmt: skip
    return adopt(layer, source, module)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """An ``nn.MultiheadAttention(batch_first=True)`` with the layer's weights, bit for bit.

    Raises:
        UnsupportedError: an option that torch's layer has no place for, such as grouped heads or rotary.
    """
    refuse_misfits(layer, "nn.MultiheadAttention", kept=("d_context",))
    width = layer.d_context if layer.cross else None
    module = nn.MultiheadAttention(
        layer.d_model, layer.n_heads, dropout=layer.dropout, bias=layer.b_O is not None, kdim=width, vdim=width,
        batch_first=True, device=layer.W_Q.device, dtype=layer.W_Q.dtype,
    )  # fmt: skip
    with torch.no_grad():
        copy_weights(weights_of(layer), torch_weights(module))
    module.requires_grad_(layer.W_Q.requires_grad)
    return module.train(layer.training)

"""The numbers of one attention module, read from the shapes of its weights.

Head counts follow from the widths of the projections and the width of one head, and are then held against what
the module says of itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from torch import nn

from headwise.costs import AttentionNumbers, Latent, Relative, block_parameters
from headwise.errors import ModelError, UnsupportedError
from headwise.models.cut_modules import HeadCut, cut_of
from headwise.verbs.cost_attention import Found, is_matrix, widths

__all__ = ["read_shape"]

#: Names of the projections of latent attention.
LATENT: Final = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
#: Names of the projections that only a table of relative positions goes through.
TABLES: Final = ("pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj")
QUERY_NORMS: Final = ("q_norm", "q_layernorm", "query_layernorm", "norm_q", "query_norm", "q_layer_norm")
KEY_NORMS: Final = ("k_norm", "k_layernorm", "key_layernorm", "norm_k", "key_norm", "k_layer_norm")
#: A norm of the residual stream that some families keep inside the attention module.
OUTER_NORMS: Final = ("LayerNorm", "layer_norm", "layernorm")
HEADS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
WIDTHS: Final = ("head_dim", "attention_head_size", "key_value_proj_dim", "qk_head_dim", "head_size", "d_kv")
CONFIG_HEADS: Final = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
CONFIG_WIDTHS: Final = ("head_dim", "d_kv")


def read_shape(found: Found) -> AttentionNumbers:
    """The numbers of one attention module, without what depends on its place in the model.

    Raises:
        UnsupportedError: the width of a head cannot be told; what was looked for is listed.
        ModelError: the weights fit no whole number of heads, or the module says another number.
    """
    cut = cut_of(found.module)
    if "kv_b_proj" in dict(found.module.named_children()) and set(found.separate) == {"q"}:
        numbers = _latent(found, cut)
    elif cut is not None:
        numbers = _cut(found, cut)
    elif isinstance(found.module, nn.MultiheadAttention):
        numbers = _torchs_own(found.module)
    elif found.fused is not None:
        numbers = _fused(found)
    else:
        numbers = _separate(found)
    return _with_the_rest(found, numbers)


def _torchs_own(module: nn.MultiheadAttention) -> AttentionNumbers:
    """``nn.MultiheadAttention`` keeps its three projections in one parameter, not in a layer."""
    bias = module.in_proj_bias is not None
    return AttentionNumbers(
        d_model=module.embed_dim,
        query_heads=module.num_heads,
        kv_heads=module.num_heads,
        d_k=module.head_dim,
        d_v=module.head_dim,
        biases=(bias, bias, bias, _bias(module.out_proj)),
    )


def _cut(found: Found, cut: HeadCut) -> AttentionNumbers:
    """A module of which heads were cut: what is left of it stands beside its weights, whatever its own code counts."""
    assert found.output is not None
    q, k, v = (found.separate.get(part) or found.fused for part in "qkv")
    k, v = k or v, v or k
    assert k is not None
    assert v is not None
    d_model = widths(q if q is not None else k)[0]
    d_context = widths(k)[0]
    heads, groups = len(cut.heads), cut.kv_heads if cut.heads else 0
    shared = found.fused is None and v is k
    wide = heads * cut.d_k + groups * ((0 if shared else cut.d_k) + cut.d_v)
    stored = sum(widths(one)[1] for one in {id(one): one for one in (q, k, v) if one is not None}.values())
    gated = heads > 0 and stored == wide + heads * cut.d_v
    o_width, d_out = widths(found.output)
    if o_width != heads * cut.d_v or (stored != wide and not gated):
        raise ModelError(
            f"{found.path}: {heads} query heads and {groups} key-value heads of width {cut.d_k} and {cut.d_v} are left "
            f"of it, and its weights are {stored} wide before attention and {o_width} after it"
        )
    return AttentionNumbers(
        d_model=d_model,
        query_heads=heads,
        kv_heads=groups,
        d_k=cut.d_k,
        d_v=cut.d_v,
        d_context=d_context if d_context != d_model else None,
        d_out=d_out if d_out != d_model else None,
        biases=(q is not None and _bias(q), _bias(k), _bias(v) and not shared, _bias(found.output)),
        matrices=d_model * heads * cut.d_v if gated else 0,
        gate=cut.d_v * (d_model + (q is not None and _bias(q))) if gated else 0,
    )


def _separate(found: Found) -> AttentionNumbers:
    q, k, v = (found.separate.get(part) for part in "qkv")
    assert q is not None
    assert found.output is not None
    d_model, q_width = widths(q)
    o_width, d_out = widths(found.output)
    # Keys and values may share one projection.
    k = k or v
    v = v or k
    assert k is not None
    assert v is not None
    d_context, k_width = widths(k)
    v_width = widths(v)[1]
    d_k = _head_width(found, q_width)
    d_v = v_width // max(1, k_width // d_k)
    gated = bool(d_v) and q_width // d_k == 2 * (o_width // d_v)
    heads = _whole(found, "queries", q_width // 2 if gated else q_width, d_k)
    groups = _whole(found, "keys", k_width, d_k)
    d_v = _whole(found, "values", v_width, groups) if groups else d_k
    _check(found, heads, groups, heads * d_v, o_width)
    return AttentionNumbers(
        d_model=d_model,
        query_heads=heads,
        kv_heads=groups,
        d_k=d_k,
        d_v=d_v,
        d_context=d_context if d_context != d_model else None,
        d_out=d_out if d_out != d_model else None,
        biases=(_bias(q), _bias(k), _bias(v) and v is not k, _bias(found.output)),
        matrices=d_model * q_width // 2 if gated else 0,
        gate=d_v * (d_model + _bias(q)) if gated else 0,
    )


def _fused(found: Found) -> AttentionNumbers:
    assert found.fused is not None
    assert found.output is not None
    d_in, width = widths(found.fused)
    o_width, d_out = widths(found.output)
    heads = _stated(found, HEADS) or _stated(found, CONFIG_HEADS, config=True)
    if heads is None:
        raise UnsupportedError(_unread(found, "the number of heads", (*HEADS, *CONFIG_HEADS)))
    d_k = _whole(found, "the output projection's input", o_width, heads, by="heads")
    query = found.separate.get("q")
    rest = width - (0 if query is not None else heads * d_k)
    groups = _whole(found, "keys and values", rest, 2 * d_k)
    _check(found, heads, groups, heads * d_k, o_width)
    bias = _bias(found.fused)
    d_model = d_in if query is None else widths(query)[0]
    return AttentionNumbers(
        d_model=d_model,
        query_heads=heads,
        kv_heads=groups,
        d_k=d_k,
        d_v=d_k,
        d_context=d_in if d_in != d_model else None,
        d_out=d_out if d_out != d_model else None,
        biases=(bias if query is None else _bias(query), bias, bias, _bias(found.output)),
    )


def _latent(found: Found, cut: HeadCut | None) -> AttentionNumbers:
    children = dict(found.module.named_children())
    assert found.output is not None
    d_model, down = widths(children["kv_a_proj_with_mqa"])
    kv_rank, up = widths(children["kv_b_proj"])
    o_width, d_out = widths(found.output)
    query = children.get("q_proj") or children["q_b_proj"]
    d_in, q_width = widths(query)
    d_k = _head_width(found, q_width) if cut is None else cut.d_k
    heads = _whole(found, "queries", q_width, d_k)
    d_v = _whole(found, "values", o_width, heads, by="heads") if cut is None else cut.d_v
    rope = down - kv_rank
    if up != heads * (d_k - rope + d_v):
        raise ModelError(
            f"{found.path}: kv_b_proj puts out {up} numbers, not {heads} heads x ({d_k - rope} + {d_v}) of keys and "
            "values"
        )
    first = children.get("q_a_proj") or query
    return AttentionNumbers(
        d_model=d_model,
        query_heads=heads,
        kv_heads=heads,
        d_k=d_k,
        d_v=d_v,
        d_out=d_out if d_out != d_model else None,
        biases=(_bias(first), _bias(children["kv_a_proj_with_mqa"]), False, _bias(found.output)),
        latent=Latent(kv_rank=kv_rank, rope=rope, q_rank=None if children.get("q_proj") else d_in),
    )


def _with_the_rest(found: Found, numbers: AttentionNumbers) -> AttentionNumbers:
    """Add norms of queries and keys, further matrices, and every other weight of the module."""
    children = dict(found.module.named_children())
    norms = [
        sum(weight.numel() for weight in children[name].parameters())
        for names in (QUERY_NORMS, KEY_NORMS)
        for name in names
        if name in children
    ]
    heads, groups, d_k = numbers.query_heads, numbers.kv_heads, numbers.d_k
    if numbers.latent is None and norms == [d_k, d_k]:
        numbers = replace(numbers, qk_norm="head")
    elif numbers.latent is None and norms == [heads * d_k, groups * d_k]:
        numbers = replace(numbers, qk_norm="layer")
    known = {id(part) for part in (*found.separate.values(), found.fused, found.output) if part is not None}
    if numbers.latent is not None:
        known |= {id(children.get(name)) for name in LATENT}
    relative, tables = _relative(found)
    known |= {id(table) for table in tables}
    further = (part for part in found.module.modules() if is_matrix(part) and id(part) not in known)
    matrices = sum(width_in * width_out for width_in, width_out in map(widths, further))
    gate = numbers.gate or _gate(children.get("gate_proj"), heads)
    numbers = replace(numbers, matrices=numbers.matrices + matrices, relative=relative, gate=gate)
    others = _owned(found) - block_parameters(numbers).total
    if others < 0:
        raise UnsupportedError(
            f"{found.path} ({type(found.module).__name__}): its projections are of a kind that is not understood: they "
            f"have {_owned(found)} weights, fewer than {numbers.query_heads} query heads and {numbers.kv_heads} "
            f"key-value heads of width {numbers.d_k} would have ({block_parameters(numbers).total})"
        )
    return replace(numbers, others=others)


def _gate(part: nn.Module | None, heads: int) -> int:
    """Weights of one head in an output gate that is a layer of its own (Afmoe)."""
    if part is None or not is_matrix(part) or not heads or widths(part)[1] % heads:
        return 0
    return sum(weight.numel() for weight in part.parameters()) // heads


def _relative(found: Found) -> tuple[Relative | None, list[nn.Module]]:
    """Products with a table of relative positions, and the matrices that only the table goes through (DeBERTa)."""
    module: Any = found.module
    banks = [part for part in module.children() if isinstance(getattr(part, "rel_extent", None), int)]
    if banks and is_matrix(getattr(module, "r_proj", None)):
        return _bank(banks[0], module.r_proj), []
    kinds = [kind for kind in ("c2p", "p2c") if kind in (getattr(module, "pos_att_type", None) or ())]
    if getattr(module, "relative_attention", False) is not True or not kinds:
        return None, []
    tables = [child for name, child in module.named_children() if name in TABLES and is_matrix(child)]
    span: Any = getattr(module, "pos_ebd_size", None)
    clipped = span is None
    weights = list(map(widths, tables or [found.separate[part] for part in "qk" if part in found.separate]))
    heads = _stated(found, HEADS) or 1
    own = sum((widths(table)[0] + _bias(table)) * widths(table)[1] // heads for table in tables)
    return Relative(
        span=int(module.max_relative_positions if clipped else span),
        clipped=clipped,
        products=len(kinds),
        projections=sum(width_in * width_out for width_in, width_out in weights),
        per_head=own,
    ), tables


def _bank(table: Any, source: nn.Module) -> Relative:
    """A bank of biases by distance, which every head mixes by a vector of its own (Inkling)."""
    width, span = table.proj.shape
    return Relative(
        span=int(span),
        clipped=False,
        products=1,
        projections=0,
        per_head=(widths(source)[0] + _bias(source)) * int(width),
        sides=1,
        width=int(width),
    )


def _owned(found: Found) -> int:
    """Parameters of the block: of the module without norms of the residual stream, and of the output projection."""
    outer = {
        id(weight)
        for name, child in found.module.named_children()
        if name in OUTER_NORMS
        for weight in child.parameters()
    }
    weights = {id(weight): weight for weight in found.module.parameters() if id(weight) not in outer}
    if found.outside and found.output is not None:
        weights |= {id(weight): weight for weight in found.output.parameters()}
    return sum(weight.numel() for weight in weights.values())


def _head_width(found: Found, q_width: int) -> int:
    """Width of a query head, as the module or its config says, or from the number of heads."""
    for names, config in ((WIDTHS, False), (CONFIG_WIDTHS, True)):
        stated = _stated(found, names, config=config)
        if stated:
            return stated
    heads = _stated(found, HEADS) or _stated(found, CONFIG_HEADS, config=True)
    if heads:
        return _whole(found, "queries", q_width, heads, by="heads")
    raise UnsupportedError(_unread(found, "the width of a head", (*WIDTHS, *HEADS, *CONFIG_HEADS)))


def _stated(found: Found, names: tuple[str, ...], *, config: bool = False) -> int | None:
    place = found.config if config else found.module
    for name in names:
        value = getattr(place, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _whole(found: Found, what: str, width: int, part: int, *, by: str = "width of a head") -> int:
    if part < 1 or width % part:
        raise ModelError(f"{found.path}: {what} are {width} numbers wide, no multiple of {part} ({by})")
    return width // part


def _check(found: Found, heads: int, groups: int, joined: int, o_width: int) -> None:
    if joined != o_width:
        raise UnsupportedError(
            f"{found.path} ({type(found.module).__name__}): the heads are {joined} numbers wide together, but the "
            f"output projection takes {o_width}: what stands between them is not understood"
        )
    stated = _stated(found, HEADS)
    if stated is not None and stated != heads:
        raise ModelError(f"{found.path}: the weights have {heads} query heads, but the module says {stated}")
    if groups and heads % groups:
        raise ModelError(f"{found.path}: {heads} query heads are no multiple of {groups} key-value heads")


def _bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _unread(found: Found, what: str, names: tuple[str, ...]) -> str:
    return (
        f"{found.path} ({type(found.module).__name__}): {what} cannot be told; looked for "
        f"{', '.join(dict.fromkeys(names))} on the module and in its config"
    )

"""Every refusal of the layer, the cache, rotary, interchange and tensor parallelism, with its wording."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import headwise.nn
from headwise.errors import HeadwiseError, InputError, ShapeError, UnsupportedError
from headwise.nn import KVCache, MultiHeadAttention, Rotary, from_torch, from_transformers, to_torch, to_transformers
from headwise.nn import token_positions as positions

X = torch.zeros(2, 3, 8)
PADDING = torch.ones(2, 3, dtype=torch.bool)


def layer(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(8, 2, **options)


def cache(batch: int = 2, length: int | None = 5, **options: Any) -> KVCache:
    return KVCache(batch, length, **({"n_kv_heads": 2, "d_k": 4} | options))


def filled(**options: Any) -> KVCache:
    made = cache(**options)
    made.append(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4))
    return made


def turned() -> KVCache:
    made = cache(length=None, window=2)
    for _ in range(5):
        made.append(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
    return made


def meta() -> MultiHeadAttention:
    return layer(device="meta")


def split(rank: int = 0) -> MultiHeadAttention:
    from headwise.nn.parallel import HeadShard

    made = layer()
    made._shard = HeadShard(mesh(rank=rank))
    return made


def mesh(size: int = 2, ndim: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(ndim=ndim, size=lambda: size, get_local_rank=lambda: rank)


def split_heads(model: nn.Module, over: Any = None) -> None:
    from headwise.nn import split_heads

    split_heads(model, over or mesh())


def llama(**config: Any) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    made = LlamaConfig(hidden_size=8, num_attention_heads=2, **config)
    return LlamaAttention(made, 0)


def bert() -> Any:
    from transformers.models.bert.modeling_bert import BertAttention, BertConfig

    return BertAttention(BertConfig(hidden_size=8, num_attention_heads=2))


def parallel(module: nn.Module) -> None:
    from headwise.nn import HeadParallel

    HeadParallel()._apply(module, mesh())


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

Row = tuple[Callable[[], object], type[HeadwiseError], str]

TABLE: list[Row] = [
    (
        lambda: MultiHeadAttention(0, 2),
        InputError,
        "d_model must be a whole number of at least 1, but 0 was given.",
    ),
    (
        lambda: MultiHeadAttention(8, 2, n_kv_heads=True),
        InputError,
        "n_kv_heads must be a whole number of at least 1, but True was given.",
    ),
    (
        lambda: MultiHeadAttention(8, 3),
        InputError,
        "d_model must be a multiple of n_heads when d_k is not given, but 8 / 3 leaves 2. Give d_k, or "
        "another number of heads.",
    ),
    (
        lambda: MultiHeadAttention(12, 6, n_kv_heads=4),
        InputError,
        "n_heads must be a multiple of n_kv_heads, but 6 query heads cannot share 4 key-value heads evenly. "
        "Use a number of key-value heads that divides 6.",
    ),
    (
        lambda: MultiHeadAttention(12, 4, n_kv_heads=3),
        InputError,
        "n_heads must be a multiple of n_kv_heads, but 4 query heads cannot share 3 key-value heads evenly. "
        "Use a number of key-value heads that divides 4.",
    ),
    (
        lambda: layer(bias=1),
        InputError,
        "bias must be True or False, but 1 was given.",
    ),
    (
        lambda: layer(softcap=0.0),
        InputError,
        "softcap must be a positive finite number or None, but 0.0 was given.",
    ),
    (
        lambda: layer(scale=float("inf")),
        InputError,
        "scale must be a positive finite number or None, but inf was given.",
    ),
    (
        lambda: layer(window=0),
        InputError,
        "window must be a whole number of at least 1, but 0 was given.",
    ),
    (
        lambda: layer(dropout=1.0),
        InputError,
        "dropout must be a probability in [0, 1), but 1.0 was given.",
    ),
    (
        lambda: layer(combine="sum"),
        InputError,
        'combine must be "concat" or "mean", but \'sum\' was given.',
    ),
    (
        lambda: layer(softmax="mixed"),
        InputError,
        'softmax must be "per_head" or "summed", but \'mixed\' was given.',
    ),
    (
        lambda: layer(softmax="summed", n_kv_heads=1),
        InputError,
        'softmax="summed" adds the scores of all heads before one softmax, which n_kv_heads=1 with n_heads=2 '
        '(grouped heads) does not fit, because it acts head by head. Use softmax="per_head", or leave it out.',
    ),
    (
        lambda: layer(softmax="summed", rotary=True),
        InputError,
        'softmax="summed" adds the scores of all heads before one softmax, which rotary does not fit, because'
        ' it acts head by head. Use softmax="per_head", or leave it out.',
    ),
    (
        lambda: layer(softmax="summed", qk_norm=True),
        InputError,
        'softmax="summed" adds the scores of all heads before one softmax, which qk_norm=True does not fit, '
        'because it acts head by head. Use softmax="per_head", or leave it out.',
    ),
    (
        lambda: layer(softmax="summed", sinks=True),
        InputError,
        'softmax="summed" adds the scores of all heads before one softmax, which sinks=True does not fit, '
        'because it acts head by head. Use softmax="per_head", or leave it out.',
    ),
    (
        lambda: layer(rotary="yes"),
        InputError,
        "rotary must be None, True, a base such as 10000.0 or a Rotary module, but str was given.",
    ),
    (
        lambda: layer(rotary=Rotary(6)),
        InputError,
        "rotary was made for d_k = 6, but the layer's heads have d_k = 4.",
    ),
    (
        lambda: MultiHeadAttention(6, 2, rotary=True),
        InputError,
        "rotary turns an even number of channels between 2 and d_k = 3, but 3 were asked for. Use an even "
        "d_k, or name fewer channels with Rotary(d_k, dims=...).",
    ),
    (
        lambda: Rotary(8, dims=10),
        InputError,
        "rotary turns an even number of channels between 2 and d_k = 8, but 10 were asked for. Use an even "
        "d_k, or name fewer channels with Rotary(d_k, dims=...).",
    ),
    (
        lambda: Rotary(8, theta=-1.0),
        InputError,
        "theta must be a positive finite number, but -1.0 was given.",
    ),
    (
        lambda: Rotary(8, frequencies=[1.0]),
        InputError,
        "frequencies must be 4 numbers (dims / 2), but 1 were given.",
    ),
    (
        lambda: layer()([1.0]),
        InputError,
        "x must be a tensor (batch, tokens, d_model), but a list was given.",
    ),
    (
        lambda: layer()(X, PADDING),
        ShapeError,
        "context must be floating point (batch, tokens, d_context), but torch.bool was given. A mask is given "
        "by name: key_padding=... or mask=...",
    ),
    (
        lambda: layer()(X.long()),
        ShapeError,
        "x must be floating point (batch, tokens, d_model), but torch.int64 was given.",
    ),
    (
        lambda: layer()(X[0]),
        ShapeError,
        "x must be (batch, tokens, d_model), but it has shape (3, 8). Add the batch with x.unsqueeze(0).",
    ),
    (
        lambda: layer()(X[None]),
        ShapeError,
        "x must be (batch, tokens, d_model), but it has shape (1, 2, 3, 8).",
    ),
    (
        lambda: layer()(X[..., :7]),
        ShapeError,
        "x must be (batch, tokens, d_model) with d_model = 8, but it has shape (2, 3, 7).",
    ),
    (
        lambda: layer()(X.double()),
        ShapeError,
        "x is torch.float64 and the layer torch.float32. Convert one with .to(torch.float32), or use torch.autocast.",
    ),
    (
        lambda: meta()(X),
        ShapeError,
        "x is on cpu and the layer on meta. Move one with .to('meta').",
    ),
    (
        lambda: layer(d_context=5)(X),
        InputError,
        "context is missing: the layer was made with d_context, so its keys and values come from a context "
        "(batch, tokens, d_context).",
    ),
    (
        lambda: layer(d_context=5)(X, X),
        ShapeError,
        "context must be (batch, tokens, d_context) with d_context = 5, but it has shape (2, 3, 8).",
    ),
    (
        lambda: layer()(X, X[:1]),
        ShapeError,
        "x has 2 rows and the context 1; they must be the same batch.",
    ),
    (
        lambda: layer(rotary=True)(X, X),
        InputError,
        "A layer with rotary and a context needs positions and context_positions: two sequences have no "
        "common numbering by themselves.",
    ),
    (
        lambda: layer()(X, context_positions=torch.arange(3)),
        InputError,
        "context_positions was given without a context.",
    ),
    (
        lambda: layer()(X, positions=torch.arange(3)),
        InputError,
        "positions change nothing in a layer without rotary. Add learned positions to x yourself, or make the"
        " layer with rotary=True.",
    ),
    (
        lambda: layer(rotary=True)(X, positions=torch.arange(3.0)),
        ShapeError,
        "positions must be whole numbers (int64), but torch.float32 was given.",
    ),
    (
        lambda: layer(rotary=True)(X, positions=torch.arange(4)),
        ShapeError,
        "positions must be (tokens,) = (3,) or (batch, tokens) = (2, 3), but it has shape (4,).",
    ),
    (
        lambda: layer()(X, gates=torch.ones(3)),
        ShapeError,
        "gates must be a tensor of shape (heads,) = (2,) or (batch, heads) = (2, 2), but shape (3,) was given.",
    ),
    (
        lambda: layer()(X, gates=[1, 0]),
        ShapeError,
        "gates must be a tensor of shape (heads,) = (2,) or (batch, heads) = (2, 2), but a list was given.",
    ),
    *(
        (
            lambda kind=kind: layer()(X, gates=torch.ones(2, dtype=kind)),
            ShapeError,
            f"gates must be floating point, but {kind} was given: 0.0 switches a head off, 1.0 leaves it as it is. "
            "Convert them with gates.float().",
        )
        for kind in (torch.bool, torch.complex64, torch.int64)
    ),
    (
        lambda: layer()(X, key_padding=PADDING.long()),
        ShapeError,
        "key_padding must be bool (batch, tokens) = (2, 3) with True for a real token, but it is torch.int64 "
        "(2, 3). Convert a 0/1 mask with key_padding.bool().",
    ),
    (
        lambda: layer()(X, key_padding=PADDING[:, :2]),
        ShapeError,
        "key_padding must be bool (batch, tokens) = (2, 3) with True for a real token, but it is torch.bool (2, 2).",
    ),
    (
        lambda: layer(dropout=0.5)(X, mask=torch.tril(torch.ones(3, 3))),
        InputError,
        "mask must be boolean (True = may attend) or floating point (added to the scores), not a number that "
        "means yes or no; got torch.float32 with 0 and 1. If 1 means keep, pass mask.bool().",
    ),
    (
        lambda: layer(dropout=0.5)(X, backend="tiled"),
        InputError,
        "backend='tiled' cannot drop weights: in training with dropout the layer makes them itself. Leave "
        "backend out, or call layer.eval() first.",
    ),
    (
        lambda: layer().results(X, rows=True),
        InputError,
        "results gives the heads' terms alone; ask the layer itself for rows or weights.",
    ),
    (
        lambda: layer()(X, cache=[]),
        InputError,
        "cache must be a headwise KVCache, but a list was given. Make one with layer.new_cache(batch, max_length).",
    ),
    (
        lambda: layer()(X, cache=cache()),
        InputError,
        "update must be said when a cache is given: update=True writes this call's keys into it in place, "
        "update=False leaves it as it is.",
    ),
    (
        lambda: layer()(X, cache=cache(), update=True, causal=False),
        InputError,
        "causal=False does not fit a cache: tokens that are cached could not see the later ones. Leave causal"
        " out, or call the layer on the whole sequence.",
    ),
    (
        lambda: layer()(X, update=True),
        InputError,
        "update was given without a cache.",
    ),
    (
        lambda: layer()(X, X, cache=cache(), update=True),
        InputError,
        "cache holds the keys of the same sequence and does not go with a context. Give "
        "layer.encode_context(context) as the context instead: it makes the context's keys once.",
    ),
    (
        lambda: layer()(X, layer().encode_context(X), key_padding=PADDING),
        InputError,
        "key_padding and context_positions were taken by encode_context; they cannot be given again.",
    ),
    (
        lambda: layer(window=3)(X, cache=cache(window=2), update=True),
        InputError,
        "The cache keeps a window of 2 keys, but the layer's window is 3. Make the cache with "
        "layer.new_cache(batch, max_length).",
    ),
    (
        lambda: layer()(X, cache=cache(window=4), update=True),
        InputError,
        "The cache keeps a window of 4 keys, but the layer's window is None. Make the cache with "
        "layer.new_cache(batch, max_length).",
    ),
    (
        lambda: layer()(X, cache=cache(n_kv_heads=1), update=True),
        ShapeError,
        "The cache takes keys of shape (2, 1, 3, 4) (batch, key-value heads, tokens, width), but (2, 2, 3, 4)"
        " came. Make the cache with the layer's new_cache(batch, max_length).",
    ),
    (
        lambda: layer()(X, cache=cache(dtype=torch.float16), update=True),
        ShapeError,
        "The cache is torch.float16 on cpu, but the new keys are torch.float32 on cpu. Make the cache with "
        "dtype=torch.float32, device='cpu'.",
    ),
    (
        lambda: layer()(X, cache=cache(length=2), update=True),
        InputError,
        "The cache holds 0 of at most 2 tokens, and 3 more do not fit. Make it with a larger max_length, or "
        "crop or reset it.",
    ),
    (
        lambda: layer()(X, cache=filled(), update=False, mask=torch.ones(3, 3, dtype=torch.bool)),
        ShapeError,
        "mask must have a column for each of the 6 tokens of the sequence (cached and new), but it has shape (3, 3).",
    ),
    (
        lambda: cache().append(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), PADDING.long()),
        ShapeError,
        "key_padding must be bool (batch, new tokens) = (2, 3) with True for a real token, but it is "
        "torch.int64 (2, 3).",
    ),
    (
        lambda: cache(window=2).append(
            torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), torch.tensor([[True, False, True]] * 2)
        ),
        InputError,
        "A cache with a window takes padding on the left only, but here padding follows a real token: the "
        "window counts columns, and would count padding. Pad on the left.",
    ),
    (
        lambda: cache(batch=0),
        InputError,
        "batch must be a whole number of at least 1, but 0 was given.",
    ),
    (
        lambda: cache(length=None),
        InputError,
        "max_length is needed when there is no window: without either the memory has no bound.",
    ),
    (
        lambda: cache(spare=-1, window=2),
        InputError,
        "spare must be a whole number of at least 0, but -1 was given.",
    ),
    (
        lambda: cache().crop(),
        InputError,
        "crop takes keep (tokens to keep from the start) or drop (tokens to drop at the end).",
    ),
    (
        lambda: cache().crop(-1),
        InputError,
        "crop takes a number of at least 0, but -1 was given. Use drop=1 to drop the end.",
    ),
    (
        lambda: cache().crop(1.5),
        InputError,
        "keep must be a whole number of tokens, but 1.5 was given.",
    ),
    (
        lambda: cache().crop(drop=float("nan")),
        InputError,
        "drop must be a whole number of tokens, but nan was given.",
    ),
    (
        lambda: cache().crop(True),
        InputError,
        "keep must be a whole number of tokens, but True was given.",
    ),
    (
        lambda: turned().crop(2),
        InputError,
        "The ring cannot be cropped to 2 of 5 tokens: a window of 2 needs keys that were overwritten. Make "
        "the cache with spare=3 or more, or reset it.",
    ),
    (
        lambda: cache().select(torch.tensor([0.0])),
        InputError,
        "rows must be one axis of row numbers (int64), but torch.float32 (1,) was given.",
    ),
    (
        lambda: cache().select(torch.tensor([2])),
        InputError,
        "rows must be between 0 and 1, but 2 was given.",
    ),
    (
        lambda: positions(PADDING.long()),
        ShapeError,
        "key_padding must be bool (batch, tokens) with True for a real token, but it is torch.int64 (2, 3). "
        "Convert it with key_padding.bool().",
    ),
    (
        lambda: layer().heads[2],
        InputError,
        "The layer has heads 0 to 1, but head 2 was asked for.",
    ),
    (
        lambda: split().heads[1],
        InputError,
        "Head 1 is held by another rank; this one holds heads 0 to 0.",
    ),
    (
        lambda: from_torch(nn.Linear(2, 2)),
        InputError,
        "from_torch takes an nn.MultiheadAttention, but Linear was given. For attention modules of "
        "transformers use from_transformers.",
    ),
    (
        lambda: from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True)),
        UnsupportedError,
        "nn.MultiheadAttention with add_zero_attn=True cannot be converted: the layer has no place for it.",
    ),
    (
        lambda: to_torch(layer(n_kv_heads=1, rotary=True, softcap=5.0)),
        UnsupportedError,
        "nn.MultiheadAttention has no place for n_kv_heads=1, rotary=Rotary, softcap=5.0 of this layer, so it"
        " cannot be converted.",
    ),
    (
        lambda: to_torch(split()),
        InputError,
        "The layer's heads are split over ranks; convert it before they are split.",
    ),
    (
        lambda: from_transformers(nn.Linear(2, 2)),
        UnsupportedError,
        "Linear is none of the modules that can be converted: BertAttention, GPT2Attention, LlamaAttention.",
    ),
    (
        lambda: from_transformers(bert().self),
        InputError,
        "BertSelfAttention has no output projection. Give the BertAttention that holds it (its parent).",
    ),
    (
        lambda: from_transformers(llama(rope_parameters=DYNAMIC)),
        UnsupportedError,
        "rope_type 'dynamic' changes its frequencies with the length of the input, which the layer's rotary "
        "does not do. It can take: default, linear, llama3, yarn.",
    ),
    (
        lambda: to_transformers(layer(), "t5"),
        InputError,
        'like must be a module, "bert", "gpt2" or "llama", but \'t5\' was given.',
    ),
    (
        lambda: to_transformers(layer(), "llama"),
        UnsupportedError,
        "LlamaAttention turns all channels of every head with plain rotary in halves, which this layer does "
        "not. Give a LlamaAttention with the right config to copy.",
    ),
    (
        lambda: to_transformers(MultiHeadAttention(9, 2, d_k=4, rotary=True), "llama"),
        UnsupportedError,
        "LlamaConfig wants d_model to be a multiple of n_heads, which 9 and 2 are not.",
    ),
    (
        lambda: to_transformers(layer(d_k=3), "bert"),
        UnsupportedError,
        "BertAttention has no place for d_k=3: it must be d_model / n_heads. Give a module to copy.",
    ),
    (
        lambda: to_transformers(layer(rotary=True, n_kv_heads=1), llama()),
        UnsupportedError,
        "The layer and the LlamaAttention to copy it into differ (layer's first): n_kv_heads 1 and 2.",
    ),
    (
        lambda: split_heads(nn.Linear(2, 2)),
        InputError,
        "Linear holds no headwise MultiHeadAttention whose heads could be split.",
    ),
    (
        lambda: parallel(nn.Linear(2, 2)),
        InputError,
        "HeadParallel splits headwise MultiHeadAttention layers, not Linear.",
    ),
    (
        lambda: split_heads(layer(), mesh(ndim=2)),
        InputError,
        "Heads are split over a mesh of one dimension, but this one has 2. Give mesh['tp'].",
    ),
    (
        lambda: split_heads(split()),
        InputError,
        "The layer's heads are split over ranks already.",
    ),
    (
        lambda: split_heads(layer(softmax="summed")),
        InputError,
        'softmax="summed" adds the scores of all heads before its softmax, so they cannot be split.',
    ),
    (
        lambda: split_heads(layer(n_kv_heads=1)),
        InputError,
        "1 key-value heads cannot be split evenly over 2 ranks. Use a number of ranks that divides both 2 "
        "query heads and 1 key-value heads.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), TABLE, ids=[row[2][:50] for row in TABLE])
def test_wording(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
    assert type(caught.value) is kind


def patterns(source: str) -> list[tuple[int, str]]:
    """Line and wording of every refusal raised in a file, with ``.*`` for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            wording = "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts)
            if ast.unparse(node.exc.func).endswith("Error") and "Attribute" not in ast.unparse(node.exc.func):
                found.append((node.lineno, wording))
    return found


def test_every_refusal_is_in_the_table():
    folder = Path(headwise.nn.__file__).parent
    messages = [row[2] for row in TABLE]
    missing = []
    for path in sorted(folder.glob("*.py")):
        for line, wording in patterns(path.read_text(encoding="utf-8")):
            if not any(re.fullmatch(wording, message, re.DOTALL) for message in messages):
                missing.append(f"{path.name}:{line}")
    assert missing == []


def test_the_guard_can_fail():
    assert patterns('raise InputError(f"{name} is new.")') == [(1, r".*\ is\ new\.")]
    assert not any(re.fullmatch(r".*\ is\ new\.", row[2]) for row in TABLE)

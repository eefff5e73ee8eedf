"""Every refusal of ``hw.attention`` and ``kernels.run``, with its wording."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise.kernels
from headwise.errors import HeadwiseError, InputError, ShapeError, UnsupportedError
from headwise.kernels import Problem, ScoreRule, Wanted, alibi_slopes, attention, received, run, t5_bias

Q, K, V = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)


def of(q=Q, k=K, v=V, **options: Any) -> Callable[[], object]:
    return lambda: attention(q, k, v, **options)


def problem(wanted: Wanted | None = None, kv_map: tuple[int, ...] | None = None, **parts: Any) -> Callable[[], object]:
    return lambda: run(Problem(Q, K, V, kv_map=kv_map, **parts), wanted)


MESSAGES = [
    (of(q=[1.0]), ShapeError, "q must be a tensor (batch, query heads, queries, d_k); got list."),
    (
        of(q=torch.zeros(4, 3, 8)),
        ShapeError,
        "q must have four axes (batch, query heads, queries, d_k); got 3: (4, 3, 8)."
        " Add the missing axis with unsqueeze, or split the heads with unflatten and transpose.",
    ),
    (of(v=V.long()), ShapeError, "v must be floating point; got torch.int64. Convert it with v.float()."),
    (
        of(k=K.half()),
        ShapeError,
        "q, k and v must share one dtype; q is torch.float32 and k is torch.float16. Convert one with .to().",
    ),
    (
        of(v=V.to("meta")),
        ShapeError,
        "q, k and v must be on one device; q is on cpu and v on meta. Move one with .to().",
    ),
    (
        of(k=K[:1]),
        ShapeError,
        "q and k must have the same batch size; q has 2 and k has 1. Expand the smaller one: k.expand(...).",
    ),
    (of(k=torch.zeros(2, 2, 5, 7)), ShapeError, "q and k must have the same width d_k; q has 8 and k has 7."),
    (of(v=V[:, :1]), ShapeError, "k and v must have the same number of key-value heads; k has 2 and v has 1."),
    (of(v=V[:, :, :4]), ShapeError, "k and v must have the same number of keys; k has 5 and v has 4."),
    (of(q=Q[..., :0], k=K[..., :0]), ShapeError, "q and k must have a width d_k of at least 1; got 0."),
    (
        of(q=torch.zeros(2, 3, 3, 8)),
        ShapeError,
        "The number of query heads must be a multiple of the number of key-value heads; got 3 query heads"
        " and 2 key-value heads. Head h reads key-value head h // (query heads / key-value heads).",
    ),
    (
        problem(kv_map=(0, 1)),
        ShapeError,
        "kv_map must name a key-value head for each of the 4 query heads; it has 2 entries.",
    ),
    (problem(kv_map=(0, 1, 2, 0)), ShapeError, "kv_map names key-value heads from 0 to 1; got [0, 1, 2, 0]."),
    (of(causal="no"), InputError, "causal must be True or False; got 'no'."),
    (of(rows=1), InputError, "rows must be True or False; got 1."),
    (
        of(window=0),
        InputError,
        "window must be a whole number of keys, at least 1 (with causal: the query itself and window - 1 earlier keys);"
        " got 0. Use None for no window.",
    ),
    (
        of(window=2.0),
        InputError,
        "window must be a whole number of keys, at least 1 (with causal: the query itself and window - 1 earlier keys);"
        " got 2.0. Use None for no window.",
    ),
    (
        of(mask=torch.ones(3, 5, dtype=torch.int64)),
        InputError,
        "mask must be boolean (True = may attend) or floating point (added to the scores); got torch.int64."
        " If 1 means keep, pass mask.bool(); if 1 means drop, pass ~mask.bool().",
    ),
    (
        of(mask=torch.ones(3, 5)),
        InputError,
        "mask is floating point and holds only 0 and 1: as a number added to the scores that hides nothing."
        " If 1 means keep, pass mask.bool(); if 1 means drop, pass ~mask.bool(); if it is meant to be added,"
        " pass it as bias.",
    ),
    (of(mask=[[1]]), ShapeError, "mask must be a tensor; got list."),
    (
        of(mask=torch.ones(2, 5, dtype=torch.bool)),
        ShapeError,
        "mask with two axes must be (queries, keys) = (3, 5); got (2, 5)."
        " It looks like (batch, keys): pass that as key_padding.",
    ),
    (
        of(mask=torch.ones(2, 3, 5, dtype=torch.bool)),
        ShapeError,
        "mask must have two axes (queries, keys) or four (batch, query heads, queries, keys); got 3: (2, 3, 5)."
        " Say which axes are meant: mask[:, None] for (batch, queries, keys),"
        " mask[None] for (query heads, queries, keys).",
    ),
    (
        of(mask=torch.ones(2, 2, 3, 5, dtype=torch.bool)),
        ShapeError,
        "mask must broadcast to the scores: (batch or 1, query heads or 1, queries or 1, keys or 1)"
        " = (2 or 1, 4 or 1, 3 or 1, 5 or 1); got (2, 2, 3, 5).",
    ),
    (
        of(mask=torch.zeros(2, 2, 3, 5)),
        ShapeError,
        "the additive mask must broadcast to the scores: (batch or 1, query heads or 1, queries or 1, keys or 1)"
        " = (2 or 1, 4 or 1, 3 or 1, 5 or 1); got (2, 2, 3, 5).",
    ),
    (
        of(bias=torch.zeros(3, 4)),
        ShapeError,
        "bias with two axes must be (queries, keys) = (3, 5); got (3, 4).",
    ),
    (
        of(bias=torch.ones(3, 5, dtype=torch.bool)),
        ShapeError,
        "bias is added to the scores and must be a floating point tensor; got torch.bool.",
    ),
    (of(bias=1.0), ShapeError, "bias is added to the scores and must be a floating point tensor; got float."),
    (
        of(key_padding=torch.ones(2, 5)),
        InputError,
        "key_padding must be boolean, True = may attend; got torch.float32. If 1 means keep, pass key_padding.bool();"
        " if 1 means drop, pass ~key_padding.bool().",
    ),
    (of(key_padding=3), ShapeError, "key_padding must be a tensor; got int."),
    (
        of(key_padding=torch.ones(2, 3, dtype=torch.bool)),
        ShapeError,
        "key_padding must be (batch, keys) = (2, 5), True = a real key; got (2, 3).",
    ),
    (
        of(key_padding=torch.ones(2, 5, dtype=torch.bool, device="meta")),
        ShapeError,
        "key_padding must be on q's device, cpu; it is on meta. Move it with .to(q.device).",
    ),
    (
        of(scale=torch.tensor(0.5)),
        InputError,
        "scale must be a Python number; got Tensor."
        " For a learned or per-head scale, multiply q by it and pass scale=1.0.",
    ),
    (of(scale=float("nan")), InputError, "scale must be finite; got nan."),
    (of(softcap="50"), InputError, "softcap must be a Python number; got str."),
    (
        of(softcap=0.0),
        InputError,
        "softcap must be above 0 (scores become softcap * tanh(score / softcap)); got 0.0. Use None for no soft cap.",
    ),
    (
        of(sinks=[0.0] * 4),
        ShapeError,
        "sinks must be a floating point tensor with one logit per query head.",
    ),
    (of(sinks=torch.zeros(2)), ShapeError, "sinks must have one logit per query head, (4,); got (2,)."),
    (
        of(gates=[1.0]),
        ShapeError,
        "gates must be a tensor, (query heads,) or (batch, query heads); got list.",
    ),
    (
        of(gates=torch.ones(3, 4)),
        ShapeError,
        "gates must be (query heads,) = (4,) or (batch, query heads) = (2, 4); got (3, 4).",
    ),
    (
        problem(Wanted(pairs=torch.zeros(1, 1, 3))),
        ShapeError,
        "pairs must be int64 key positions, -1 for none; got torch.float32.",
    ),
    (
        problem(Wanted(pairs=torch.zeros(1, 3, 3, dtype=torch.int64))),
        ShapeError,
        "pairs must be (rules, batch or 1, queries) = (any, 2 or 1, 3); got (1, 3, 3).",
    ),
    (
        problem(Wanted(pairs=torch.full((1, 1, 3), 5))),
        InputError,
        "pairs must name keys from 0 to 4, or -1 for none; got 5.",
    ),
    (
        of(backend="flash"),
        InputError,
        "backend must be one of cpu, sdpa, tiled, eager, reference, or None to choose; got 'flash'.",
    ),
    (
        of(backend="sdpa", softcap=3.0),
        UnsupportedError,
        "backend='sdpa' cannot compute this: it has no way to pass a soft cap on without an n x n tensor."
        " Leave backend out (it would be 'tiled'), or pass another.",
    ),
    (
        problem(rule=ScoreRule(distance_bias=torch.zeros(4, 7).long())),
        ShapeError,
        "distance_bias is added to the scores and must be a floating point tensor.",
    ),
    (
        problem(rule=ScoreRule(distance_bias=torch.zeros(3, 7))),
        ShapeError,
        "distance_bias must be (query heads or 1, distances) = (4 or 1, any); got (3, 7).",
    ),
    (
        problem(rule=ScoreRule(distance_bias=torch.zeros(4, 6), distance_zero=4)),
        ShapeError,
        "distance_bias must have an entry for every distance j - i between a key and a query, here from -4 to 2; with"
        " distance_zero=4 its 6 entries cover -4 to 1. Make it with headwise.kernels.alibi or t5_bias.",
    ),
    (
        problem(Wanted(classes=torch.zeros(1, 5), n_classes=2)),
        ShapeError,
        "classes must be uint8, one small number per key; got torch.float32.",
    ),
    (
        problem(Wanted(classes=torch.zeros(3, 5, dtype=torch.uint8), n_classes=2)),
        ShapeError,
        "classes must be (batch or 1, keys) = (2 or 1, 5); got (3, 5).",
    ),
    (
        problem(Wanted(classes=torch.zeros(1, 5, dtype=torch.uint8))),
        InputError,
        "n_classes must be from 1 to 256; got 0.",
    ),
    (
        problem(Wanted(pair_lists=(torch.zeros(7), torch.zeros(0).long()))),
        ShapeError,
        "The offsets of pair_lists must be int64 with one axis; got torch.float32 (7,).",
    ),
    (
        problem(Wanted(pair_lists=(torch.zeros(6).long(), torch.zeros(0).long()))),
        ShapeError,
        "The offsets of pair_lists must be batch * queries + 1 = 7 numbers; got 6.",
    ),
    (
        problem(Wanted(pair_lists=(torch.zeros(7).long(), torch.zeros(4).long()))),
        InputError,
        "The offsets of pair_lists must rise from 0 to the number of listed keys, 4; they go from 0 to 0.",
    ),
    (
        problem(Wanted(pair_lists=(torch.tensor([0, 3, 2, 4, 4, 4, 4]), torch.zeros(4).long()))),
        InputError,
        "The offsets of pair_lists must rise from 0 to the number of listed keys, 4; they go from 0 to 4 and fall"
        " between.",
    ),
    (lambda: alibi_slopes(0), ShapeError, "heads must be at least 1; got 0."),
    (
        lambda: t5_bias(torch.zeros(8), 3, 5, bidirectional=True),
        ShapeError,
        "weight must be (buckets, query heads) with two buckets or more; got (8,).",
    ),
    (
        lambda: received(Problem(Q, K, V), lse=torch.zeros(2, 4, 5)),
        ShapeError,
        "lse must be (batch, query heads, queries) = (2, 4, 3); got (2, 4, 5).",
    ),
    (
        lambda: received(Problem(Q, K, V), row_weights=torch.zeros(3)),
        ShapeError,
        "row_weights must be (batch or 1, queries) = (2 or 1, 3); got (3,).",
    ),
    (
        of(backend="cpu"),
        UnsupportedError,
        "backend='cpu' cannot compute this: the native kernel is not built."
        " Leave backend out (it would be 'sdpa'), or pass another.",
    ),
]


@pytest.fixture(autouse=True)
def _no_native(monkeypatch):
    """The wording where the compiled extension is missing, on every machine."""
    monkeypatch.setattr("headwise.kernels.native.why_not", lambda: "the native kernel is not built")


@pytest.mark.parametrize(("act", "error", "message"), MESSAGES, ids=[message[:48] for *_, message in MESSAGES])
def test_refusals_have_this_wording(act, error, message):
    with pytest.raises(error) as caught:
        act()
    assert str(caught.value) == message
    assert type(caught.value) is error
    assert isinstance(caught.value, HeadwiseError)


def test_the_table_names_every_place_that_refuses():
    """Each raise statement of the package is met by a message above (its first words are compared)."""
    starts = []
    for path in sorted(Path(headwise.kernels.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = getattr(node.exc.func, "id", "")
                if name in ("InputError", "ShapeError", "UnsupportedError"):
                    starts.append(_pattern(node.exc.args[0]))
    assert len(starts) > 25
    for start in starts:
        assert any(re.match(start, message) for *_, message in MESSAGES), start


def _pattern(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return re.escape(node.value)
    assert isinstance(node, ast.JoinedStr)
    parts = [re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in node.values]
    return "".join(parts)

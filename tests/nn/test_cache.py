"""The cache: nothing changes but what is asked for, nothing unwritten matters, every cut of a prompt is the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.errors import InputError
from headwise.nn import KVCache, MultiHeadAttention, token_positions


class Decoder(nn.Module):
    """Two layers of attention with residuals over characters, with one of three kinds of position."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.embed, self.places = nn.Embedding(13, 8), nn.Embedding(23, 8)
        rotary = {"rotary": 50.0} if kind == "rotary" else {}
        self.layers = nn.ModuleList(MultiHeadAttention(8, 2, **rotary, **options) for _ in range(2))
        self.out = nn.Linear(8, 13)
        self.double().eval()

    def caches(self, batch: int, length: int | None = 23) -> list[KVCache]:
        return [layer.new_cache(batch, length) for layer in self.layers]

    def forward(self, tokens, key_padding=None, caches=None, **call):
        start = 0 if caches is None else caches[0].real_tokens
        if key_padding is None:
            places = torch.arange(tokens.shape[1]) + (start[:, None] if isinstance(start, torch.Tensor) else start)
        else:
            places = token_positions(key_padding, start)
        x = self.embed(tokens) + (self.places(places) if self.kind == "learned" else 0)
        length = tokens.shape[1] + (0 if caches is None else caches[0].length)
        if self.kind == "alibi":
            at = torch.arange(length)
            distance = (at[-tokens.shape[1] :, None] - at).abs()
            call["bias"] = -distance * torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None][None]
        for i, layer in enumerate(self.layers):
            cached = {} if caches is None else {"cache": caches[i], "update": True}
            x = x + layer(x, causal=True, key_padding=key_padding, **cached, **call)
        return self.out(x)


@pytest.mark.parametrize("kind", ["learned", "rotary", "alibi"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"n_kv_heads": 1, "softcap": 0.5}])
def test_case_14_a_left_padded_prompt_behaves_as_if_alone(kind, options):
    model = Decoder(kind, **options)
    batch = torch.tensor([[0, 0, 5, 6], [5, 6, 7, 8]])
    padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
    following = torch.tensor([[1, 2, 3], [4, 5, 6]])
    whole = model(batch, padding)
    caches = model.caches(2)
    steps = [model(batch, padding, caches), *(model(following[:, i : i + 1], None, caches) for i in range(3))]
    for row, pads in ((0, 2), (1, 0)):
        alone = torch.cat((batch[row, pads:], following[row]))[None]
        truth = model(alone)[0]
        assert_close(whole[row, pads:], truth[: 4 - pads], atol=1e-9, rtol=0)
        assert_close(torch.cat(steps, dim=1)[row, pads:], truth, atol=1e-9, rtol=0)


def test_case_14_without_positions_of_its_own_the_padded_row_differs():
    """The guard can fail: positions counted over padding change the answer."""
    model = Decoder("learned")
    right = model(torch.tensor([[0, 0, 5, 6]]), torch.tensor([[False, False, True, True]]))
    model.places.weight.data = model.places.weight.roll(-2, dims=0)
    wrong = model(torch.tensor([[0, 0, 5, 6]]), torch.tensor([[False, False, True, True]]))
    assert (right - wrong)[0, 2:].abs().max() > 1e-3


def test_case_16_the_prefix_stays_as_it_was():
    model = Decoder("rotary")
    prefix, token = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[9]])
    layer, x = model.layers[0], model.embed(prefix)
    cache = layer.new_cache(1, 8)
    layer(x, cache=cache, update=True)
    before = [t.clone() for t in cache.view()[:2]]
    new = model.embed(token)
    first, second = (layer(new, cache=cache, update=False) for _ in range(2))
    assert torch.equal(first, second)
    assert cache.length == 4
    assert all(torch.equal(a, b) for a, b in zip(before, cache.view()[:2], strict=True))
    copied = cache.clone()
    assert torch.equal(layer(new, cache=copied, update=True), first)
    assert (cache.length, copied.length) == (4, 5)


def test_case_16_crop_and_reset_are_exact():
    def three() -> KVCache:
        cache = KVCache(1, 7, n_kv_heads=2, d_k=3)
        cache.append(torch.arange(18.0).view(1, 2, 3, 3), torch.zeros(1, 2, 3, 3))
        return cache

    assert three().crop(0).length == 0
    assert three().crop(5).length == 3
    assert three().crop(drop=5).length == 0
    assert three().crop(drop=1).length == three().crop(2).length == 2
    assert torch.equal(three().crop(2).view()[0], torch.arange(18.0).view(1, 2, 3, 3)[:, :, :2])
    assert three().reset().length == 0
    model = Decoder("rotary")
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    caches = model.caches(1)
    model(torch.tensor([[9, 8, 7]]), torch.tensor([[False, True, True]]), caches)
    for cache in caches:
        cache.reset()
    assert_close(model(tokens, None, caches), model(tokens))


def test_crop_then_go_on_equals_never_having_been_there():
    model = Decoder("rotary")
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    caches = model.caches(1)
    model(tokens[:, :4], None, caches)
    model(torch.tensor([[12, 11]]), None, caches)
    for cache in caches:
        cache.crop(4)
    assert_close(model(tokens[:, 4:], None, caches), model(tokens)[:, 4:])


def test_crop_of_padded_rows_counts_real_tokens_again():
    cache = KVCache(2, 7, n_kv_heads=1, d_k=1)
    padding = torch.tensor([[False, False, True], [True, True, True]])
    cache.append(torch.zeros(2, 1, 3, 1), torch.zeros(2, 1, 3, 1), padding)
    assert cache.real_tokens.tolist() == [1, 3]
    assert cache.crop(2).real_tokens.tolist() == [0, 2]
    assert cache.reset().real_tokens == 0


@pytest.mark.parametrize("spare", [0, 2])
def test_a_ring_crops_as_far_as_its_keys_reach(spare):
    layer = MultiHeadAttention(8, 2, window=3, rotary=True).double().eval()
    x = torch.randn(1, 11, 8).double()
    truth = layer(x, causal=True)
    for drop in range(4):
        cache = layer.new_cache(1, spare=spare)
        for i in range(9):
            layer(x[:, i : i + 1].clone(), cache=cache, update=True)
        if drop > spare + 1:  # the next query needs one key less than a window
            with pytest.raises(InputError, match="needs keys that were overwritten"):
                cache.crop(drop=drop)
            assert cache.length == 9
            continue
        cache.crop(drop=drop)
        rest = [layer(x[:, i : i + 1], cache=cache, update=True) for i in range(9 - drop, 11)]
        assert_close(torch.cat(rest, dim=1), truth[:, 9 - drop :])


def pieces_of(sizes: list[int], length: int) -> list[tuple[int, int]]:
    cuts, start = [], 0
    for size in sizes:
        if start < length:
            cuts.append((start, min(start + size, length)))
            start += size
    return [*cuts, (start, length)] if start < length else cuts


OPTIONS = [
    {"d_k": 5}, {"d_k": 5, "n_kv_heads": 2, "bias": True}, {"d_k": 4, "rotary": 100.0}, {"d_k": 5, "window": 3},
    {"d_k": 5, "softmax": "summed", "window": 4}, {"d_k": 5, "d_v": 3, "combine": "mean", "sinks": True},
    {"d_k": 4, "d_v": 3, "n_kv_heads": 2, "rotary": 100.0, "window": 4, "softcap": 0.9, "qk_norm": True},
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    option=st.sampled_from(OPTIONS),
    sizes=st.lists(st.integers(1, 7), max_size=11),
    pads=st.lists(st.integers(0, 6), min_size=2, max_size=2),
    spare=st.integers(0, 3),
    statistics=st.booleans(),
    tracked=st.booleans(),
    biased=st.booleans(),
)
def test_any_cut_of_a_prompt_gives_the_same_cache_and_output(option, sizes, pads, spare, statistics, tracked, biased):
    torch.manual_seed(0)
    layer = MultiHeadAttention(7, 6, dtype=torch.float64, **option).eval()
    x, length = torch.randn(2, 11, 7).double(), 11
    padding = torch.arange(length) >= torch.tensor(pads)[:, None]
    call: dict[str, Any] = {"key_padding": padding} if any(pads) else {}
    bias = torch.randn(1, 1, length, length).double() if biased else None
    truth, rows, weights = layer(x, causal=True, rows=True, weights=True, bias=bias, **call)
    cache = layer.new_cache(2, None if layer.window else length, spare=spare if layer.window else 0)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    outs = []
    with torch.set_grad_enabled(tracked):
        for start, stop in pieces_of(sizes, length):
            here = {name: mask[:, start:stop] for name, mask in call.items()}
            here["bias"] = None if bias is None else bias[:, :, start:stop, :stop]
            asked = {"cache": cache, "rows": statistics, "weights": statistics, **here}
            read = layer(x[:, start:stop], update=False, **asked)
            assert cache.length == start
            out = layer(x[:, start:stop], update=True, **asked)
            assert_close(read[0], out[0])
            if statistics:
                out, own_rows, own_weights = out
                assert torch.equal(own_rows.argmax, rows.argmax[:, :, start:stop])
                assert_close(own_rows.entropy, rows.entropy[:, :, start:stop])
                assert torch.equal(own_rows.visible, rows.visible[:, :, start:stop])
                assert_close(own_weights, weights[:, :, start:stop, :stop])
            outs.append(out)
    assert_close(torch.cat(outs, dim=1), truth)
    assert cache.length == length
    once = layer.new_cache(2, None if layer.window else length, spare=spare if layer.window else 0)
    with torch.no_grad():
        layer(x, cache=once, update=True, **call)
    kept = min(cache.view()[0].shape[2], once.view()[0].shape[2])
    for a, b in zip(cache.view(), once.view(), strict=True):
        if a is None:
            assert b is None
        else:
            axis = 1 if a.dtype == torch.bool else 2
            assert_close(a.narrow(axis, a.shape[axis] - kept, kept), b.narrow(axis, b.shape[axis] - kept, kept))


@settings(max_examples=60, deadline=None)
@given(
    option=st.sampled_from(OPTIONS),
    steps=st.lists(
        st.tuples(st.sampled_from(["push", "crop", "drop", "reset", "clone"]), st.integers(1, 5)), max_size=11
    ),
    pads=st.integers(0, 3),
    spare=st.integers(0, 3),
)
def test_any_history_of_pushes_and_crops_equals_the_sequence_itself(option, steps, pads, spare):
    torch.manual_seed(0)
    layer = MultiHeadAttention(7, 6, dtype=torch.float64, **option).eval()
    cache = layer.new_cache(2, None if layer.window else 64, spare=spare if layer.window else 0)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    x, padding = torch.zeros(2, 0, 7).double(), torch.zeros(2, 0, dtype=torch.bool)
    oldest = 0  # the first position that a ring still holds
    with torch.no_grad():
        for what, n in steps:
            if what == "push":
                new, real = torch.randn(2, n, 7).double(), torch.ones(2, n, dtype=torch.bool)
                if x.shape[1] == 0:
                    real[0, :pads] = False
                x, padding = torch.cat((x, new), dim=1), torch.cat((padding, real), dim=1)
                out = layer(new, cache=cache, update=True, key_padding=None if bool(real.all()) else real)
                truth = layer(x, causal=True, key_padding=padding)[:, -n:]
                assert_close(out, truth)
                oldest = max(oldest, x.shape[1] - cache.slots)
            elif what == "clone":
                old, cache = cache, cache.clone()
                old.keys.fill_(torch.nan)
            elif what == "reset":
                cache.reset()
                x, padding, oldest = x[:, :0], padding[:, :0], 0
            else:
                keep = min(n, x.shape[1]) if what == "crop" else max(x.shape[1] - n, 0)
                crop = {"keep": n} if what == "crop" else {"drop": n}
                reaches = keep in (0, x.shape[1]) or max(keep + 1 - (layer.window or 64), 0) >= oldest
                if not reaches:
                    with pytest.raises(InputError, match="overwritten"):
                        cache.crop(**crop)
                    continue
                cache.crop(**crop)
                x, padding = x[:, :keep], padding[:, :keep]
                oldest = 0 if keep == 0 else oldest
            assert cache.length == x.shape[1]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("drop", [1, 2, 3])
def test_a_ring_that_had_turned_goes_on_after_a_crop(window, padded, drop):
    """Cropped to fewer tokens than it has slots, the ring still begins behind what it had overwritten."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(6, 2, window=window, dtype=torch.float64).eval()
    x = torch.randn(2, window + 3 + drop, 6, dtype=torch.float64)
    real = torch.ones(2, x.shape[1], dtype=torch.bool)
    real[0, :1] = not padded
    cache = layer.new_cache(2, None, spare=3)
    with torch.no_grad():
        layer(x[:, :-1], cache=cache, update=True, key_padding=real[:, :-1] if padded else None)
        cache.crop(drop=drop)
        for new in (1, 2):
            x, real = x[:, : cache.length], real[:, : cache.length]
            more = torch.randn(2, new, 6, dtype=torch.float64)
            x = torch.cat((x, more), dim=1)
            real = torch.cat((real, torch.ones(2, new, dtype=torch.bool)), dim=1)
            out = layer(more, cache=cache, update=True)
            assert_close(out, layer(x, causal=True, key_padding=real)[:, -new:])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_decoding_with_the_cache_equals_no_cache(options, padded):
    torch.manual_seed(5)
    layer = MultiHeadAttention(7, 6, dtype=torch.float64, **options).eval()
    embed, unembed = nn.Embedding(13, 7).double(), nn.Linear(7, 13).double()
    tokens = torch.tensor([[0, 0, 3], [5, 7, 11]])
    padding = torch.tensor([[not padded, not padded, True], [True, True, True]])
    cache, piece, piece_padding = layer.new_cache(2, 19), tokens, padding
    with torch.no_grad():
        for _ in range(11):
            fresh = unembed(layer(embed(tokens), causal=True, key_padding=padding))[:, -1]
            cached = unembed(layer(embed(piece), cache=cache, update=True, key_padding=piece_padding))[:, -1]
            assert_close(cached, fresh)
            piece, piece_padding = fresh.argmax(-1, keepdim=True), None
            tokens = torch.cat((tokens, piece), dim=1)
            padding = torch.cat((padding, torch.ones(2, 1, dtype=torch.bool)), dim=1)


class Copies(TorchDispatchMode):
    """The largest number of elements that one operation wrote into new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        held = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in held:
                self.largest = max(self.largest, made.numel())
        return out


@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2}, {"n_kv_heads": 2, "rotary": True}, {"softmax": "summed"}])
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("padded", [False, True])
def test_a_decode_step_copies_no_cache(options, window, padded):
    layer = MultiHeadAttention(32, 4, window=window, **options).eval()
    cache = layer.new_cache(1, None if window else 2048)
    with torch.no_grad():
        padding = torch.arange(1500)[None] >= 1 if padded else None
        layer(torch.randn(1, 1500, 32), cache=cache, update=True, key_padding=padding)
        with Copies() as copies:
            layer(torch.randn(1, 1, 32), cache=cache, update=True)
        # the scores of one query are heads x keys; a copy of the keys would be KV heads x keys x width
        assert copies.largest <= 4 * 1501
        with Copies() as copies:  # the guard can fail: a step that may not write has to copy
            layer(torch.randn(1, 1, 32), cache=cache, update=False)
        assert (
            copies.largest >= cache.keys[:, :, : min(cache.length, cache.slots)].numel() - cache.keys[:, :, :1].numel()
        )


def test_memory_is_of_kv_heads_and_counted():
    layer = MultiHeadAttention(64, 8, n_kv_heads=2, dtype=torch.bfloat16)
    assert layer.new_cache(3, 11).nbytes == 2 * 3 * 2 * 11 * 8 * 2
    windowed = MultiHeadAttention(64, 8, n_kv_heads=2, window=5)
    assert windowed.new_cache(3).nbytes == 2 * 3 * 2 * 5 * 8 * 4
    assert windowed.new_cache(3, 4).nbytes == 2 * 3 * 2 * 4 * 8 * 4
    assert windowed.new_cache(3, spare=2).slots == 7


def test_copies_are_independent():
    layer = MultiHeadAttention(8, 2).eval()
    cache = layer.new_cache(2, 7)
    layer(torch.randn(2, 3, 8), cache=cache, update=True, key_padding=torch.tensor([[False, True, True], [True] * 3]))
    before = cache.view()[0].clone()
    for twin in (
        cache.clone(),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        cache.select(torch.tensor([0, 1])),
    ):
        layer(torch.randn(2, 1, 8), cache=twin, update=True)
        twin.keys.fill_(7)
        assert torch.equal(cache.view()[0], before)
        assert (cache.length, twin.length) == (3, 4)


def test_select_follows_beams():
    layer = MultiHeadAttention(8, 2, rotary=True).double().eval()
    x, new = torch.randn(3, 5, 8).double(), torch.randn(2, 1, 8).double()
    cache = layer.new_cache(3, 7)
    layer(x, cache=cache, update=True)
    beams = cache.select(torch.tensor([2, 2]))
    assert (beams.batch, cache.batch) == (2, 3)
    truth = layer(torch.cat((x[[2, 2]], new), dim=1), causal=True)[:, -1:]
    assert_close(layer(new, cache=beams, update=True), truth)


def test_a_refused_call_leaves_the_cache_as_it_was():
    for options in ({}, {"window": 3}):
        layer = MultiHeadAttention(8, 2, **options).double().eval()
        x = torch.randn(1, 6, 8).double()
        cache = layer.new_cache(1, 6)
        with torch.no_grad():
            layer(x[:, :4], cache=cache, update=True)
            with pytest.raises(ValueError, match="mask"):
                layer(x[:, 4:5], cache=cache, update=True, mask=torch.ones(1, 3, dtype=torch.bool))
            with pytest.raises(ValueError, match="more do not fit"):
                layer(x[:, :3], cache=cache, update=True)
            assert cache.length == 4
            rest = layer(x[:, 4:], cache=cache, update=True)
        assert_close(rest, layer(x, causal=True)[:, 4:])


def test_gradients_stop_at_the_cache_and_reach_the_new_tokens():
    layer = MultiHeadAttention(8, 2).double()
    old, new = (torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cache = layer.new_cache(1, 7)
    layer(old, cache=cache, update=True)
    layer(new, cache=cache, update=True).sum().backward()
    assert old.grad is None
    assert not cache.keys.requires_grad
    with torch.no_grad():
        k, v = layer.project(old)[1:]
    q, k_new, v_new = layer.project(new)
    pattern = (q @ torch.cat((k, k_new), 2).transpose(2, 3) * layer.scale).masked_fill(
        torch.ones(3, 6, dtype=torch.bool).triu(4), -torch.inf
    )
    out = (pattern.softmax(-1) @ torch.cat((v, v_new), 2)).transpose(1, 2).flatten(2) @ layer.W_O
    truth = torch.autograd.grad(out.sum(), new)[0]
    assert_close(new.grad, truth)


def test_a_cache_made_in_inference_mode_can_be_used_outside():
    layer = MultiHeadAttention(8, 2).eval()
    with torch.inference_mode():
        cache = layer.new_cache(1, 7)
        layer(torch.randn(1, 3, 8), cache=cache, update=True)
    layer(torch.randn(1, 1, 8), cache=cache, update=True)
    assert cache.length == 4


def test_padding_between_tokens_without_a_window():
    """Without a window only the padding itself is hidden, wherever it is: here a batch of unequal pieces."""
    layer = MultiHeadAttention(8, 2, rotary=True).double().eval()
    x = torch.randn(2, 6, 8).double()
    cache = layer.new_cache(2, 8)
    padding = torch.tensor([[True, True, False], [True, True, True]])
    layer(x[:, :3], cache=cache, update=True, key_padding=padding)
    out = layer(x[:, 3:], cache=cache, update=True)
    assert_close(out[0], layer(x[:1, [0, 1, 3, 4, 5]], causal=True)[0, 2:])
    assert_close(out[1], layer(x[1:], causal=True)[0, 3:])


def test_repr_says_what_it_holds():
    assert repr(KVCache(1, 8, n_kv_heads=2, d_k=4)) == (
        "KVCache(length=0, 8 slots, batch=1, n_kv_heads=2, d_k=4, d_v=4, torch.float32, 512 bytes)"
    )
    assert "ring of 5" in repr(KVCache(1, n_kv_heads=2, d_k=4, window=5))

"""From the arguments of a call to a problem: masks of every kind, score rules, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from headwise.errors import ModelError, UnsupportedError
from headwise.kernels import run
from headwise.models.masks import compact_mask
from headwise.models.problems import Call, problem_of


def call(
    mask: Any = None,
    *,
    original: str = "sdpa",
    queries: int = 5,
    keys: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
    **extra: Any,
) -> Call:
    torch.manual_seed(0)
    query = torch.randn(2, heads, queries, 3)
    key, value = torch.randn(2, kv_heads, keys, 3), torch.randn(2, kv_heads, keys, 7)
    module = nn.Module()
    module.num_key_value_groups = heads // max(kv_heads, 1)
    module.is_causal = extra.pop("module_is_causal", False)
    extra = {"dropout": 0.0, "scaling": 0.4, **extra}
    return Call(module, "layers.0.attn", query, key, value, mask, original, sdpa_attention_forward, extra)


def own(given: Call) -> Tensor:
    return sdpa_attention_forward(given.module, given.query, given.key, given.value, given.mask, **given.extra)[
        0
    ].transpose(1, 2)


HIDDEN = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.3
HIDDEN[..., 0] = False
SDPA_MASKS = {
    "none": None,
    "boolean": ~HIDDEN,
    "boolean per head": (torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.8)
    | torch.eye(5, dtype=torch.bool),
    "boolean, one row for all queries": ~HIDDEN[:, :, :1],
    "three axes": ~HIDDEN[:1, 0],
    "two axes": ~HIDDEN[0, 0],
    "additive, finfo.min": torch.zeros(2, 1, 5, 5).masked_fill(HIDDEN, torch.finfo(torch.float32).min),
    "additive, -inf": torch.zeros(2, 1, 5, 5).masked_fill(HIDDEN, -torch.inf),
    "additive, -10000": torch.zeros(2, 1, 5, 5).masked_fill(HIDDEN, -10000.0),
    "additive, values": torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(3)),
    "additive, values and hidden": torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(3)).masked_fill(
        HIDDEN, -torch.inf
    ),
}


@pytest.mark.parametrize("name", SDPA_MASKS)
@pytest.mark.parametrize(
    "extra", [{}, {"scaling": None}, {"position_bias": torch.arange(100.0).reshape(1, 4, 5, 5).cos()}]
)
def test_a_problem_gives_what_sdpa_gives(name: str, extra: dict[str, Any]) -> None:
    given = call(SDPA_MASKS[name], **extra)
    if "position_bias" in extra and name == "three axes":
        pytest.skip("sdpa adds a bias to masks of four axes")
    torch.testing.assert_close(run(problem_of(given)).z, own(given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("queries", "keys", "extra"),
    [
        (5, 5, {"is_causal": True}),
        (5, 5, {"is_causal": None, "module_is_causal": True}),
        (5, 5, {"is_causal": False, "module_is_causal": True}),
        (5, 9, {"is_causal": True}),
        (1, 9, {"is_causal": True}),
        (1, 9, {"is_causal": False}),
        (3, 9, {"is_causal": False}),
        (5, 9, {"is_causal": True, "position_bias": torch.arange(180.0).reshape(1, 4, 5, 9).cos()}),
    ],
)
def test_a_missing_mask_is_read_as_sdpa_reads_it(queries: int, keys: int, extra: dict[str, Any]) -> None:
    """Also for an empty static cache: the keys beyond the queries are unwritten, whatever they hold."""
    given = call(None, queries=queries, keys=keys, **extra)
    if queries > 1 and keys > queries and extra.get("is_causal"):
        given.key[:, :, queries:] = 1e4
    torch.testing.assert_close(run(problem_of(given)).z, own(given), rtol=1e-5, atol=1e-6)


def test_a_missing_mask_under_eager_hides_nothing() -> None:
    visible = problem_of(call(None, original="eager", is_causal=True)).visible
    assert (visible.causal, visible.mask, visible.key_padding) == (False, None, None)


def test_a_description_stays_one() -> None:
    mask = compact_mask(batch_size=2, q_length=5, kv_length=5, mask_function=causal_mask_function)
    problem = problem_of(call(mask))
    assert problem.visible.causal
    assert problem.visible.mask is None
    assert problem.rule.bias is None


def test_hidden_keys_of_an_additive_mask_are_counted_as_hidden() -> None:
    from headwise.kernels import visible_counts

    expected = (~HIDDEN).sum(-1)
    for name in ("additive, finfo.min", "additive, -inf", "additive, -10000", "additive, values and hidden"):
        counted = visible_counts(problem_of(call(SDPA_MASKS[name])))
        assert torch.equal(counted.expand(2, -1, -1)[:, :1], expected), name


def test_a_mask_that_is_changed_in_place_is_read_again() -> None:
    mask = torch.zeros(2, 1, 5, 5)
    first = problem_of(call(mask))
    assert first.visible.mask is None
    mask[..., 3] = -torch.inf
    assert problem_of(call(mask)).visible.mask is not None


def test_gradients_reach_a_learned_bias() -> None:
    bias = torch.zeros(1, 4, 5, 5, requires_grad=True)
    run(problem_of(call(bias))).z.square().sum().backward()
    assert bias.grad is not None
    assert bool((bias.grad != 0).any())


def test_a_scale_that_is_a_tensor() -> None:
    scale = torch.tensor(0.4)
    torch.testing.assert_close(run(problem_of(call(scaling=scale))).z, run(problem_of(call())).z)
    per_head = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4, 1, 1)
    expected = torch.cat([run(problem_of(call(scaling=0.1 * (h + 1)))).z[:, h : h + 1] for h in range(4)], dim=1)
    torch.testing.assert_close(run(problem_of(call(scaling=per_head))).z, expected)


def test_one_learned_query_for_a_whole_batch() -> None:
    given = call()
    given = Call(
        given.module, given.path, given.query[:1], given.key, given.value, None, "sdpa", given.own, given.extra
    )
    torch.testing.assert_close(run(problem_of(given)).z, own(given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"mask": torch.ones(2, 1, 5, 5, dtype=torch.long)}, UnsupportedError, "neither boolean nor additive"),
        ({"mask": "causal"}, UnsupportedError, "of the kind str is not understood"),
        ({"mask": torch.ones(5)}, UnsupportedError, "is not understood"),
        (
            {"mask": compact_mask(batch_size=2, q_length=5, kv_length=9)},
            UnsupportedError,
            "a mask for 5 queries and 9 keys reached",
        ),
        ({"kv_heads": 3}, ModelError, "4 query heads do not divide into 3 key-value heads"),
        ({"indices": torch.zeros(2, 5, 3)}, UnsupportedError, "passes the argument 'indices'"),
        ({"s_aux": torch.zeros(2, 4, 5, 1)}, UnsupportedError, "only one sink per query head"),
        ({"position_bias": torch.zeros(5, 5)}, UnsupportedError, "'position_bias' is not a tensor with four axes"),
    ],
)
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        problem_of(call(**given))


def test_tensors_of_another_rank_are_refused() -> None:
    given = call()
    flat = Call(given.module, given.path, given.query[0], given.key, given.value, None, "sdpa", given.own, given.extra)
    with pytest.raises(UnsupportedError, match=r"query has the shape \(4, 5, 3\); expected four axes"):
        problem_of(flat)


def test_a_function_that_hands_its_arguments_on_may_read_any() -> None:
    def eager_attention_forward(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    given = call(temperature=2.0)
    problem_of(given)
    given = Call(
        given.module,
        given.path,
        given.query,
        given.key,
        given.value,
        None,
        "eager",
        eager_attention_forward,
        given.extra,
    )
    with pytest.raises(UnsupportedError, match="passes the argument 'temperature'"):
        problem_of(given)

"""Ranks from the factors: planted ranks are found, whatever way the weights are stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXModel, Phi3Config, Phi3Model

import headwise as hw
from headwise.measures import HeadWeights
from headwise.measures.rank import WEIGHT_RANKS, WeightRank, rank_of
from headwise.measures.weights import find_spectra
from tests.measures.tiny import bert, gpt2, heads_of, ids, llama, t5, tensor

KINDS = ("numerical", "effective", "stable")


def scanned(module: Any, *measures: Any) -> hw.HeadTable:
    return hw.scan(hw.wrap(module), inputs=ids(13, 7), measures=list(measures))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 0.0, 0.0], (1, 1, 1)),
        ([2.0, 2.0, 2.0], (3, 3, 3)),
        ([0.0, 0.0, 0.0], (0, 0, 0)),
        # p = 2/3, 1/3: exp(entropy) = 3 / 4^(1/3); 1 + 1/4
        ([2.0, 1.0, 0.0], (2, 3 / 4 ** (1 / 3), 1.25)),
        ([1.0, 1e-7, 0.0], (1, 1.00000168, 1.0)),
    ],
)
def test_three_definitions(values: list[float], expected: tuple[float, ...]) -> None:
    found = [float(rank_of(torch.tensor([values]), kind, 1e-6)) for kind in KINDS]
    assert found == pytest.approx(expected, rel=1e-6)


def test_planted_ranks_of_grouped_heads() -> None:
    """Query heads 0, 1 read key-value head 0; 2, 3 read head 1. Rank of a product is what its factors allow."""
    module = llama(num_hidden_layers=1)
    attention = module.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight[1 * 6 : 2 * 6] = torch.outer(torch.randn(6), torch.randn(24))
        attention.k_proj.weight[1 * 6 + 2 : 2 * 6] = 0.0
        attention.o_proj.weight[:, 3 * 6 + 1 : 4 * 6] = 0.0
    table = scanned(module, *WEIGHT_RANKS)
    assert table["qk_rank"].tolist() == [6, 1, 2, 2]
    assert table["ov_rank"].tolist() == [6, 6, 6, 1]
    assert table["qk_effective_rank"][1] == pytest.approx(1.0, abs=1e-6)


def test_a_low_rank_survives_storage_in_half_precision() -> None:
    """Rounding factors to bfloat16 fills null directions; the tolerance knows the dtype, the product is not rounded."""
    module = llama(num_hidden_layers=1, hidden_size=96, num_attention_heads=2, num_key_value_heads=2)
    attention = module.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(5)
    low = torch.randn(48, 3, generator=generator) @ torch.randn(3, 96, generator=generator)
    with torch.no_grad():
        attention.q_proj.weight[:48] = low
    table = scanned(module.bfloat16(), "qk_rank")
    assert table["qk_rank"][0] == 3
    weights = HeadWeights(module, hw.wrap(module).layout.blocks["model.layers.0.self_attn"])
    assert weights.resolution == torch.finfo(torch.bfloat16).eps
    strict = WeightRank(name="strict", product="qk", kind="numerical", tolerance=1e-12)
    assert scanned(module, strict)["strict"][0] > 3


def neox() -> Any:
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=29, vocab_size=53
    )
    return GPTNeoXModel(config).eval()


def phi3() -> Any:
    torch.manual_seed(3)
    config = Phi3Config(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=29,
        vocab_size=53, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Phi3Model(config).eval()


@pytest.mark.parametrize("make", [llama, bert, gpt2, t5, neox, phi3])
def test_the_values_follow_from_the_factors_found(make: Any) -> None:
    """x W_V of every head is what the model gives the attention: the rows of every arrangement are the right ones."""
    module = make()
    model = hw.wrap(module)
    example = tensor(ids(5)[0])
    if make is t5:
        example |= {"decoder_input_ids": torch.tensor([[0, 4, 5]])}
    seen: dict[str, Any] = {}

    class Look:
        def want(self, site: Any, problem: Any) -> Any:
            return hw_wanted()

        def see(self, call: Any) -> None:
            seen.setdefault(call.block.module, (call.block, call.problem))

    inputs: dict[str, Any] = {}
    handles = []
    for path in model.layout.blocks:
        part = module.get_submodule(path)
        handles.append(
            part.register_forward_pre_hook(
                lambda _m, args, kwargs, path=path: keep(inputs, path, args, kwargs), with_kwargs=True
            )
        )
    with hw.observe(module, Look()), torch.no_grad():
        module(**example)
    for handle in handles:
        handle.remove()
    checked = 0
    for path, (block, problem) in seen.items():
        weights = HeadWeights(module, block)
        if isinstance(weights.v, str) or "EncDec" in path:
            continue
        x = inputs[path].double()
        bias = problem.v.double() - torch.einsum("bke,ged->bgkd", x, weights.v)
        spread = (bias - bias[:, :, :1]).abs().max()  # what is left is a bias: the same at every position
        assert float(spread) < 1e-5 * float(problem.v.abs().max()) + 1e-6, path
        checked += 1
    assert checked >= 1


def keep(inputs: dict[str, Any], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs.setdefault(path, args[0] if args else kwargs["hidden_states"])


def hw_wanted() -> Any:
    from headwise.kernels import Wanted

    return Wanted()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("low", ["nothing", "keys", "queries"])
def test_spectra_are_those_of_the_dense_products(low: str, threads: int) -> None:
    """Within 1e-7 of the largest value, whether from squares or, where a factor lacks rank, from the roots; alone as
    together."""
    module = llama(num_hidden_layers=2)
    with torch.no_grad():
        attention = module.model.layers[0].self_attn
        attention.q_proj.weight[:6] *= torch.logspace(0, -4, 6)[:, None]  # values of four orders of magnitude
        if low != "nothing":
            weight = attention.k_proj.weight if low == "keys" else attention.q_proj.weight
            weight[7:9] = weight[6]
    blocks = [HeadWeights(module, block) for block in hw.wrap(module).layout.blocks.values()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        find_spectra(blocks, ["qk", "ov"])
    finally:
        torch.set_num_threads(before)
    for weights in blocks:
        q, k, v, o = weights.q, weights.k, weights.v, weights.o
        assert isinstance(q, torch.Tensor)
        assert isinstance(k, torch.Tensor)
        assert isinstance(v, torch.Tensor)
        assert isinstance(o, torch.Tensor)
        of_group = list(weights.block.kv_map)
        alone = HeadWeights(module, weights.block)
        for name, dense in (("qk", q @ k[of_group].transpose(1, 2)), ("ov", v[of_group] @ o)):
            expected = torch.linalg.svdvals(dense)[:, :6]
            found = getattr(weights, f"{name}_spectrum")
            assert float(((found - expected).abs() / expected[:, :1]).max()) < 1e-7
            assert torch.equal(found, getattr(alone, f"{name}_spectrum"))


def test_unknown_projections_are_absent_with_the_reason() -> None:
    module = llama(num_hidden_layers=1)
    block = hw.wrap(module).layout.blocks["model.layers.0.self_attn"]
    from dataclasses import replace

    bare = HeadWeights(module, replace(block, q=None, o=None, unknown=(("q", "norms stand between"),)))
    assert bare.qk_spectrum == "norms stand between"
    assert bare.ov_spectrum == "the output projection of the heads is not known"


def test_score_rank_is_that_of_the_dense_scores() -> None:
    module = llama(num_hidden_layers=2)
    passages = ids(13, 7, 9)
    table = hw.scan(hw.wrap(module), inputs=passages, measures=["score_rank", "score_effective_rank"], batch_size=2)
    assert table["score_rank"].tolist() == [6] * 8
    queries, keys = dense(module, passages)
    for head in range(4):
        scores = torch.cat([q[0, head] for q in queries]) @ torch.cat([k[0, head // 2] for k in keys]).T
        values = torch.linalg.svdvals(scores)[:6]
        expected = float(rank_of(values[None], "effective", 1e-6))
        assert table["score_effective_rank"][head] == pytest.approx(expected, rel=1e-6)


def dense(module: Any, passages: list[Any]) -> tuple[list[Any], list[Any]]:
    """Queries and keys of layer 0, in float64."""
    queries: list[Any] = []
    keys: list[Any] = []

    class Look:
        def want(self, site: Any, problem: Any) -> Any:
            return hw_wanted() if site.layer == 0 else None

        def see(self, call: Any) -> None:
            queries.append(call.problem.q.double())
            keys.append(call.problem.k.double())

    with hw.observe(module, Look()), torch.no_grad():
        for passage in passages:
            module(**tensor(passage))
    return queries, keys


def test_few_tokens_cap_the_score_rank() -> None:
    table = hw.scan(hw.wrap(llama(num_hidden_layers=1)), inputs=ids(2), measures=["score_rank"])
    assert table["score_rank"].tolist() == [2] * 4


def test_factors_of_the_output_projection() -> None:
    module = gpt2()
    model = hw.wrap(module)
    example = tensor(ids(5)[0])
    block = model.layout.blocks["transformer.h.0.attn"]
    z = heads_of(module, "transformer.h.0.attn.c_proj", example, 3)
    weights = HeadWeights(module, block)
    assert not isinstance(weights.o, str)
    assert not isinstance(weights.output_factor, str)
    whole = torch.einsum("bqhd,hde->bqhe", z.double(), weights.o).norm(dim=-1)
    small = torch.einsum("bqhd,hdr->bqhr", z, weights.output_factor).norm(dim=-1)
    torch.testing.assert_close(small.double(), whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("lost", ["nothing", "a row twice", "everything"])
def test_the_factor_of_the_output_projection_keeps_norms_where_its_rows_depend_on_each_other(lost: str) -> None:
    module = gpt2()
    block = hw.wrap(module).layout.blocks["transformer.h.0.attn"]
    weights = HeadWeights(module, block)
    stored = module.transformer.h[0].attn.c_proj.weight  # (heads x d_v, d_model)
    with torch.no_grad():
        if lost == "a row twice":
            stored[1] = stored[0]
        elif lost == "everything":
            stored[len(stored) // block.query_heads : 2 * len(stored) // block.query_heads] = 0.0
    o = weights.o
    assert not isinstance(o, str)
    assert not isinstance(weights.output_factor, str)
    z = torch.randn(3, o.shape[0], o.shape[1], generator=torch.Generator().manual_seed(3))
    whole = torch.einsum("bhd,hde->bhe", z.double(), o).norm(dim=-1)
    small = torch.einsum("bhd,hdr->bhr", z, weights.output_factor).norm(dim=-1)
    torch.testing.assert_close(small.double(), whole, rtol=1e-5, atol=1e-6)

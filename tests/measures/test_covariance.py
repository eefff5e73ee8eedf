"""Covariances of head outputs: against numpy in float64, merged, saved, and what a hostile file does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import headwise as hw
from headwise.errors import InputError, RunError, ShapeError
from headwise.measures.covariance import Scatter, Statistics, layer_of
from headwise.verbs import statistics
from tests.measures.tiny import bert, gpt2, heads_of, ids, llama, pairs, t5, tensor


def rows(count: int, width: int, seed: int = 3, mean: float = 0.0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + mean


def test_scatter_is_numpy() -> None:
    x = rows(2311, 7)
    found = Scatter(7)
    for part in x.split(701):
        found.add(part)
    torch.testing.assert_close(found.mean, x.mean(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.covariance, torch.from_numpy(np.cov(x.T, bias=True)), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.second_moment, x.T @ x / len(x), rtol=1e-12, atol=1e-13)


def test_a_large_mean_costs_no_digits() -> None:
    """float32 rows whose mean is 10,000 times their spread: E[x^2] - E[x]^2 in float32 would be noise."""
    x = rows(5003, 5, mean=1e4).float()
    found = Scatter(5)
    for part in x.split(997):
        found.add(part)
    expected = torch.from_numpy(np.cov(x.double().T, bias=True))
    torch.testing.assert_close(found.covariance, expected, rtol=2e-5, atol=2e-5)
    naive = (x.T @ x / len(x) - torch.outer(x.mean(0), x.mean(0))).double()
    assert (naive - expected).abs().max() > 1.0


@pytest.mark.parametrize("weighted", [False, True])
def test_float32_rows_stay_within_the_stated_bound(weighted: bool) -> None:
    """1,024 units of rounding (2^-24) of the spreads of both columns; more columns than one block of products."""
    x = rows(2311, 293, mean=3.0).float()
    weights = torch.rand(len(x), generator=torch.Generator().manual_seed(5), dtype=torch.float64) if weighted else None
    found = Scatter(293)
    for start in range(0, len(x), 1999):
        found.add(x[start : start + 1999], None if weights is None else weights[start : start + 1999])
    aweights = None if weights is None else weights.numpy()
    expected = torch.from_numpy(np.cov(x.double().numpy().T, bias=True, aweights=aweights))
    spread = expected.diagonal().sqrt()
    error = (found.covariance - expected).abs() / torch.outer(spread, spread)
    assert float(error.max()) < 1024 * 2**-24
    assert float(error.max()) > 0  # not float64 by accident


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=5), st.integers(0, 99))
def test_merging_in_any_order_is_the_whole(sizes: list[int], seed: int) -> None:
    x = rows(sum(sizes), 3, seed, mean=5.0)
    parts = []
    for part in x.split(sizes):
        one = Scatter(3)
        one.add(part)
        parts.append(one)
    whole = Scatter(3)
    for part in reversed(parts):
        whole = whole.merge(part)
    assert whole.rows == len(x)
    if len(x):
        torch.testing.assert_close(whole.mean, x.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            whole.covariance, torch.from_numpy(np.cov(x.T, bias=True)).reshape(3, 3), rtol=1e-9, atol=1e-11
        )
    else:
        assert torch.isnan(whole.covariance).all()


def test_rows_may_follow_a_merge() -> None:
    x = rows(40, 3, mean=7.0)
    first, second = Scatter(3), Scatter(3)
    first.add(x[:11].float())
    second.add(x[11:23].float())
    joined = first.merge(second)
    joined.add(x[23:].float())
    expected = torch.from_numpy(np.cov(x.float().double().T, bias=True))
    torch.testing.assert_close(joined.covariance, expected, rtol=1e-5, atol=1e-6)


def test_other_widths_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"rows must be \(rows, 3\), got \(2, 5\)"):
        Scatter(3).add(torch.zeros(2, 5))
    with pytest.raises(ShapeError, match="width 3 cannot be merged with rows of width 5"):
        Scatter(3).merge(Scatter(5))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_c_is_the_covariance_of_what_enters_w_o(batch_size: int) -> None:
    module, passages = llama(), ids(11, 3, 7, 13, 5)
    found = statistics(module, inputs=passages, batch_size=batch_size)
    for layer, site in enumerate(found):
        path = f"model.layers.{layer}.self_attn.o_proj"
        z = torch.cat([heads_of(module, path, tensor(one), 4)[0].flatten(1) for one in passages]).double()
        one = found[site]
        assert (one.z.rows, one.heads, one.d_v) == (39, 4, 6)
        torch.testing.assert_close(one.mean, z.mean(0), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(one.covariance, torch.from_numpy(np.cov(z.T, bias=True)), rtol=1e-4, atol=1e-7)


def test_energy_of_the_residual_stream() -> None:
    module, passages = bert(), ids(11, 3)
    found = statistics(module, inputs=passages)
    states = []
    for one in passages:
        with torch.no_grad():
            states.append(module(**tensor(one), output_hidden_states=True).hidden_states)
    for layer, site in enumerate(found):
        hidden = torch.cat([one[layer][0] for one in states]).double()
        assert found[site].input_energy == pytest.approx(float(hidden.square().sum(-1).mean()), rel=1e-5)


def test_first_rows_can_be_left_out() -> None:
    module, passages = llama(), ids(11, 3, 7)
    found = statistics(module, inputs=passages, skip_first=4)
    site = next(iter(found))
    path = "model.layers.0.self_attn.o_proj"
    z = torch.cat([heads_of(module, path, tensor(one), 4)[0, 4:].flatten(1) for one in passages]).double()
    assert found[site].z.rows == 7 + 0 + 3
    torch.testing.assert_close(found[site].mean, z.mean(0), rtol=1e-5, atol=1e-7)
    with pytest.raises(InputError, match="skip_first must be a whole number"):
        statistics(module, inputs=passages, skip_first=-1)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_relative_to_their_energy(batch_size: int) -> None:
    """Weights are 1/|h|^2, and in a decoder the first row of a passage weighs as much as all others would."""
    module, passages = llama(), ids(11, 3, 7)
    found = statistics(module, inputs=passages, relative=True, batch_size=batch_size)
    for layer, site in enumerate(found):
        z, counts, squares = [], [], []
        for one in passages:
            z.append(heads_of(module, f"model.layers.{layer}.self_attn.o_proj", tensor(one), 4)[0].flatten(1).double())
            with torch.no_grad():
                hidden = module(**tensor(one), output_hidden_states=True).hidden_states[layer][0].double()
            squares.append(hidden.square().sum(-1))
            counts.append(torch.tensor([len(hidden) - 1.0] + [1.0] * (len(hidden) - 1), dtype=torch.float64))
        weights = torch.cat(counts) / torch.cat(squares)
        expected = np.cov(torch.cat(z).T, aweights=weights, bias=True)
        torch.testing.assert_close(found[site].covariance, torch.from_numpy(expected), rtol=1e-4, atol=1e-8)
        assert found[site].input_energy == pytest.approx(float(torch.cat(counts).sum() / weights.sum()), rel=1e-5)
        assert found[site].z.weight == pytest.approx(float(weights.sum()), rel=1e-5)


def test_weighted_parts_merge_and_are_saved(tmp_path: Path) -> None:
    model = hw.wrap(llama())
    passages = ids(11, 3, 7, 13, 5)
    whole = statistics(model, inputs=passages, relative=True)
    first, second = (statistics(model, inputs=part, relative=True) for part in (passages[:2], passages[2:]))
    again = Statistics.load(first.save(tmp_path / "first.safetensors"))
    assert again.relative
    joined = second.merge(again)
    for site in whole:
        torch.testing.assert_close(joined[site].covariance, whole[site].covariance, rtol=1e-4, atol=1e-8)
        assert joined[site].input_energy == pytest.approx(whole[site].input_energy, rel=1e-6)
        assert joined[site].z.rows == whole[site].z.rows
    with pytest.raises(InputError, match="cannot merge: relative"):
        first.merge(statistics(model, inputs=passages[2:]))


def test_g_is_that_of_autograd() -> None:
    """g is the gradient of the summed loss at the output of W_O, row by row."""
    module, passages = gpt2(), ids(11, 3, 7)
    found = statistics(module, inputs=passages, gradients=True, batch_size=2)
    assert found.loss == "next_token, sum over the example's tokens"
    for layer, site in enumerate(found):
        gradients = []
        for one in passages:
            kept: list[torch.Tensor] = []
            projection = module.transformer.h[layer].attn.c_proj
            handle = projection.register_forward_hook(lambda _m, _a, out, kept=kept: kept.append(out))
            logits = module(**tensor(one)).logits
            handle.remove()
            target = torch.tensor(one["input_ids"][1:])
            loss = functional.cross_entropy(logits[0, :-1], target, reduction="sum")
            gradients.append(torch.autograd.grad(loss, kept[0])[0][0])
        g = torch.cat(gradients).double()
        moment = found[site].gradient_moment
        assert moment is not None
        torch.testing.assert_close(moment, g.T @ g / len(g), rtol=1e-3, atol=1e-7)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())


def test_parts_merge_into_the_whole() -> None:
    model = hw.wrap(llama())
    passages = ids(11, 3, 7, 13, 5)
    whole = statistics(model, inputs=passages, gradients=True)
    first, second = (statistics(model, inputs=part, gradients=True) for part in (passages[:2], passages[2:]))
    joined = second.merge(first)
    for site in whole:
        torch.testing.assert_close(joined[site].covariance, whole[site].covariance, rtol=1e-4, atol=1e-8)
        assert joined[site].input_energy == pytest.approx(whole[site].input_energy, rel=1e-6)
        torch.testing.assert_close(joined[site].gradient_moment, whole[site].gradient_moment, rtol=1e-3, atol=1e-8)
    with pytest.raises(InputError, match="whose rows would count twice"):
        first.merge(first)
    with pytest.raises(InputError, match="cannot merge: loss"):
        whole.merge(statistics(model, inputs=passages))
    with pytest.raises(InputError, match="cannot merge: skip_first"):
        first.merge(statistics(model, inputs=passages[2:], gradients=True, skip_first=1))
    with pytest.raises(InputError, match="cannot merge: weight_hash"):
        first.merge(statistics(llama(seed=8), inputs=passages[2:], gradients=True))


def test_encoder_decoder_has_three_kinds_of_sites() -> None:
    found = statistics(t5(), inputs=pairs(11, 7), gradients=True)
    assert [(site.stack, site.kind) for site in found].count(("decoder", "cross")) == 2
    assert {found[site].z.rows for site in found if site.stack == "encoder"} == {18}
    assert all(found[site].gradient.rows == found[site].z.rows for site in found)


def test_a_file_comes_back_to_the_last_bits(tmp_path: Path) -> None:
    found = statistics(llama(), inputs=ids(11, 3), gradients=True)
    path = found.save(tmp_path / "a.safetensors")
    again = Statistics.load(path)
    assert list(again) == list(found)
    assert (again.model, again.weight_hash, again.parts, again.loss) == (
        found.model,
        found.weight_hash,
        found.parts,
        found.loss,
    )
    for site in found:
        torch.testing.assert_close(again[site].covariance, found[site].covariance, rtol=1e-14, atol=1e-18)
        torch.testing.assert_close(again[site].gradient_moment, found[site].gradient_moment, rtol=1e-12, atol=1e-18)
        assert again[site].site == found[site].site
        assert again[site].input_energy == found[site].input_energy
    assert found.save(tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


def spoil(document: Any, arrays: dict[str, Any], how: str) -> None:
    if how == "missing":
        del arrays["0.mean"]
    elif how == "shape":
        arrays["0.covariance"] = arrays["0.covariance"][:-1]
    elif how == "nan":
        arrays["0.covariance"][0, 0] = np.nan
    elif how == "asymmetric":
        arrays["0.covariance"][0, 1] += 3
    elif how == "negative":
        arrays["0.covariance"] *= -1
    elif how == "twice":
        document["sites"][1] = document["sites"][0]
    elif how == "version":
        document["version"] = "2.0"
    elif how == "rows":
        document["sites"][0]["rows"] = -1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "0.mean or 0.covariance is missing although 14 rows"),
        ("shape", "0.covariance has shape"),
        ("nan", "values that are not finite"),
        ("asymmetric", "0.covariance is none: it is not symmetric, or has a negative variance"),
        ("negative", "0.covariance is none: it is not symmetric, or has a negative variance"),
        ("twice", "a site occurs twice"),
        ("version", "upgrade to read it"),
        ("rows", "does not follow the headwise.statistics format"),
    ],
)
def test_hostile_files(tmp_path: Path, how: str, words: str) -> None:
    import json

    from safetensors.numpy import load_file, save_file

    from headwise.artifacts import STATISTICS_FORMAT, read_tensors

    path = statistics(llama(), inputs=ids(11, 3)).save(tmp_path / "a.safetensors")
    document, _ = read_tensors(path, STATISTICS_FORMAT)
    arrays = dict(load_file(path))
    spoil(document, arrays, how)
    save_file(arrays, path, {"headwise": json.dumps(document)})
    with pytest.raises(RunError) as caught:
        Statistics.load(path)
    assert words in str(caught.value)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    with pytest.raises(RunError, match="does not exist"):
        Statistics.load(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_bytes(b"no tensors here at all")
    with pytest.raises(RunError, match="damaged, cut off, or something else"):
        Statistics.load(tmp_path / "text.safetensors")
    save_file({"x": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="has no entry 'headwise'"):
        Statistics.load(tmp_path / "model.safetensors")
    whole = statistics(llama(), inputs=ids(11)).save(tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="damaged"):
        Statistics.load(tmp_path / "cut.safetensors")
    with pytest.raises(RunError, match="is a folder"):
        statistics(llama(), inputs=ids(11)).save(tmp_path)


def test_layers_are_the_innermost_members_of_lists() -> None:
    assert layer_of(llama(), "model.layers.1.self_attn") == "model.layers.1"
    assert layer_of(t5(), "encoder.block.0.layer.0.SelfAttention") == "encoder.block.0.layer.0"
    assert layer_of(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0") is None

"""How alike heads are: against dense arithmetic, on planted copies, and clustering against a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.data import batches
from headwise.errors import InputError, RunError
from headwise.kernels import Problem, ScoreRule, Visible, Wanted, reference
from headwise.layout import HeadId
from headwise.measures.covariance import CovarianceObserver
from headwise.measures.similarity import (
    OutputAlignment,
    Redundancy,
    average_linkage,
    classical_map,
    cut,
    js_divergence,
    patterns_at,
)
from headwise.measures.similarity.alignment import projection_for
from headwise.trace import run
from headwise.verbs import redundancy
from tests.measures.tiny import bert, heads_of, ids, llama, pairs, t5, tensor


def patterns_of(module: Any, example: dict[str, Tensor]) -> Tensor:
    """(layers * heads, Q, K) by the model's own eager attention, in float64."""
    import copy

    twin = copy.deepcopy(module).double()
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([one[0] for one in twin(**example, output_attentions=True).attentions])


def dense_js(p: Tensor, q: Tensor) -> Tensor:
    def relative(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a / b).log2(), 0.0).sum(-1)

    middle = (p + q) / 2
    return (relative(p, middle) + relative(q, middle)) / 2


@pytest.mark.parametrize("make", [llama, bert])
def test_patterns_of_all_rows_are_compared_as_dense_ones(make: Any) -> None:
    module, passages = make(), ids(7, 5)
    found = redundancy(module, inputs=passages, rows=99, batch_size=2)
    total, rows = 0.0, 0
    for one in passages:
        patterns = patterns_of(module, tensor(one))
        total = total + dense_js(patterns[:, None], patterns[None]).sum(-1)
        rows += patterns.shape[1]
    expected = (total / rows).clamp(min=0).sqrt().numpy()
    np.fill_diagonal(expected, 0.0)
    assert found.js == pytest.approx(expected, abs=2e-4)
    assert found.patterns == {"rows": 12, "rows_per_passage": 99, "seed": 0}


def test_the_sample_is_a_sample_and_does_not_depend_on_batches() -> None:
    module, passages = llama(), ids(13, 5, 9, 3)
    found = [redundancy(module, inputs=passages, rows=2, batch_size=size) for size in (1, 2, 4)]
    assert [one.patterns["rows"] for one in found] == [8, 8, 8]
    assert found[1].js == pytest.approx(found[0].js, abs=1e-4)
    assert found[2].js == pytest.approx(found[0].js, abs=1e-4)
    assert found[2].cka == pytest.approx(found[0].cka, abs=1e-4)
    other = redundancy(module, inputs=passages, rows=2, seed=1)
    assert np.abs(other.js - found[0].js).max() > 1e-3


def cka(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    return float((x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))


@pytest.mark.parametrize("make", [llama, bert])
def test_cka_is_that_of_the_outputs(make: Any) -> None:
    """Every pair, within a layer and across, where all directions are kept."""
    module, passages = make(), ids(13, 7, 9)
    found = redundancy(module, inputs=passages)
    assert found.outputs["exact"] is True
    paths = [block.o_path for block in hw.wrap(module).layout.blocks.values()]
    outputs = []
    for path in paths:
        z = torch.cat([heads_of(module, path, tensor(one), 4)[0] for one in passages]).double()
        outputs += [z[:, head] for head in range(4)]
    expected = np.array([[cka(x, y) for y in outputs] for x in outputs])
    assert found.cka == pytest.approx(expected, abs=1e-4)
    assert np.diag(found.cka) == pytest.approx(1.0, abs=1e-6)


def aligned(model: hw.Model, passages: Any, directions: int, seed: int) -> np.ndarray:
    covariance, alignment = CovarianceObserver(), OutputAlignment(model.layout, directions, seed)
    run(model, batches(model, passages), [covariance, alignment])
    return alignment.alignment(covariance.statistics(model.layout))


def test_projected_cka_comes_near_and_is_exact_within_a_layer() -> None:
    module, passages = llama(), ids(13, 7, 9)
    model = hw.wrap(module)
    exact = redundancy(model, inputs=passages).cka
    assert aligned(model, passages, 6, 0) == pytest.approx(exact, abs=1e-6)
    errors = {}
    for directions in (2, 4):
        draws = [aligned(model, passages, directions, seed) for seed in range(10)]
        for layer in range(3):
            part = slice(4 * layer, 4 * layer + 4)
            assert draws[0][part, part] == pytest.approx(exact[part, part], abs=1e-6)
        assert all(((one >= 0) & (one <= 1)).all() for one in draws)
        errors[directions] = np.mean([np.abs(one - exact).mean() for one in draws])
    assert errors[4] < errors[2] < 0.25


def test_a_copy_in_another_layer_stays_a_copy_when_projected() -> None:
    """Layer 1 computes what layer 0 does, on the same input: its heads have CKA 1 with those of layer 0."""
    module = llama(num_hidden_layers=2)
    first, second = module.model.layers
    with torch.no_grad():
        first.self_attn.o_proj.weight.zero_()
        first.mlp.down_proj.weight.zero_()
        second.load_state_dict(first.state_dict())
    found = redundancy(module, inputs=ids(13, 7), directions=2)
    assert found.outputs == {"directions": 2, "exact": False, "rows": 20}
    assert np.diagonal(found.cka[:4, 4:]) == pytest.approx(1.0, abs=1e-6)


def test_projections_have_the_identity_for_their_mean() -> None:
    found = torch.stack([projection_for(5, 2, seed) for seed in range(4000)])
    assert (found @ found.transpose(1, 2)).mean(0).sub(torch.eye(5)).abs().max() < 0.1
    assert torch.equal(projection_for(5, 5, 0), torch.eye(5, dtype=torch.float64))


def test_planted_copies_are_found() -> None:
    """Head 2 is a copy of head 0, in one layer; head 3 of the next layer's head is nobody's."""
    module = bert(num_hidden_layers=2)
    layer = module.encoder.layer[0].attention.self
    with torch.no_grad():
        for part in (layer.query, layer.key, layer.value):
            part.weight[12:18] = part.weight[0:6]
            part.bias[12:18] = part.bias[0:6]
    found = redundancy(module, inputs=ids(13, 7))
    site = hw.wrap(module).layout.sites[0].key
    for by in ("patterns", "outputs"):
        first = found.nearest(1, by)[0]
        assert (first.left, first.right) == (HeadId(site, 0), HeadId(site, 2))
        assert first.distance == pytest.approx(0.0, abs=1e-4)
        assert found.clusters(1e-4, by) == [(HeadId(site, 0), HeadId(site, 2))]


def test_a_head_that_never_varies_has_no_cka() -> None:
    module = bert(num_hidden_layers=1)
    with torch.no_grad():
        module.encoder.layer[0].attention.self.value.weight[:6].zero_()
    found = redundancy(module, inputs=ids(13, 7))
    assert np.isnan(found.cka[0, 1:]).all()
    assert not np.isnan(found.cka[1:, 1:]).any()
    assert all(HeadId(pair.left.site, 0) not in (pair.left, pair.right) for pair in found.nearest(99))
    assert not np.isnan(found.js).any()


def test_encoder_and_decoder_are_not_compared() -> None:
    found = redundancy(t5(), inputs=pairs(11, 7))
    kinds = [(head.site.stack, head.site.kind) for head in found.heads]
    for a, left in enumerate(kinds):
        for b, right in enumerate(kinds):
            assert np.isnan(found.js[a, b]) == (left != right)
            assert np.isnan(found.cka[a, b]) == (left[0] != right[0])
    assert sorted({(one.heads[0].site.stack, one.heads[0].site.kind) for one in found.maps()}) == sorted(set(kinds))


def problems() -> dict[str, Problem]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(2, 6, 7, 5), draw(2, 3, 11, 5), draw(2, 3, 11, 4)
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[1, 8:] = False
    rules = {
        "all": (Visible(), ScoreRule()),
        "causal, padded": (Visible(causal=True, key_padding=padding), ScoreRule(scale=0.3)),
        "window, cap": (Visible(causal=True, window=3), ScoreRule(softcap=2.0)),
        "masks by head": (Visible(mask=draw(2, 6, 7, 11) > 0), ScoreRule()),
        "bias": (Visible(causal=True), ScoreRule(bias=draw(1, 6, 7, 11), additive_mask=draw(2, 1, 1, 11))),
        "sinks": (Visible(causal=True), ScoreRule(sinks=draw(6))),
    }
    return {name: Problem(q, k, v, visible, rule) for name, (visible, rule) in rules.items()}


@pytest.mark.parametrize("name", problems())
def test_chosen_rows_are_rows_of_the_pattern(name: str) -> None:
    problem, rows = problems()[name], torch.tensor([0, 3, 6])
    weights = reference.attend(problem, Wanted(weights=True)).weights
    assert weights is not None
    expected = weights[1][:, rows]
    expected = torch.nan_to_num(expected / expected.sum(-1, keepdim=True))
    torch.testing.assert_close(patterns_at(problem, 1, rows), expected, rtol=1e-9, atol=1e-12)


def test_divergence_is_within_its_bounds() -> None:
    p, q = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert js_divergence(p, q).tolist() == pytest.approx([np.log(2), 0.0])


# Clusters and maps


def plain_linkage(distances: np.ndarray) -> list[tuple[float, frozenset[int]]]:
    """UPGMA by its definition: merge the two clusters whose members are nearest on average."""
    groups = [frozenset([at]) for at in range(len(distances))]
    merged = []
    while len(groups) > 1:
        best = min(
            ((np.mean([[distances[a, b] for b in y] for a in x]), i, j)
             for i, x in enumerate(groups) for j, y in enumerate(groups) if i < j)
        )  # fmt: skip
        distance, i, j = best
        joined = groups[i] | groups[j]
        groups = [group for at, group in enumerate(groups) if at not in (i, j)] + [joined]
        merged.append((float(distance), joined))
    return merged


@pytest.mark.parametrize("seed", range(5))
def test_linkage_is_that_of_the_definition(seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(13, 3))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    found = average_linkage(distances)
    members = {at: frozenset([at]) for at in range(13)}
    for line, (left, right, _, size) in enumerate(found):
        members[13 + line] = members[int(left)] | members[int(right)]
        assert len(members[13 + line]) == size
    expected = plain_linkage(distances)
    assert found[:, 2] == pytest.approx([distance for distance, _ in expected])
    assert {members[13 + line] for line in range(12)} == {joined for _, joined in expected}
    labels = cut(found, 13, float(found[7, 2]))
    assert len(set(labels.tolist())) == 13 - 8


def test_linkage_agrees_with_scipy() -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy", reason="scipy is not installed: nothing to compare with")
    points = np.random.default_rng(7).normal(size=(40, 3))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    expected = hierarchy.linkage(distances[np.triu_indices(40, 1)], "average")
    assert average_linkage(distances) == pytest.approx(expected)


def test_linkage_of_one_two_and_equal_points() -> None:
    assert average_linkage(np.zeros((1, 1))).shape == (0, 4)
    assert average_linkage(np.zeros((4, 4)))[:, 2].tolist() == [0.0, 0.0, 0.0]
    assert cut(average_linkage(np.zeros((1, 1))), 1, 0.5).tolist() == [0]
    with pytest.raises(InputError, match="symmetric"):
        average_linkage(np.array([[0.0, 1.0], [2.0, 0.0]]))
    with pytest.raises(InputError, match="without NaN"):
        average_linkage(np.array([[0.0, np.nan], [np.nan, 0.0]]))


def test_a_map_of_points_in_a_plane_is_the_plane() -> None:
    points = np.random.default_rng(3).normal(size=(11, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    found, share = classical_map(distances)
    assert np.linalg.norm(found[:, None] - found[None], axis=-1) == pytest.approx(distances, abs=1e-9)
    assert share == pytest.approx(1.0)
    again, _ = classical_map(distances)
    assert (found == again).all()
    spread, low = classical_map(1 - np.eye(7))
    assert spread.shape == (7, 2)
    assert low == pytest.approx(2 / 6)


# Files and refusals


def test_a_file_comes_back(tmp_path: Path) -> None:
    found = redundancy(llama(), inputs=ids(7, 5))
    path = found.save(tmp_path / "a.safetensors")
    again = Redundancy.load(path)
    assert again.heads == found.heads
    assert again.layers == found.layers
    assert (again.js == found.js).all()
    assert (again.cka == found.cka).all()
    assert (again.patterns, again.outputs, again.parts) == (found.patterns, found.outputs, found.parts)
    assert found.save(tmp_path / "b.safetensors").read_bytes() == path.read_bytes()
    document = found.to_document(pairs=3)
    assert len(document["nearest"]["outputs"]) == 3
    from headwise.measures.covariance import Statistics

    with pytest.raises(RunError, match=r"is not a headwise\.statistics document"):
        Statistics.load(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "rows must be a whole number of at least 1"),
        ({"directions": True}, "directions must be a whole number of at least 1"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        redundancy(llama(), inputs=ids(7), **options)
    assert words in str(caught.value)


def test_wrong_questions_are_refused() -> None:
    found = redundancy(llama(), inputs=ids(7))
    with pytest.raises(InputError, match="by must be 'patterns' or 'outputs'"):
        found.distance("heads")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a distance in \[0, 1\]"):
        found.clusters(2.0)


def test_case_25_the_model_is_as_before() -> None:
    module = llama().train()
    redundancy(module, inputs=ids(7, 5))
    assert all(part.training for part in module.modules())
    assert module.config._attn_implementation == "sdpa"
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()) == 0

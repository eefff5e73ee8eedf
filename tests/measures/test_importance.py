"""Importance: gate gradients are derivatives, ablation is what it says, and neither cancels, dilutes or leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import BertForMaskedLM

import headwise as hw
from headwise.errors import DataError, InputError, MeasureError
from headwise.layout import HeadId
from headwise.measures.importance import Ablator, MaskedToken, NextToken, Projection, loss_for, passage_keys
from headwise.verbs import importance
from headwise.verbs.importance import importance_run
from tests.measures.tiny import (
    albert,
    bert,
    classifier,
    gpt2,
    ids,
    llama,
    masked,
    pairs,
    t5,
    tagger,
    tensor,
)

METHODS = ["gradient", "zero", "mean", "resample"]


def loss_of(module: Any, example: dict[str, torch.Tensor]) -> float:
    """Next-token loss, summed, by hand."""
    with torch.no_grad():
        logits = module(**example).logits[0].double()
    return float(functional.cross_entropy(logits[:-1], example["input_ids"][0, 1:], reduction="sum"))


@pytest.mark.parametrize(("make", "close"), [(llama, 2e-3), (gpt2, 1e-5)])  # Llama's norms compute in float32
def test_case_21_gate_gradients_are_finite_differences(make: Any, close: float) -> None:
    """In float64; the head's own gradient and no other's."""
    module = make().double()
    passages = ids(7, 5, 11)
    table = importance(module, inputs=passages)
    layout = hw.wrap(module).layout
    for head in layout.heads():
        found = []
        for one in passages:
            losses = []
            for scale in (1 + 1e-3, 1 - 1e-3):
                with hw.gate(module, [head], scale=scale):
                    losses.append(loss_of(module, tensor(one)))
            found.append((losses[0] - losses[1]) / 2e-3)
        assert table[head]["gate_gradient"] == pytest.approx(np.abs(found).mean(), rel=close, abs=1e-6)
        assert table[head]["fisher"] == pytest.approx(np.square(found).mean(), rel=close, abs=1e-6)
        assert table[head].stat("gate_gradient").std == pytest.approx(np.abs(found).std(), rel=10 * close, abs=1e-6)


def test_case_21_gate_gradient_is_context_times_its_derivative() -> None:
    """<z, dL/dz> at the input of the output projection."""
    module, example = llama(), tensor(ids(7)[0])
    table = importance(module, inputs=[example])
    kept: list[torch.Tensor] = []

    def keep(_module: Any, args: Any) -> None:
        kept.append(args[0])

    handle = module.model.layers[1].self_attn.o_proj.register_forward_pre_hook(keep)
    logits = module(**example).logits[0]
    handle.remove()
    loss = functional.cross_entropy(logits[:-1], example["input_ids"][0, 1:], reduction="sum")
    gradient = torch.autograd.grad(loss, kept[0])[0]
    expected = (gradient * kept[0]).unflatten(-1, (4, -1)).sum((0, 1, 3)).abs()
    found = [row["gate_gradient"] for row in table if row.layer == 1]
    assert found == pytest.approx(expected.tolist(), rel=1e-4)


def test_case_21_signs_do_not_cancel() -> None:
    """Two examples whose gate gradients are +1 and -1: score 1.0, not 0."""
    module = bert(num_hidden_layers=1)
    sign = {3: 1.0, 4: -1.0}

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        hidden = outputs.last_hidden_state
        signs = torch.tensor([sign[int(row[0])] for row in batch.inputs["input_ids"]])
        return signs * hidden[:, 0, 0]

    first, second = (torch.tensor([[token, 9, 9]]) for token in (3, 4))
    with torch.no_grad():  # the two first tokens mean the same, so that only the sign differs
        module.embeddings.word_embeddings.weight[4] = module.embeddings.word_embeddings.weight[3]
    both = {"input_ids": torch.cat([first, second])}
    together = importance(module, inputs=[both], loss=loss)
    alone = importance(module, inputs=[{"input_ids": first}, {"input_ids": second}], loss=loss, batch_size=1)
    only = importance(module, inputs=[{"input_ids": first}], loss=loss)
    assert (only["gate_gradient"] > 1e-6).all()
    assert together["gate_gradient"] == pytest.approx(only["gate_gradient"], rel=1e-5)
    assert alone["gate_gradient"] == pytest.approx(together["gate_gradient"], rel=1e-6)
    assert together["gate_gradient"] / only["gate_gradient"] == pytest.approx([1.0] * 4, rel=1e-5)


@pytest.mark.parametrize("make", [llama, masked, t5])
def test_case_21_batches_change_nothing(make: Any) -> None:
    passages = pairs(7, 5, 11) if make is t5 else ids(7, 5, 11)
    loss = MaskedToken(mask_id=1) if make is masked else "auto"
    tables = [importance(make(), inputs=passages, loss=loss, method=METHODS, batch_size=size) for size in (1, 2, 3)]
    for other in tables[1:]:
        for name in tables[0].measures:
            scale = np.abs(tables[0][name]).max()
            assert other[name] == pytest.approx(tables[0][name], rel=1e-4, abs=3e-4 * scale), name
            assert other.count(name).tolist() == [3] * len(other)


def test_case_21_gates_are_leaves_each_round() -> None:
    """Run, gate, run again: no gradient is missing."""
    module, passages = llama(), ids(7, 5)
    first = importance(module, inputs=passages)
    with hw.gate(module, {"model.layers.1": [0]}):
        between = importance(module, inputs=passages)
    again = importance(module, inputs=passages)
    assert first == again
    assert set(first.count("gate_gradient").tolist()) == {2}
    row = between[HeadId(between.sites[1].key, 0)]
    assert row["gate_gradient"] == 0.0, "a head that is off has no influence"


def test_positions_without_a_target_do_not_dilute() -> None:
    """A sum over an example's tokens: padding and special tokens add nothing; 'token' divides by what was summed."""
    module, passages = llama(), ids(7, 5)
    whole = importance(module, inputs=passages[:1])
    mean = importance(module, inputs=passages[:1], per="token")
    assert mean["gate_gradient"] == pytest.approx(whole["gate_gradient"] / 6, rel=1e-4, abs=1e-7)
    assert mean["fisher"] == pytest.approx(whole["fisher"] / 36, rel=1e-4, abs=1e-9)
    assert "mean over the example's tokens" in mean.measures["gate_gradient"].description


def test_halves_of_the_data_merge() -> None:
    model, passages = hw.wrap(llama()), ids(7, 5, 11, 3)
    whole = importance(model, inputs=passages, method=["gradient", "zero"])
    first, second = (
        importance(model, inputs=part, method=["gradient", "zero"]) for part in (passages[:1], passages[1:])
    )
    joined = second.merge(first)
    for name in whole.measures:
        assert joined[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-4 * np.abs(whole[name]).max())
    mean = [importance(model, inputs=part, method="mean") for part in (passages[:2], passages[2:])]
    with pytest.raises(InputError, match="depends on all rows together"):
        mean[0].merge(mean[1])


# Ablation


def test_case_26_zero_is_the_gate_and_the_zeroed_columns() -> None:
    module, passages = llama(), ids(7, 5)
    table = importance(module, inputs=passages, method="zero")
    for head in list(table.heads)[::3]:
        rises = []
        for one in passages:
            with hw.gate(module, [head]):
                gated = loss_of(module, tensor(one))
            rises.append(gated - loss_of(module, tensor(one)))
        assert table[head]["ablation_zero"] == pytest.approx(np.mean(rises), abs=2e-5)
        weight = module.get_submodule(head.site.module).o_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[:, head.head * 6 : head.head * 6 + 6] = 0.0
            columns = loss_of(module, tensor(passages[0]))
            weight.copy_(kept)
        assert rises[0] == pytest.approx(columns - loss_of(module, tensor(passages[0])), abs=1e-6)


@pytest.mark.parametrize("make", [llama, masked, gpt2, t5, albert])
def test_reuse_changes_no_bit(make: Any) -> None:
    passages = pairs(7, 5) if make is t5 else ids(7, 5)
    loss = MaskedToken(mask_id=1) if make is masked else "auto"
    module = make()
    with_reuse = importance_run(module, inputs=passages, loss=loss, method=["zero", "mean", "resample"])
    without = importance(module, inputs=passages, loss=loss, method=["zero", "mean", "resample"], reuse=False)
    assert with_reuse.table == without
    assert not any("ran the whole model" in note for note in with_reuse.run["notes"])


def ablated(module: Any, prepare: Any) -> tuple[list[float], list[str]]:
    """Every rise of zero ablation on one passage, with hooks put in place after the heads were found; and the notes."""
    from headwise.data import batches

    model = hw.wrap(module)
    _ = model.layout
    prepare()
    ablator = Ablator(model, NextToken())
    batch = next(iter(batches(model, ids(7))))
    return [float(rise.values[0]) for rise in ablator.batch(batch)], ablator.notes


def test_reuse_computes_only_what_lies_above() -> None:
    module, calls = llama(), {0: 0, 1: 0, 2: 0}

    def prepare() -> None:
        for number, layer in enumerate(module.model.layers):
            layer.mlp.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))

    _, notes = ablated(module, prepare)
    # one unchanged pass, two checks (from sites 1 and 2), then 4 heads of each layer
    assert calls == {0: 1 + 4, 1: 1 + 1 + 8, 2: 1 + 2 + 12}
    assert notes == []


@pytest.mark.parametrize("how", ["counts", "takes"])
def test_reuse_is_given_up_where_layers_share_something_else(how: str) -> None:
    """A layer that reads what an earlier one left behind: playing back would be wrong, so it is noticed and said."""
    module = llama()
    left: list[torch.Tensor] = []

    def read(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * len(left) if how == "counts" else out + left.pop()

    def prepare() -> None:
        module.model.layers[0].mlp.register_forward_hook(lambda _m, _a, out: left.append(out))
        module.model.layers[0].mlp.register_forward_pre_hook(lambda _m, _a: left.clear() if how == "takes" else None)
        module.model.layers[2].mlp.register_forward_hook(read)
        if how == "counts":
            module.lm_head.register_forward_hook(lambda *_: left.clear())

    rises, notes = ablated(module, prepare)
    assert any("ran the whole model" in note for note in notes)
    assert all(np.isfinite(rises))


def test_mean_ablation_puts_the_mean_of_all_real_rows() -> None:
    module, passages = llama(), ids(7, 5)
    table = importance(module, inputs=passages, method="mean", batch_size=2)
    head = table.heads[5]
    from tests.measures.tiny import heads_of

    path = f"{head.site.module}.o_proj"
    mean = torch.cat([heads_of(module, path, tensor(one), 4)[0] for one in passages]).mean(0)[head.head]
    rises = []
    for one in passages:

        def put(_module: Any, args: Any) -> Any:
            z = args[0].clone()
            z[..., head.head * 6 : head.head * 6 + 6] = mean
            return (z,)

        handle = module.get_submodule(path).register_forward_pre_hook(put)
        replaced = loss_of(module, tensor(one))
        handle.remove()
        rises.append(replaced - loss_of(module, tensor(one)))
    assert table[head]["ablation_mean"] == pytest.approx(np.mean(rises), abs=2e-5)


def test_resampling_needs_other_passages() -> None:
    with pytest.raises(InputError, match="there is only one passage"):
        importance(llama(), inputs=ids(7), method="resample")


def test_resampling_draws_by_the_seed() -> None:
    module, passages = llama(), ids(7, 5, 9)
    first, again, other = (importance(module, inputs=passages, method="resample", seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert (first["ablation_resample"] != other["ablation_resample"]).any()


def test_some_heads_only() -> None:
    module = llama()
    wanted = list(hw.wrap(module).layout.heads())[5:7]
    table = importance(module, inputs=ids(7), method="zero", heads=wanted)
    assert table.count("ablation_zero").tolist() == [0] * 5 + [1, 1] + [0] * 5
    assert "no head of this site" in str(table.reason("ablation_zero", table.sites[0].key))
    stranger = HeadId(wanted[0].site, 9)
    with pytest.raises(InputError, match=r"heads names .*:9, which is not a head"):
        importance(module, inputs=ids(7), method="zero", heads=[stranger])


# Losses


def test_next_token_is_the_models_own_loss() -> None:
    module, example = llama(), tensor(ids(7)[0])
    loss = NextToken(mean=True)
    model = hw.wrap(module)
    from headwise.data import batches

    task = loss.prepare(model, next(iter(batches(model, ids(7)))))
    with torch.no_grad():
        ours = loss(module(**example), task)
        theirs = module(**example, labels=example["input_ids"]).loss
    assert float(ours[0]) == pytest.approx(float(theirs), rel=1e-6)


def test_masks_are_fixed_by_the_passage() -> None:
    from headwise.data import batches

    model, loss = hw.wrap(masked()), MaskedToken(mask_id=1, share=0.3, seed=5)
    passages = ids(11, 7, 5)
    together = loss.prepare(model, next(iter(batches(model, passages))))
    for row, batch in enumerate(batches(model, passages, batch_size=1)):
        alone = loss.prepare(model, batch)
        place = together.batch.passages.index(batch.passages[0])
        length = alone.inputs["input_ids"].shape[1]
        assert torch.equal(together.inputs["input_ids"][place, :length], alone.inputs["input_ids"][0]), row
        hidden = alone.inputs["input_ids"][0] == 1
        assert int(hidden.sum()) == max(1, round(0.3 * length))
        assert torch.equal(alone.targets[0] != -100, hidden)
        assert passage_keys(batch)[0] == passage_keys(together.batch)[place]


def test_what_fits_the_model() -> None:
    for module, gradients, expected in (
        (llama(), True, "next_token"),
        (gpt2(), True, "next_token"),
        (masked(), True, "masked_token"),
        (t5(), True, "target"),
        (bert(), True, "projection"),
        (bert(), False, "fidelity_cosine"),
    ):
        found = loss_for(hw.wrap(module), "auto", labelled=False, gradients=gradients, mean=False, seed=0)
        assert found.name == expected
    assert loss_for(hw.wrap(llama()), "auto", labelled=True, gradients=True, mean=False, seed=0).name == "labels"


@pytest.mark.parametrize("kind", ["classes", "tags", "regression", "causal"])
def test_labels(kind: str) -> None:
    """Each kind of labels gives the loss that the model computes of them itself."""
    example = tensor(ids(7)[0])
    module: Any = {
        "classes": classifier, "tags": tagger, "causal": llama,
        "regression": lambda: classifier(num_labels=1, problem_type="regression") if False else regressor(),
    }[kind]()  # fmt: skip
    labels = {
        "classes": torch.tensor([2]),
        "tags": torch.tensor([[0, 1, 2, -100, 1, 0, 2]]),
        "regression": torch.tensor([0.7]),
        "causal": example["input_ids"],
    }[kind]
    inputs = {**example, "labels": labels}
    table = importance(module, inputs=[inputs], method="zero", per="token")
    with torch.no_grad():
        base = float(module(**inputs).loss)
        head = table.heads[2]
        with hw.gate(module, [head]):
            gated = float(module(**inputs).loss)
    assert table[head]["ablation_zero"] == pytest.approx(gated - base, abs=1e-6)
    assert (importance(module, inputs=[inputs])["gate_gradient"] >= 0).all()


def regressor() -> Any:
    from transformers import BertForSequenceClassification

    return bert(BertForSequenceClassification, num_labels=1)


@pytest.mark.parametrize("loss", ["fidelity_cosine", "fidelity_kl"])
def test_fidelity_is_zero_without_a_change_and_positive_with_one(loss: str) -> None:
    module = llama()
    table = importance(module, inputs=ids(7, 5), method="zero", loss=loss)
    assert (table["ablation_zero"] > 0).all()
    example = tensor(ids(7, 5)[0])
    head = table.heads[1]
    with torch.no_grad():
        base = module(**example).logits.double()
        with hw.gate(module, [head]):
            moved = module(**example).logits.double()
    if loss == "fidelity_kl":
        each = (base.softmax(-1) * (base.log_softmax(-1) - moved.log_softmax(-1))).sum()
    else:
        each = (1 - functional.cosine_similarity(base, moved, dim=-1)).sum()
    only = importance(module, inputs=ids(7, 5)[:1], method="zero", loss=loss)
    assert only[head]["ablation_zero"] == pytest.approx(float(each), rel=1e-3)


def test_the_gradient_of_fidelity_is_refused() -> None:
    with pytest.raises(InputError, match=r"exactly zero at the unchanged model.*projection"):
        importance(llama(), inputs=ids(7), loss="fidelity_kl")


def test_projections_give_the_length_of_the_derivative() -> None:
    """Over many directions the squared gradient tends to the squared length of the normalised output's derivative."""
    module, passages = bert(num_hidden_layers=1), ids(3)
    example = tensor(passages[0])
    draws = [importance(module, inputs=passages, loss=Projection(seed=seed)).mean("fisher") for seed in range(60)]
    head = hw.wrap(module).layout.sites[0].key
    outputs = []
    for scale in (1.01, 0.99):
        with torch.no_grad(), hw.gate(module, {head: [2]}, scale=scale):
            rows = module(**example).last_hidden_state[0].double()
        outputs.append(rows)
    mean_norm = (outputs[0] + outputs[1]).norm(dim=-1, keepdim=True) / 2
    derivative = (outputs[0] - outputs[1]) / 0.02 / mean_norm
    unit = (outputs[0] + outputs[1]) / 2 / mean_norm
    derivative = derivative - unit * (derivative * unit).sum(-1, keepdim=True)
    expected = float(derivative.square().sum())
    assert np.mean(draws, axis=0)[2] == pytest.approx(expected, rel=0.5)


def double_first(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.logits[:, 0, 0] * 2


def test_module_and_function() -> None:
    import sys
    import types

    place = types.ModuleType("losses_of_mine")
    place.double_first = double_first
    place.number = 3
    sys.modules["losses_of_mine"] = place
    try:
        by_name = importance_run(llama(), inputs=ids(7), loss="losses_of_mine:double_first")
        assert by_name.run["arguments"]["loss"] == "losses_of_mine:double_first"
        given = importance(llama(), inputs=ids(7), loss=double_first)
        assert by_name.table["gate_gradient"].tolist() == given["gate_gradient"].tolist()
        with pytest.raises(InputError, match="losses_of_mine has no function 'number'"):
            importance(llama(), inputs=ids(7), loss="losses_of_mine:number")
    finally:
        del sys.modules["losses_of_mine"]
    with pytest.raises(InputError, match="module 'no_such_module' cannot be imported"):
        importance(llama(), inputs=ids(7), loss="no_such_module:f")


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "gradients"}, InputError, "one or several of gradient, zero, mean, resample; got 'gradients'"),
        ({"method": []}, InputError, "method must be one or several"),
        ({"loss": "next_tokn"}, InputError, "there is no loss 'next_tokn'; did you mean 'next_token'?"),
        ({"loss": 3}, InputError, "loss must be a name, a Loss or a function, and is a int"),
        ({"per": "row"}, InputError, "per must be 'example' or 'token'"),
        ({"loss": "labels"}, InputError, "needs 'labels' in the inputs"),
        ({"loss": "masked_token"}, InputError, "needs the id of the mask token"),
        ({"loss": "target"}, InputError, "needs decoder_input_ids"),
        ({"loss": lambda o, b: o.logits.mean()}, InputError, "must give one floating-point number per example, (2,)"),
        ({"loss": lambda o, b: 3.0}, InputError, "gave float"),
        ({"loss": lambda o, b: o.logits[:, 0, 0].detach()}, MeasureError, "does not depend on the heads"),
        ({"loss": lambda o, b: torch.ones(2, requires_grad=True)}, MeasureError, "every gate gradient is exactly 0"),
        ({"loss": lambda o, b: o.logits[:, 0, 0] * 0}, MeasureError, "every gate gradient is exactly 0"),
        ({"loss": lambda o, b: o.logits[:, 0, 0] * torch.tensor([1, torch.nan])}, MeasureError, "passage 1 (counted"),
        ({"method": "zero", "loss": lambda o, b: o.logits[:, 0, 0] / 0}, MeasureError, "passage 0 (counted from 0)"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], error: type[Exception], words: str) -> None:
    module = llama()
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]])}
    with pytest.raises(error) as caught:
        importance(module, inputs=[batch], **options)
    assert words in str(caught.value)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    assert module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("loss", ["next_token", MaskedToken(mask_id=1)])
def test_a_text_shorter_than_two_tokens_is_named(loss: Any) -> None:
    with pytest.raises(DataError, match=r"passage 1 \(counted from 0\).*has fewer than two tokens"):
        importance(llama(), inputs=ids(5, 1, 7), loss=loss)


def test_a_base_model_has_no_next_token() -> None:
    with pytest.raises(InputError, match=r"needs logits, and the model gives BaseModelOutput.*with its head"):
        importance(llama().model, inputs=ids(7), loss="next_token")


def test_a_short_text_is_named_by_its_words() -> None:
    from tests.loading.tiny_models import word_tokenizer

    model = hw.wrap(bert(BertForMaskedLM), word_tokenizer())
    with pytest.raises(DataError, match="cat"):
        importance(model, ["the cat sat", "cat"], loss=MaskedToken(mask_id=1))


def test_case_25_everything_is_as_before(tmp_path: Any) -> None:
    module = llama().train()
    frozen = module.model.layers[0].mlp.up_proj.weight
    frozen.requires_grad_(False)
    model = hw.wrap(module)
    _ = model.layout
    wanted = {name: value.requires_grad for name, value in module.named_parameters()}

    def same() -> None:
        assert all(part.training for part in module.modules())
        assert {name: value.requires_grad for name, value in module.named_parameters()} == wanted
        assert all(value.grad is None for value in module.parameters())
        assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()) == 0
        assert not any("forward" in vars(part) for part in module.modules())
        assert module.config._attn_implementation == "sdpa"

    importance(model, inputs=ids(7, 5), method=METHODS)
    same()
    calls = 0

    def explode(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 9:  # past what finds the heads
            raise RuntimeError("layer 1 fails")

    hook = module.model.layers[1].mlp.register_forward_pre_hook(explode)
    for method in METHODS:
        calls = 0
        with pytest.raises(RuntimeError, match="layer 1 fails"):
            importance(model, inputs=ids(7, 5, 9, 3, 6, 4, 8, 11), method=method, batch_size=1)
    hook.remove()
    same()


def test_run_folder(tmp_path: Any) -> None:
    result = importance_run(llama(), inputs=ids(7, 5), method=["gradient", "zero"], output=tmp_path / "run", seed=3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["heads.json", "report.html", "run.json"]
    assert result.run["arguments"]["method"] == ["gradient", "zero"]
    assert result.run["arguments"]["loss"] == "next_token"
    assert list(result.table.measures) == ["gate_gradient", "fisher", "ablation_zero"]


def test_windows_of_a_vision_model_belong_to_their_image() -> None:
    """Swin computes attention in windows, several rows of the call's batch per image."""
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(3)
    config = SwinConfig(
        image_size=16, patch_size=2, num_channels=3, embed_dim=8, depths=[2], num_heads=[2], window_size=4, num_labels=3
    )
    module = SwinForImageClassification(config).eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    inputs = {"pixel_values": images, "labels": torch.tensor([0, 2])}
    try:
        together = importance(module, inputs=[inputs])
    except hw.HeadwiseError as refusal:
        pytest.skip(f"Swin is refused: {refusal}")
    alone = importance(module, inputs=[{name: value[at : at + 1] for name, value in inputs.items()} for at in range(2)])
    assert alone["gate_gradient"] == pytest.approx(together["gate_gradient"], rel=1e-4)

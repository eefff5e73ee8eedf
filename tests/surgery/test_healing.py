"""Healing: a cut model learns what its original gives; interrupted runs go on; folders of others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.models import load
from headwise.surgery import Healing, verify
from headwise.surgery.healing import distance
from tests.surgery import small

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install headwise[heal]")

PLAN = {"model.layers.0": [0, 1]}


def inputs() -> list[dict[str, list[int]]]:
    """Examples, which are put together in batches; tensors would be taken as they are."""
    draw = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(3, 29, (12,), generator=draw).tolist()} for _ in range(8)]


def healed(model: Any, **how: Any) -> Any:
    return hw.prune(model, PLAN, inputs=inputs(), batch_size=4, heal=Healing(**how))


def test_the_distance_falls_and_the_record_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small.decoder("Llama")
    before = [value.detach().clone() for value in model.parameters()]
    pruned = healed(model, steps=12, rate=1e-3)
    said = pruned.surgery.repair["heal"]
    assert said["last"] < 0.8 * said["first"]
    assert (said["steps"], said["loss"], said["batches"], said["resumed"]) == (12, "kl", 2, None)
    assert all(map(torch.equal, before, model.parameters()))
    assert not pruned.module.training
    assert capsys.readouterr().out == ""
    folder = pruned.save(tmp_path / "small")
    loaded = load(folder)
    assert loaded.surgery == pruned.surgery
    assert "trained for 12 steps" in (folder / "README.md").read_text()
    found = verify(model, loaded)
    assert found.healed > 5
    assert found.repaired == ("model.layers.0.self_attn.o_proj",)
    assert hw.verify(model, hw.prune(model, PLAN, repair="none")).healed == 0


def test_an_encoder_is_healed_by_its_hidden_states() -> None:
    bert = small.bert()
    pruned = hw.prune(bert, {"encoder.layer.0": [0, 1]}, inputs=inputs(), heal=Healing(12, 1e-4))
    assert pruned.surgery is not None
    said = pruned.surgery.repair["heal"]
    assert said["loss"] == "squared difference"
    assert said["last"] < said["first"]


def test_a_healing_that_made_it_worse_says_so() -> None:
    notes: list[str] = []
    hw.prune(small.bert(), {"encoder.layer.0": [0]}, inputs=inputs()[:2], heal=Healing(2, 0.3), notice=notes.append)
    assert any("healing made it worse" in note for note in notes)


def test_an_interrupted_healing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after 4 of 6 steps and taken up again, the weights are those of a run in one go."""
    from headwise.surgery import healing

    model = small.decoder("Llama")
    whole = healed(model, steps=6, folder=tmp_path / "whole", every=2)
    calls = 0

    def stopping(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 + 5:  # both batches before the first step
            raise KeyboardInterrupt
        return distance(*given)

    with monkeypatch.context() as patch:
        patch.setattr(healing, "distance", stopping)
        with pytest.raises(KeyboardInterrupt):
            healed(model, steps=6, folder=tmp_path / "broken", every=2)
    again = healed(model, steps=6, folder=tmp_path / "broken", every=2)
    assert again.surgery.repair["heal"]["resumed"] == 4
    for one, other in zip(whole.module.parameters(), again.module.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    with pytest.raises(HeadwiseError, match="the checkpoints of another healing"):
        healed(model, steps=7, folder=tmp_path / "broken", every=2)


def test_what_is_refused(tmp_path: Path) -> None:
    model = small.decoder("Llama")
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(HeadwiseError, match="is not empty and holds no healing"):
        healed(model, steps=2, folder=tmp_path)
    with pytest.raises(HeadwiseError, match="healing needs text to learn from"):
        hw.prune(model, PLAN, repair="none", heal=3)
    with pytest.raises(HeadwiseError, match="steps of healing must be a whole number"):
        hw.prune(model, PLAN, inputs=inputs(), heal=-1)
    with pytest.raises(HeadwiseError, match="learning rate of healing must be"):
        Healing(3, rate=2.0)
    with pytest.raises(HeadwiseError, match="healing in float16 would overflow"):
        hw.prune(small.decoder("Llama").half(), PLAN, inputs=inputs(), repair="none", heal=2)


def test_healing_does_not_depend_on_the_mode_of_the_model() -> None:
    """A model in training mode would drop out at random, and teach that."""
    one, two = small.bert(hidden_dropout_prob=0.5), small.bert(hidden_dropout_prob=0.5).train()
    plan = {"encoder.layer.0": [0, 1]}
    left, right = (hw.prune(model, plan, inputs=inputs(), heal=Healing(3)) for model in (one, two))
    assert left.surgery is not None
    assert right.surgery is not None
    assert left.surgery.repair["heal"]["first"] == right.surgery.repair["heal"]["first"]
    assert left.surgery.repair["heal"]["last"] == right.surgery.repair["heal"]["last"]
    assert (one.training, two.training, left.module.training, right.module.training) == (False, True, False, True)


def test_a_frozen_model_cannot_be_healed() -> None:
    with pytest.raises(HeadwiseError, match="every weight of the model has requires_grad=False"):
        healed(small.decoder("Llama").requires_grad_(False), steps=2)


def test_a_damaged_ticket_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "healing.json").write_text("{")
    with pytest.raises(HeadwiseError, match=r"healing\.json is damaged; delete .*, and healing begins anew"):
        healed(small.decoder("Llama"), steps=2, folder=tmp_path)
    import safetensors

    for error in (
        safetensors.SafetensorError("No space left on device (os error 28)"),
        RuntimeError("PytorchStreamWriter failed writing file data/4: file write failed"),
    ):

        def full(*_given: Any, error: Exception = error, **_more: Any) -> None:
            raise error

        monkeypatch.setattr("transformers.Trainer._save_checkpoint", full)
        with pytest.raises(HeadwiseError, match="a checkpoint of healing cannot be written"):
            healed(small.decoder("Llama"), steps=2, folder=tmp_path / type(error).__name__, every=1)

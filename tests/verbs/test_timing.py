"""Times of a cut model: what is timed and what is refused. How fast it is, is a benchmark."""

from __future__ import annotations

import pytest

import headwise as hw
from headwise.verbs.timing import check_timed, timing
from tests.measures.tiny import llama
from tests.surgery.small import whisper


def test_three_models_and_the_layers_that_were_cut() -> None:
    model = hw.wrap(llama())
    small = hw.prune(model, {"model.layers.0": [0, 1], "model.layers.2": [3]}, repair="none")
    found = timing(model, small, batch=2, length=500, repeats=3)
    assert (found.batch, found.length, found.repeats) == (2, 64, 3)
    assert [one.block for one in found.layers] == ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    assert all(one.before > 0 and one.after > 0 for one in found.layers)
    assert len(found.ratios) == 3
    assert min(found.ratios) < found.speedup < max(found.ratios)
    assert found.speedup in found.ratios
    assert found.to_document()["gated"] == found.gated > 0
    assert not model.module.model.layers[0].self_attn._forward_pre_hooks


def test_what_is_refused() -> None:
    model = hw.wrap(llama())
    small = hw.prune(model, {"model.layers.0": [0]}, repair="none")
    with pytest.raises(hw.HeadwiseError, match="batch must be a whole number"):
        timing(model, small, batch=0)
    with pytest.raises(hw.HeadwiseError, match="no record of a cut"):
        timing(model, model)
    heard = hw.wrap(whisper())
    with pytest.raises(hw.HeadwiseError, match="only models of text"):
        check_timed(heard)
    with pytest.raises(hw.HeadwiseError, match="only models of text"):
        timing(heard, hw.prune(heard, {"model.encoder.layers.0": [0]}, repair="none"))


def test_a_model_without_a_record_is_timed_by_what_it_lacks() -> None:
    model = hw.wrap(llama())
    bare = hw.wrap(hw.prune(model, {"model.layers.0": [0, 1]}, repair="none").module)
    assert bare.surgery is None
    found = timing(model, bare, removed=hw.verify(model, bare).removed, batch=2, length=8, repeats=1)
    assert [one.block for one in found.layers] == ["model.layers.0.self_attn"]

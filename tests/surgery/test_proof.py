"""The proof can fail: a cut that is wrong in any of its parts is noticed, and says where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.surgery import cutting, prune
from headwise.surgery.slices import Slice
from tests.surgery import small
from tests.surgery.small import IDS

PLAN = {"encoder.layer.0.attention.self": [1]}


def test_what_a_proof_says() -> None:
    proof = prune(small.bert(), PLAN, repair="none").surgery.proof  # type: ignore[union-attr]
    assert [(one.module, one.call) for one in proof.layers] == [("encoder.layer.0.attention.output.dense", 0)]
    assert proof.bound == 1e-5
    assert proof.layers[0].difference <= 1e-5 * proof.layers[0].largest
    assert proof.end_to_end <= 1e-4 * proof.largest
    assert proof.noise is not None
    assert proof.noise < 1e-4


@pytest.mark.parametrize("spoil", ["query", "key", "value", "bias"])
def test_wrong_rows_are_noticed(monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    """The rows of another head: the shapes are right, and the numbers are not."""
    right = cutting.projection_slices
    target = "value.bias" if spoil == "bias" else f"{spoil}.weight"

    def wrong(*given: Any) -> list[Slice]:
        return [
            Slice(one.path, one.axis, (*range(5), *range(5, 10), *range(10, 15))) if one.path.endswith(target) else one
            for one in right(*given)
        ]

    monkeypatch.setattr(cutting, "projection_slices", wrong)
    with pytest.raises(
        UnsupportedError, match=r"layer\.0\.attention\.self .* cannot be cut out: its output would differ by"
    ):
        prune(small.bert(), PLAN, repair="none")


def test_wrong_columns_of_the_output_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cutting.projection_slices

    def wrong(*given: Any) -> list[Slice]:
        return [Slice(one.path, one.axis, tuple(range(15))) if one.axis == 1 else one for one in right(*given)]

    monkeypatch.setattr(cutting, "projection_slices", wrong)
    with pytest.raises(UnsupportedError, match="its output would differ by"):
        prune(small.bert(), PLAN, repair="none")


def test_case_28_the_naive_grouping_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads in 2 groups after 0 and 1 of 6 went: counts that divide, and the wrong key-value head."""
    from dataclasses import replace

    right = cutting.tellings

    def naive(*given: Any) -> Any:
        for telling in right(*given):
            yield replace(telling, kv_map=None, attributes={**telling.attributes, "num_key_value_groups": 2})

    model = small.decoder("Llama", num_attention_heads=6, hidden_size=36)
    monkeypatch.setattr(cutting, "tellings", naive)
    with pytest.raises(UnsupportedError, match="its output would differ by"):
        prune(model, {"model.layers.0.self_attn": [0, 1]}, repair="none")


class Reader(nn.Module):
    """A model in which something outside a layer reads how many keys it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = small.bert()
        self.config = self.inner.config
        self.main_input_name = "input_ids"

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_ids=input_ids).last_hidden_state
        keys: torch.Tensor = self.inner.encoder.layer[0].attention.self.key(hidden)
        return hidden + keys.sum(-1, keepdim=True)


def test_a_reader_outside_the_layer_is_noticed() -> None:
    with pytest.raises(UnsupportedError, match=r"every layer is right .* outside the layers reads"):
        prune(
            Reader(),
            {"inner." + path: heads for path, heads in PLAN.items()},
            repair="none",
            example={"input_ids": IDS},
        )


def test_an_input_that_the_model_does_not_take() -> None:
    bert = small.bert()
    small.outputs(bert, input_ids=IDS)
    with pytest.raises(InputError, match="does not run on the input of the proof"):
        prune(bert, PLAN, repair="none", example={"input_ids": torch.full((2, 3), 99)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_have_bounds_of_their_own(dtype: torch.dtype) -> None:
    pruned = prune(small.bert().to(dtype), PLAN, repair="none")
    assert pruned.surgery is not None
    assert pruned.surgery.proof.bound == {torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert pruned.dtype == dtype
